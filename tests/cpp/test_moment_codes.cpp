// 8-bit moments: the guarantees of the codes, and AdamW's step over them against a scalar reference on every
// instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/optimizers.hpp"
#include "kernels/rules/moment_codes.hpp"
#include "reference.hpp"

namespace fsdp2x {
namespace {

using reference::Buffer;

// --- by the definition -----------------------------------------------------------------------------------------------

float part_of(int code, int top) {
  const float root = static_cast<float>(code) * (1.0f / static_cast<float>(top));
  return (root * root) * (root * root);
}

float decoded(uint8_t bits, bool is_signed, float scale) {
  const int code = is_signed ? static_cast<int8_t>(bits) : bits;
  return (code < 0 ? -part_of(-code, 127) : part_of(code, is_signed ? 127 : 255)) * scale;
}

// `random`: of 65536, or negative to round to the nearest.
uint8_t encoded(float value, bool is_signed, float scale, int random) {
  const int top = is_signed ? 127 : 255;
  const float part = std::fabs(value) * (scale == 0.0f ? 0.0f : 1.0f / scale);
  float place = std::sqrt(std::sqrt(part)) * static_cast<float>(top);
  if (!(place < static_cast<float>(top))) place = static_cast<float>(top);
  int code = static_cast<int>(std::floor(random < 0 ? place + 0.5f : place));
  if (random >= 0 && place < static_cast<float>(top)) {
    const float low = part_of(code, top), high = part_of(code + 1, top);
    if (static_cast<float>(random) * (high - low) < (part - low) * 65536.0f) ++code;
  }
  if (!is_signed && code == 0 && value > 0.0f) code = 1;
  return static_cast<uint8_t>(is_signed && value < 0.0f ? -code : code);
}

// Codes and scales of a moment, and the expected ones.
struct Coded {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  bool is_signed;

  Coded(int64_t numel, bool is_signed_, std::mt19937_64& random)
      : codes(static_cast<size_t>(numel)),
        scales(static_cast<size_t>((numel + kMomentBlock - 1) / kMomentBlock)),
        is_signed(is_signed_) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    std::lognormal_distribution<float> size(0.0f, 3.0f);
    for (float& scale : scales) scale = random() % 20 == 0 ? 0.0f : size(random);
  }
  float get(int64_t i) const {
    return decoded(codes[static_cast<size_t>(i)], is_signed, scales[static_cast<size_t>(i / kMomentBlock)]);
  }
  void set(const std::vector<float>& values, const std::vector<int>& bits) {
    for (size_t block = 0; block < scales.size(); ++block) {
      const size_t begin = block * kMomentBlock, end = std::min(begin + kMomentBlock, values.size());
      float peak = 0.0f;
      bool is_lost = false;
      for (size_t i = begin; i < end; ++i) {
        peak = std::max(peak, std::fabs(values[i]));
        is_lost |= std::isnan(values[i]);
      }
      scales[block] = is_lost ? std::numeric_limits<float>::quiet_NaN() : peak < 0x1p-126f ? 0.0f : peak;
      for (size_t i = begin; i < end; ++i) codes[i] = encoded(values[i], is_signed, scales[block], bits[i]);
    }
  }
  void expect_equal(const Coded& other, const std::string& what) const {
    EXPECT_EQ(codes, other.codes) << what;
    for (size_t i = 0; i < scales.size(); ++i) {
      if (std::isnan(scales[i]) && std::isnan(other.scales[i])) continue;
      ASSERT_EQ(scales[i], other.scales[i]) << what << ", scale " << i;
    }
  }
};

// --- what the codes promise ------------------------------------------------------------------------------------------

template <bool kSigned>
void expect_codes_stay() {
  for (const float scale : {1.0f, 0x1p-126f, 3e-20f, 0.37f, 1e30f, 3e38f}) {
    const float inverse = inverse_moment_scale(moment_scale(scale));
    for (int code = kSigned ? -127 : 1; code <= (kSigned ? 127 : 255); ++code) {
      const auto bits = static_cast<uint8_t>(code);
      const float value = decoded_moment<kSigned>(bits, scale);
      if (std::fabs(value) < 0x1p-126f) continue;  // bits of the value are missing
      ASSERT_EQ((encoded_moment<kSigned, false>(value, inverse, 0)), bits) << scale << " " << code;
      ASSERT_EQ(value, decoded(bits, kSigned, scale));
    }
    EXPECT_EQ(decoded_moment<kSigned>(kSigned ? 127 : 255, scale), scale) << "the largest is exact";
  }
}

TEST(MomentCodes, WhatCodesSayHasTheseCodesAgain) {
  expect_codes_stay<true>();
  expect_codes_stay<false>();
}

TEST(MomentCodes, SquaresAboveZeroNeverBecomeZero) {
  for (const float value : {1e-12f, 1e-37f, 1e-44f}) {
    EXPECT_EQ((encoded_moment<false, false>(value, 1.0f, 0)), 1);
    EXPECT_EQ((encoded_moment<false, true>(value, 1.0f, 65535)), 1);
    EXPECT_EQ((encoded_moment<true, false>(value, 1.0f, 0)), 0);
  }
  EXPECT_EQ((encoded_moment<false, false>(0.0f, 1.0f, 0)), 0);
  EXPECT_EQ((encoded_moment<false, true>(0.0f, 1.0f, 0)), 0);
}

TEST(MomentCodes, BlocksThatAreLostSayIt) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float peak : {larger_peak(larger_peak(1.0f, nan), 2.0f), larger_peak(1.0f, infinity)}) {
    const float scale = moment_scale(peak), inverse = inverse_moment_scale(scale);
    for (const float value : {infinity, nan}) {
      EXPECT_FALSE(std::isfinite(decoded_moment<true>(encoded_moment<true, false>(value, inverse, 0), scale)));
      EXPECT_FALSE(std::isfinite(decoded_moment<false>(encoded_moment<false, true>(value, inverse, 9), scale)));
    }
  }
}

