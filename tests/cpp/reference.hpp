// Plain scalar versions of the kernels' arithmetic, written from the definitions of the formats, and buffers of
// difficult values to compare them on.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "kernels/cpu/kernel_table.hpp"

namespace fsdp2x::reference {

inline constexpr std::array<DType, 4> kTypes = {DType::f32, DType::f64, DType::bf16, DType::f16};

// A 16-bit format: sign, exponent from `min_exponent` on, `mantissa_bits`.
struct Format {
  int mantissa_bits;
  int min_exponent;
  uint16_t infinity;
  bool quiets_when_widened;  // the f16 conversion instruction does, the bf16 shift does not
};
inline constexpr Format kBf16 = {7, -126, 0x7f80, false};
inline constexpr Format kF16 = {10, -14, 0x7c00, true};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline uint16_t encode(float value, const Format& format) {
  const uint32_t bits = to_bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const auto quiet = static_cast<uint16_t>(1 << (format.mantissa_bits - 1));
  if (std::isnan(value)) {
    const uint32_t payload = (bits & 0x7fffffu) >> (23 - format.mantissa_bits);
    return static_cast<uint16_t>(sign | format.infinity | quiet | payload);
  }
  if (std::isinf(value)) return sign | format.infinity;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0.0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), format.min_exponent);
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));  // to nearest even
  const int64_t code =
      (static_cast<int64_t>(exponent - format.min_exponent) << format.mantissa_bits) + static_cast<int64_t>(steps);
  return static_cast<uint16_t>(sign | std::min<int64_t>(code, format.infinity));
}

inline float decode(uint16_t code, const Format& format) {
  const bool negative = (code & 0x8000) != 0;
  const int mantissa = code & ((1 << format.mantissa_bits) - 1);
  const int exponent = (code & 0x7fff) >> format.mantissa_bits;
  if ((code & 0x7fff) > format.infinity) {
    uint32_t bits = 0x7f800000u | (static_cast<uint32_t>(mantissa) << (23 - format.mantissa_bits));
    if (format.quiets_when_widened) bits |= 0x400000u;
    return from_bits(bits | (negative ? 0x80000000u : 0u));
  }
  double value = std::numeric_limits<double>::infinity();
  if ((code & 0x7fff) < format.infinity) {
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
    value = std::ldexp(whole, std::max(exponent, 1) - 1 + format.min_exponent - format.mantissa_bits);
  }
  return static_cast<float>(negative ? -value : value);
}

// One buffer of `numel` elements with room before and after, to start unaligned and to detect writes past the end.
class Buffer {
 public:
  static constexpr size_t kGuard = 64;
  Buffer(DType type, int64_t numel) : type_(type), numel_(numel), start_(kGuard + dtype_bytes(type)) {
    bytes_.assign(start_ + static_cast<size_t>(numel) * dtype_bytes(type) + kGuard, std::byte{0xa5});
  }
  DType type() const { return type_; }
  void* data() { return bytes_.data() + start_; }
  const void* data() const { return bytes_.data() + start_; }

  template <class T>
  T raw(int64_t index) const {
    T value;
    std::memcpy(&value, bytes_.data() + start_ + static_cast<size_t>(index) * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set_raw(int64_t index, T value) {
    std::memcpy(bytes_.data() + start_ + static_cast<size_t>(index) * sizeof(T), &value, sizeof(T));
  }
  float get_float(int64_t index) const {
    switch (type_) {
      case DType::f32:
        return raw<float>(index);
      case DType::bf16:
        return decode(raw<uint16_t>(index), kBf16);
      case DType::f16:
        return decode(raw<uint16_t>(index), kF16);
      case DType::byte:
        return raw<uint8_t>(index);
      default:
        return static_cast<float>(raw<double>(index));
    }
  }
  double get_double(int64_t index) const { return type_ == DType::f64 ? raw<double>(index) : get_float(index); }
  void set(int64_t index, float value) {
    switch (type_) {
      case DType::f32:
        return set_raw(index, value);
      case DType::bf16:
        return set_raw(index, encode(value, kBf16));
      case DType::f16:
        return set_raw(index, encode(value, kF16));
      default:
        return set_raw(index, static_cast<double>(value));
    }
  }
  void set(int64_t index, double value) {
    if (type_ == DType::f64) return set_raw(index, value);
    set(index, static_cast<float>(value));
  }

  void fill_random(std::mt19937_64& random) {
    for (int64_t i = 0; i < numel_; ++i) {
      const uint64_t bits = random();
      switch (random() % 4) {
        case 0:  // any bits: NaN, infinities, subnormals
          if (dtype_bytes(type_) == 2) set_raw(i, static_cast<uint16_t>(bits));
          if (type_ == DType::f32) set_raw(i, static_cast<uint32_t>(bits));
          if (type_ == DType::f64) set_raw(i, bits);
          break;
        case 1:  // small whole numbers, with ties after a division
          set(i, static_cast<float>(static_cast<int>(bits % 33) - 16));
          break;
        case 2:  // around the ends of the 16-bit formats' ranges
          set(i, std::ldexp(1.0f + static_cast<float>(bits % 4096) / 4096.0f, static_cast<int>(bits >> 60) * 3 - 28));
          break;
        default:
          set(i, static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-62);
      }
    }
  }

  // Compares bit for bit. `nan_payload` false: any NaN equals any other, as after arithmetic.
  testing::AssertionResult equals(const Buffer& expected, bool nan_payload) const {
    for (int64_t i = 0; i < numel_; ++i) {
      const size_t offset = start_ + static_cast<size_t>(i) * dtype_bytes(type_);
      if (std::memcmp(&bytes_[offset], &expected.bytes_[offset], dtype_bytes(type_)) == 0) continue;
      if (!nan_payload && std::isnan(get_double(i)) && std::isnan(expected.get_double(i))) continue;
      return testing::AssertionFailure() << dtype_name(type_) << " element " << i << " of " << numel_ << ": got "
                                         << get_double(i) << ", expected " << expected.get_double(i);
    }
    const size_t end = start_ + static_cast<size_t>(numel_) * dtype_bytes(type_);
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < start_ || i >= end) && bytes_[i] != std::byte{0xa5}) {
        return testing::AssertionFailure() << "a byte outside the " << numel_ << " elements was written";
      }
    }
    return testing::AssertionSuccess();
  }

 private:
  DType type_;
  int64_t numel_;
  size_t start_;
  std::vector<std::byte> bytes_;
};

// Runs a test once with every instruction set of this processor.
class EveryIsa : public testing::TestWithParam<cpu::Isa> {
 protected:
  void SetUp() override {
    if (!cpu::select_kernels(GetParam())) GTEST_SKIP() << "this processor lacks the instruction set";
  }
};
inline const auto kAllIsas = testing::Values(cpu::Isa::base, cpu::Isa::avx2, cpu::Isa::avx512);
inline std::string isa_name(const testing::TestParamInfo<cpu::Isa>& info) {
  return info.param == cpu::Isa::base ? "base" : info.param == cpu::Isa::avx2 ? "avx2" : "avx512";
}

}  // namespace fsdp2x::reference
