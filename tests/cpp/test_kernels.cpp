// Casts, sums, divisions, and copy plans against their scalar references, bit for bit, on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/kernels.hpp"
#include "reference.hpp"

namespace fsdp2x {
namespace {

using reference::Buffer;
using reference::kTypes;

constexpr int64_t kSizes[] = {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1000, 1023, 1024, 1025, 4099};

class Kernels : public reference::EveryIsa {};

TEST_P(Kernels, CastsEveryPairOfTypes) {
  std::mt19937_64 random(1);
  for (const DType dst_type : kTypes) {
    for (const DType src_type : kTypes) {
      for (const int64_t numel : kSizes) {
        Buffer src(src_type, numel);
        src.fill_random(random);
        Buffer dst(dst_type, numel);
        Buffer expected = dst;
        for (int64_t i = 0; i < numel; ++i) {
          if (src_type == dst_type) {
            std::memcpy(static_cast<std::byte*>(expected.data()) + static_cast<size_t>(i) * dtype_bytes(src_type),
                        static_cast<const std::byte*>(src.data()) + static_cast<size_t>(i) * dtype_bytes(src_type),
                        dtype_bytes(src_type));
          } else if (src_type == DType::f64) {
            expected.set(i, src.get_double(i));
          } else {
            expected.set(i, src.get_float(i));
          }
        }
        cpu::cast_copy(dst_type, dst.data(), src_type, src.data(), numel);
        EXPECT_TRUE(dst.equals(expected, true)) << dtype_name(src_type) << " to " << dtype_name(dst_type);
      }
    }
  }
}

TEST_P(Kernels, WidensEvery16BitValueAndRoundsEveryTie) {
  for (const DType type : {DType::bf16, DType::f16}) {
    const reference::Format& format = type == DType::bf16 ? reference::kBf16 : reference::kF16;
    Buffer all(type, 65536);
    for (int64_t i = 0; i < 65536; ++i) all.set_raw(i, static_cast<uint16_t>(i));
    Buffer wide(DType::f32, 65536);
    Buffer expected = wide;
    for (int64_t i = 0; i < 65536; ++i) expected.set(i, reference::decode(static_cast<uint16_t>(i), format));
    cpu::cast_copy(DType::f32, wide.data(), type, all.data(), 65536);
    ASSERT_TRUE(wide.equals(expected, true));

    // Every value, its neighbours, and the half-way points to the next value and their neighbours.
    std::vector<float> values;
    for (uint32_t code = 0; code < 65536; ++code) {
      const uint32_t bits = reference::to_bits(reference::decode(static_cast<uint16_t>(code), format));
      const uint32_t half = type == DType::bf16 ? 0x8000u : 0x1000u;
      for (const uint32_t b : {bits, bits + 1, bits - 1, bits + half, bits + half + 1, bits + half - 1}) {
        values.push_back(reference::from_bits(b));
      }
      const float next = reference::decode(static_cast<uint16_t>(code + 1), format);
      if (std::isfinite(next)) values.push_back((next + reference::decode(static_cast<uint16_t>(code), format)) / 2.0f);
    }
    const auto numel = static_cast<int64_t>(values.size());
    Buffer narrow(type, numel);
    Buffer rounded = narrow;
    for (int64_t i = 0; i < numel; ++i) rounded.set(i, values[static_cast<size_t>(i)]);
    cpu::cast_copy(type, narrow.data(), DType::f32, values.data(), numel);
    EXPECT_TRUE(narrow.equals(rounded, true));
  }
}

TEST_P(Kernels, KnownValues) {
  const std::vector<std::pair<float, uint16_t>> bf16 = {
      {1.0f, 0x3f80}, {-0.0f, 0x8000}, {1.00390625f, 0x3f80}, {1.01171875f, 0x3f82}, {3.4e38f, 0x7f80}};
  const std::vector<std::pair<float, uint16_t>> f16 = {{1.0f, 0x3c00},      {65504.0f, 0x7bff}, {65520.0f, 0x7c00},
                                                       {-65519.0f, 0xfbff}, {0x1p-24f, 1},      {0x1p-25f, 0}};
  for (const auto& [type, values] : {std::pair(DType::bf16, bf16), std::pair(DType::f16, f16)}) {
    for (const auto& [value, code] : values) {
      uint16_t got = 0;
      cpu::cast_copy(type, &got, DType::f32, &value, 1);
      EXPECT_EQ(got, code) << dtype_name(type) << " of " << value;
    }
  }
}

TEST_P(Kernels, AddsEveryPairOfTypes) {
  std::mt19937_64 random(2);
  for (const DType dst_type : kTypes) {
    for (const DType src_type : kTypes) {
      for (const int64_t numel : kSizes) {
        Buffer src(src_type, numel);
        Buffer dst(dst_type, numel);
        src.fill_random(random);
        dst.fill_random(random);
        Buffer expected = dst;
        for (int64_t i = 0; i < numel; ++i) {
          if (dst_type == DType::f64 || src_type == DType::f64) {
            expected.set(i, dst.get_double(i) + src.get_double(i));
          } else {
            expected.set(i, dst.get_float(i) + src.get_float(i));
          }
        }
        cpu::add(dst_type, dst.data(), src_type, src.data(), numel);
        EXPECT_TRUE(dst.equals(expected, false)) << dtype_name(dst_type) << " += " << dtype_name(src_type);
      }
    }
  }
}

TEST_P(Kernels, Divides) {
  std::mt19937_64 random(3);
  for (const DType type : kTypes) {
    for (const double divisor : {1.0, 2.0, 3.0, 7.0, 8.0, 0.25, -2.0, 0.1, 0x1p127, 0x1p-127, 0x1p-140}) {
      for (const int64_t numel : kSizes) {
        Buffer values(type, numel);
        values.fill_random(random);
        Buffer expected = values;
        for (int64_t i = 0; i < numel; ++i) {
          if (type == DType::f64) {
            expected.set(i, values.get_double(i) / divisor);
          } else {
            expected.set(i, values.get_float(i) / static_cast<float>(divisor));
          }
        }
        cpu::divide(type, values.data(), numel, divisor);
        EXPECT_TRUE(values.equals(expected, false)) << dtype_name(type) << " / " << divisor;
      }
    }
  }
}

TEST_P(Kernels, RunsStridedCopies) {
  std::mt19937_64 random(4);
  for (const auto& [src_type, dst_type] :
       {std::pair(DType::f32, DType::f32), std::pair(DType::f32, DType::bf16), std::pair(DType::bf16, DType::bf16),
        std::pair(DType::f64, DType::f64), std::pair(DType::f16, DType::f32), std::pair(DType::byte, DType::byte)}) {
    for (const int64_t piece : {1, 2, 3, 4, 5, 8, 40}) {
      constexpr int64_t kCount = 9;
      const int64_t src_stride = piece + 3;
      const int64_t dst_stride = piece + 1;
      const int64_t total = kCount * (piece + 3);
      Buffer src(src_type, total);
      if (src_type != DType::byte) src.fill_random(random);
      if (src_type == DType::byte) {
        for (int64_t i = 0; i < total; ++i) src.set_raw(i, static_cast<uint8_t>(random()));
      }
      Buffer dst(dst_type, total);
      Buffer expected = dst;
      const size_t src_bytes = dtype_bytes(src_type);
      const size_t dst_bytes = dtype_bytes(dst_type);
      for (int64_t c = 0; c < kCount; ++c) {
        cpu::cast_copy(
            dst_type, static_cast<std::byte*>(expected.data()) + static_cast<size_t>(2 + c * dst_stride) * dst_bytes,
            src_type, static_cast<const std::byte*>(src.data()) + static_cast<size_t>(c * src_stride) * src_bytes,
            piece);
      }
      Copy copy;
      copy.dst_offset = 2 * dst_bytes;
      copy.count = kCount;
      copy.piece_numel = piece;
      copy.src_stride = src_stride;
      copy.dst_stride = dst_stride;
      copy.src = src_type;
      copy.dst = dst_type;
      Buffer in_ranges = dst;
      cpu::run_copies({&copy, 1}, src.data(), dst.data());
      const int64_t numel = copy.count * copy.piece_numel;
      for (const int64_t cut : {int64_t{1}, numel / 2, numel - 1}) {
        cpu::run_copy(copy, cut, numel, src.data(), in_ranges.data());
        cpu::run_copy(copy, 0, cut, src.data(), in_ranges.data());
        EXPECT_TRUE(in_ranges.equals(dst, false)) << "cut at " << cut;
      }
      EXPECT_EQ(std::memcmp(dst.data(), expected.data(), static_cast<size_t>(total) * dst_bytes), 0)
          << dtype_name(src_type) << " to " << dtype_name(dst_type) << ", pieces of " << piece;
    }
  }
}

TEST_P(Kernels, BytesAreOnlyMoved) {
  std::byte data[8] = {};
  float value = 0;
  cpu::cast_copy(DType::byte, data, DType::byte, &value, 4);
  EXPECT_THROW(cpu::cast_copy(DType::f32, &value, DType::byte, data, 1), Error);
  EXPECT_THROW(cpu::cast_copy(DType::byte, data, DType::f32, &value, 1), Error);
  EXPECT_THROW(cpu::add(DType::byte, data, DType::byte, &value, 1), Error);
  EXPECT_THROW(cpu::divide(DType::byte, data, 1, 2.0), Error);
}

TEST_P(Kernels, LargeCopiesGoPastTheCaches) {
  std::mt19937_64 random(9);
  for (const size_t extra : {0, 31, 1001}) {
    const auto numel = static_cast<int64_t>((cpu::kStreamCopyBytes + extra) / 2);
    for (const DType type : {DType::bf16, DType::f64}) {
      Buffer src(type, numel), dst(type, numel);
      src.fill_random(random);
      cpu::cast_copy(type, dst.data(), type, src.data(), numel);
      EXPECT_TRUE(dst.equals(src, false)) << dtype_name(type) << " and " << extra;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Kernels, reference::kAllIsas, reference::isa_name);

}  // namespace
}  // namespace fsdp2x