TEST(MomentCodes, StochasticRoundingIsRightOnAverage) {
  std::mt19937_64 random(3);
  for (const float value : {0.9f, 0.31f, -0.02f, 3e-5f}) {
    double sum = 0.0;
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) {
      sum += decoded_moment<true>(encoded_moment<true, true>(value, 1.0f, random() % 65536), 1.0f);
    }
    // Five standard deviations, for steps of a seventh at most.
    EXPECT_NEAR(sum / kDraws, value, std::fabs(value) * 0.5 * 5 / std::sqrt(kDraws)) << value;
  }
}

// --- the step --------------------------------------------------------------------------------------------------------

class CodedAdamW : public reference::EveryIsa {};

TEST_P(CodedAdamW, EqualsItsReference) {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const AdamWStep step = {0.999f, 0.1f, 0.999f, 0.001f, 0.05f, 1e-8f, -1e-2f, -1.0f};
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool amsgrad : {false, true}) {
      for (const bool stochastic : {false, true}) {
        for (const int64_t numel : {0, 1, 15, 255, 256, 257, 1023, 1024, 1025, 4099}) {
          Buffer param(type, numel), grad(type, numel);
          for (int64_t i = 0; i < numel; ++i) {
            param.set(i, normal(random));
            grad.set(i, random() % 7 == 0 ? 0.0f : normal(random));
            if (random() % 900 == 0) grad.set(i, std::numeric_limits<float>::infinity());
            if (random() % 900 == 0) grad.set(i, std::numeric_limits<float>::quiet_NaN());
          }
          Coded m(numel, true, random), v(numel, false, random), largest(numel, false, random);
          const cpu::Rounding rounding = {{0x123456789abcdefULL, 3}, (uint64_t{5} << 40) + 3, 300, 404, 256};
          Buffer param_expected = param;
          Coded m_expected = m, v_expected = v, largest_expected = largest;
          std::vector<float> new_m, new_v, new_largest;
          std::vector<int> m_bits, v_bits;
          for (int64_t i = 0; i < numel; ++i) {
            const float g = -grad.get_float(i);
            const float old = m.get(i);
            new_m.push_back(std::fma(step.weight, g - old, old));
            new_v.push_back(std::fma(step.one_minus_beta2 * g, g, v.get(i) * step.beta2));
            float second = new_v.back();
            if (amsgrad) second = std::isnan(second) ? second : std::max(second, largest.get(i));
            new_largest.push_back(second);
            const float moved = param.get_float(i) * step.decay +
                                step.neg_step_size * new_m.back() / (std::sqrt(second) / step.sqrt_bias2 + step.eps);
            const auto number = rounding.first + static_cast<uint64_t>((256 + i) / 300 * 404 + (256 + i) % 300);
            const auto bits = [&](Draw draw) {
              return rounding_bits(rounding_block(rounding.key, draw, number), number);
            };
            if (stochastic && type == DType::bf16) {
              param_expected.set_raw(i, stochastic_bf16(reference::to_bits(moved), bits(Draw::param)));
            } else {
              param_expected.set(i, moved);
            }
            m_bits.push_back(stochastic ? static_cast<int>(bits(Draw::exp_avg)) : -1);
            v_bits.push_back(stochastic ? static_cast<int>(bits(Draw::exp_avg_sq)) : -1);
          }
          m_expected.set(new_m, m_bits);
          v_expected.set(new_v, v_bits);
          if (amsgrad) largest_expected.set(new_largest, v_bits);
          cpu::AdamWPiece piece;
          piece.type = type;
          piece.moments = DType::byte;
          piece.param = param.data();
          piece.grad = grad.data();
          piece.exp_avg = m.codes.data();
          piece.exp_avg_sq = v.codes.data();
          piece.max_exp_avg_sq = amsgrad ? largest.codes.data() : nullptr;
          piece.exp_avg_scales = m.scales.data();
          piece.exp_avg_sq_scales = v.scales.data();
          piece.max_exp_avg_sq_scales = largest.scales.data();
          piece.numel = numel;
          piece.rounding = stochastic ? &rounding : nullptr;
          cpu::adamw(piece, step);
          const std::string what = std::string(dtype_name(type)) + " " + std::to_string(numel) + " elements" +
                                   (amsgrad ? ", amsgrad" : "") + (stochastic ? ", stochastic" : "");
          EXPECT_TRUE(param.equals(param_expected, false)) << what;
          m.expect_equal(m_expected, "exp_avg of " + what);
          v.expect_equal(v_expected, "exp_avg_sq of " + what);
          largest.expect_equal(largest_expected, "max_exp_avg_sq of " + what);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, CodedAdamW, reference::kAllIsas, reference::isa_name);

}  // namespace
}  // namespace fsdp2x
