// Wire formats: the guarantees of the codes, and the loops against scalar references on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "core/wire_layout.hpp"
#include "kernels/cpu/wire.hpp"
#include "reference.hpp"

namespace fsdp2x {
namespace {

using reference::Buffer;

// --- by the definition -----------------------------------------------------------------------------------------------

// All nonnegative values of e4m3, by code.
std::vector<double> fp8_values() {
  std::vector<double> values;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3, mantissa = code & 7;
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  }
  return values;
}

double top_of(WireFormat format) { return format == WireFormat::fp8 ? 448.0 : 127.0; }

float value_of(WireFormat format, uint8_t code) {
  if (format == WireFormat::int8) return static_cast<int8_t>(code);
  static const std::vector<double> values = fp8_values();
  const auto magnitude = static_cast<float>(values.at(code & 127));
  return (code & 128) != 0 ? -magnitude : magnitude;
}

// The nearest code, ties to the even one.
uint8_t code_of(WireFormat format, float place) {
  if (std::isnan(place)) return 0;
  const double bounded = std::clamp<double>(place, -top_of(format), top_of(format));
  if (format == WireFormat::int8) return static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(bounded)));
  static const std::vector<double> values = fp8_values();
  const double magnitude = std::fabs(bounded);
  size_t best = 0;
  for (size_t code = 1; code < values.size(); ++code) {
    const double old = std::fabs(values[best] - magnitude), now = std::fabs(values[code] - magnitude);
    if (now < old || (now == old && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(place) ? 128 : 0));
}

float scale_of(WireFormat format, const std::vector<float>& values, size_t begin, size_t end) {
  float peak = 0.0f;
  for (size_t i = begin; i < end; ++i) {
    if (std::isnan(values[i])) return values[i];
    peak = std::max(peak, std::fabs(values[i]));
  }
  const float scale = peak / static_cast<float>(top_of(format));
  return scale == 0.0f ? 1.0f : scale;
}

struct Coded {
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  explicit Coded(int64_t numel)
      : codes(static_cast<size_t>(numel)), scales(static_cast<size_t>(num_wire_blocks(numel))) {}
  void set(WireFormat format, const std::vector<float>& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t begin = i / kWireBlock * kWireBlock, end = std::min(begin + kWireBlock, values.size());
      if (i == begin) scales[i / kWireBlock] = scale_of(format, values, begin, end);
      codes[i] = code_of(format, values[i] / scales[i / kWireBlock]);
    }
  }
  float get(WireFormat format, size_t i) const { return value_of(format, codes[i]) * scales[i / kWireBlock]; }
  void expect_equal(const Coded& other, const std::string& what) const {
    EXPECT_EQ(codes, other.codes) << what;
    for (size_t i = 0; i < scales.size(); ++i) {
      if (std::isnan(scales[i]) && std::isnan(other.scales[i])) continue;
      ASSERT_EQ(scales[i], other.scales[i]) << what << ", scale " << i;
    }
  }
};

std::vector<float> values_of(const Buffer& buffer, int64_t numel) {
  std::vector<float> values;
  for (int64_t i = 0; i < numel; ++i) values.push_back(buffer.get_float(i));
  return values;
}

void fill(Buffer& buffer, int64_t numel, std::mt19937_64& random, bool with_lost) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < numel; ++i) {
    const float size = i / kWireBlock % 3 == 1 ? 0x1p-14f : 1.0f;
    buffer.set(i, i / kWireBlock % 5 == 4 ? 0.0f : normal(random) * size);
    if (with_lost && random() % 1500 == 0) buffer.set(i, std::numeric_limits<float>::infinity());
    if (with_lost && random() % 1500 == 0) buffer.set(i, std::numeric_limits<float>::quiet_NaN());
  }
}

void expect_same_float(float got, float expected, const std::string& what) {
  if (std::isnan(got) && std::isnan(expected)) return;
  ASSERT_EQ(got, expected) << what;
}

// --- codes -----------------------------------------------------------------------------------------------------------

TEST(WireCodes, AllOfThemDecodeToWhatTheyAreAndBack) {
  for (int code = -127; code <= 127; ++code) {
    EXPECT_EQ(decoded_int8(static_cast<uint8_t>(code), 0.5f), static_cast<float>(code) * 0.5f);
    EXPECT_EQ(encoded_int8(static_cast<float>(code) * 0.5f, 0.5f), static_cast<uint8_t>(code));
  }
  for (int code = 0; code < 256; ++code) {
    if ((code & 127) == 127) continue;  // NaN
    const auto bits = static_cast<uint8_t>(code);
    EXPECT_EQ(decoded_fp8(bits, 0.5f), value_of(WireFormat::fp8, bits) * 0.5f) << code;
    EXPECT_EQ(encoded_fp8(decoded_fp8(bits, 0.5f), 0.5f), bits) << code;
  }
}

TEST(WireCodes, TheNearestIsTaken) {
  std::mt19937_64 random(5);
  std::uniform_real_distribution<float> exponent(-12.0f, 9.0f);
  const std::vector<double> values = fp8_values();
  for (int i = 0; i < 20000; ++i) {
    const float place = std::exp2(exponent(random)) * (random() % 2 == 0 ? 1.0f : -1.0f);
    ASSERT_EQ(encoded_fp8(place, 1.0f), code_of(WireFormat::fp8, place)) << place;
    ASSERT_EQ(encoded_int8(place, 1.0f), code_of(WireFormat::int8, place)) << place;
  }
  for (size_t code = 0; code + 1 < values.size(); ++code) {
    const auto tie = static_cast<float>((values[code] + values[code + 1]) / 2);
    ASSERT_EQ(encoded_fp8(tie, 1.0f), code % 2 == 0 ? code : code + 1) << tie;
  }
}

// --- loops -----------------------------------------------------------------------------------------------------------

class WireLoops : public reference::EveryIsa {};

TEST_P(WireLoops, EncodeAndDecodeAsTheirReferences) {
  std::mt19937_64 random(1);
  for (const WireFormat format : {WireFormat::int8, WireFormat::fp8}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t numel : {0, 1, 15, 255, 256, 257, 1023, 1024, 1025, 4099}) {
        const std::string what =
            std::to_string(static_cast<int>(format)) + " " + dtype_name(type) + " " + std::to_string(numel);
        Buffer source(type, numel);
        fill(source, numel, random, /*with_lost=*/true);
        Coded got(numel), reference(numel);
        cpu::encode_wire(format, got.codes.data(), got.scales.data(), type, source.data(), numel);
        reference.set(format, values_of(source, numel));
        got.expect_equal(reference, what);
        for (const int64_t first : {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{256}, int64_t{700}}) {
          if (first > numel) continue;
          Buffer decoded(type, numel - first), expected(type, numel - first);
          cpu::decode_wire(format, type, decoded.data(), got.codes.data(), got.scales.data(), first, numel - first);
          for (int64_t i = 0; i < numel - first; ++i) {
            expected.set(i, reference.get(format, static_cast<size_t>(first + i)));
            expect_same_float(decoded.get_float(i), expected.get_float(i), what + " at " + std::to_string(i));
          }
        }
      }
    }
  }
}

TEST_P(WireLoops, ErrorsAreAddedToTheNextValues) {
  std::mt19937_64 random(2);
  for (const int64_t numel : {1, 256, 1000, 4099}) {
    Coded got(numel), reference(numel), errors(numel), expected_errors(numel);
    for (int step = 0; step < 4; ++step) {
      Buffer source(DType::f32, numel);
      fill(source, numel, random, /*with_lost=*/step == 1);
      std::vector<float> wanted = values_of(source, numel);
      cpu::encode_int8_with_errors(got.codes.data(), got.scales.data(), errors.codes.data(), errors.scales.data(),
                                   wanted.data(), numel);
      for (size_t i = 0; i < wanted.size(); ++i) wanted[i] += expected_errors.get(WireFormat::int8, i);
      reference.set(WireFormat::int8, wanted);
      for (size_t i = 0; i < wanted.size(); ++i) {
        const float scale = reference.scales[i / kWireBlock];
        const float left_scale = std::isfinite(scale) ? scale / 254.0f : 0.0f;
        const float left = wanted[i] - reference.get(WireFormat::int8, i);
        expected_errors.scales[i / kWireBlock] = left_scale;
        expected_errors.codes[i] = code_of(WireFormat::int8, left / left_scale);
      }
      got.expect_equal(reference, "codes");
      errors.expect_equal(expected_errors, "errors");
    }
  }
}

TEST_P(WireLoops, SumsAreThoseOfWhatIsDecoded) {
  std::mt19937_64 random(3);
  const int64_t numel = 1500;
  Buffer source(DType::f32, numel);
  fill(source, numel, random, /*with_lost=*/false);
  for (const WireFormat format : {WireFormat::int8, WireFormat::bf16}) {
    Coded coded(2 * numel);
    std::vector<float> sums(static_cast<size_t>(numel), 0.25f), decoded(static_cast<size_t>(numel));
    cpu::encode_wire(format, coded.codes.data(), coded.scales.data(), DType::f32, source.data(), numel);
    cpu::decode_wire(format, DType::f32, decoded.data(), coded.codes.data(), coded.scales.data(), 0, numel);
    cpu::add_wire(format, sums.data(), coded.codes.data(), coded.scales.data(), numel);
    for (size_t i = 0; i < sums.size(); ++i) ASSERT_EQ(sums[i], 0.25f + decoded[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, WireLoops, reference::kAllIsas, reference::isa_name);

// --- layout ----------------------------------------------------------------------------------------------------------

TEST(WireLayout, VectorsTravelAsTheyAreAndPiecesAreAligned) {
  std::vector<ParamShape> shapes(4);
  shapes[0] = {1, 70, 16, DType::f32, DType::bf16, DType::f32, true, true};
  shapes[1] = {1, 70, 1, DType::f32, DType::bf16, DType::f32, true, true};
  shapes[2] = {3, 10, 4, DType::f32, DType::f64, DType::f64, true, true};
  shapes[3] = {1, 8, 8, DType::f32, DType::f32, DType::f32, false, false};
  const Layout layout(shapes, 5, 0);
  const WireLayout weights = WireLayout::of_weights(layout, WireFormat::int8);
  EXPECT_TRUE(weights.places()[0].is_coded);
  EXPECT_EQ(weights.places()[0].scales_offset, 256u);  // 14 rows of 16
  EXPECT_EQ(weights.places()[1].offset, 320u);
  EXPECT_FALSE(weights.places()[1].is_coded);
  EXPECT_FALSE(weights.places()[2].is_coded);  // f64
  EXPECT_EQ(weights.places()[2].offset, 384u);
  EXPECT_FALSE(weights.places()[3].travels);
  EXPECT_EQ(weights.segment_bytes(), 384u + 192u);
  const WireLayout gradients =
      WireLayout::of_gradients(layout.training({true, false, false, false}), WireFormat::bf16, 32);
  EXPECT_EQ(gradients.tail_offset(), 448u);  // two bytes an element
  EXPECT_EQ(gradients.segment_bytes(), 512u);
}

}  // namespace
}  // namespace fsdp2x
