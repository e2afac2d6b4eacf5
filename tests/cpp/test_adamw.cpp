// Optimizer steps, sums of squares, and multiplication against scalar references, bit for bit, on every instruction
// set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/optimizers.hpp"
#include "reference.hpp"

namespace fsdp2x {
namespace {

using reference::Buffer;

constexpr int64_t kSizes[] = {0, 1, 7, 15, 16, 17, 33, 1000, 1023, 1024, 1025, 4099};

class Optimizer : public reference::EveryIsa {};

// Ordinary values and a few special ones: zeros of both signs, infinities, NaN.
void fill(Buffer& buffer, int64_t numel, std::mt19937_64& random, bool positive = false) {
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < numel; ++i) {
    float value = normal(random);
    if (random() % 50 == 0) value = (random() % 2 == 0) ? 0.0f : -0.0f;
    if (random() % 100 == 0) value = std::numeric_limits<float>::infinity();
    if (random() % 100 == 0) value = std::numeric_limits<float>::quiet_NaN();
    buffer.set(i, positive ? std::fabs(value) : value);
  }
}

AdamWStep adamw_step(double beta1, bool maximize) {
  AdamWStep step;
  step.decay = static_cast<float>(1.0 - 1e-2 * 0.1);
  step.weight = static_cast<float>(1.0 - beta1);
  step.beta2 = 0.999f;
  step.one_minus_beta2 = static_cast<float>(1.0 - 0.999);
  step.sqrt_bias2 = static_cast<float>(std::sqrt(1.0 - std::pow(0.999, 3.0)));
  step.eps = 1e-8f;
  step.neg_step_size = static_cast<float>(-1e-2 / (1.0 - std::pow(beta1, 3.0)));
  step.sign = maximize ? -1.0f : 1.0f;
  return step;
}

struct Element {
  float param, grad, m, v, largest;
};

// Follows the formulas: m and v with one rounding per multiply-add.
Element stepped(Element e, const AdamWStep& s, bool amsgrad) {
  const float g = s.sign < 0.0f ? -e.grad : e.grad;
  e.param = e.param * s.decay;
  e.m = std::fabs(s.weight) < 0.5f ? std::fma(s.weight, g - e.m, e.m) : std::fma(s.weight - 1.0f, g - e.m, g);
  e.v = std::fma(s.one_minus_beta2 * g, g, e.v * s.beta2);
  float second = e.v;
  if (amsgrad) {
    e.largest =
        std::isnan(e.largest) || std::isnan(e.v) ? std::numeric_limits<float>::quiet_NaN() : std::max(e.largest, e.v);
    second = e.largest;
  }
  const float denominator = std::sqrt(second) / s.sqrt_bias2 + s.eps;
  const float numerator = s.neg_step_size * e.m;
  e.param = e.param + numerator / denominator;
  return e;
}

// Rounds `value` to bf16 with the bits of element `number`.
float rounded(float value, const cpu::Rounding& rounding, Draw draw, uint64_t number) {
  const PhiloxBlock block = rounding_block(rounding.key, draw, number);
  return reference::decode(stochastic_bf16(reference::to_bits(value), rounding_bits(block, number)), reference::kBf16);
}

// Runs a step from random values. bf16 values are rounded stochastically unless `rounding` is null.
void check_adamw(DType type, DType moments, int64_t numel, const AdamWStep& step, bool amsgrad,
                 const cpu::Rounding* rounding, std::mt19937_64& random) {
  Buffer param(type, numel), grad(type, numel), m(moments, numel), v(moments, numel), largest(moments, numel);
  fill(param, numel, random);
  fill(grad, numel, random);
  fill(m, numel, random);
  fill(v, numel, random, /*positive=*/true);
  fill(largest, numel, random, /*positive=*/true);
  Buffer param_expected = param, m_expected = m, v_expected = v, largest_expected = largest;
  for (int64_t i = 0; i < numel; ++i) {
    const auto stored = [&](DType in, Draw draw, float value) {
      if (rounding == nullptr || in != DType::bf16) return value;
      const int64_t place = rounding->offset + i;
      const int64_t number = place / rounding->run * rounding->stride + place % rounding->run;
      return rounded(value, *rounding, draw, rounding->first + static_cast<uint64_t>(number));
    };
    const Element e = stepped(
        {param.get_float(i), grad.get_float(i), m.get_float(i), v.get_float(i), largest.get_float(i)}, step, amsgrad);
    param_expected.set(i, stored(type, Draw::param, e.param));
    m_expected.set(i, stored(moments, Draw::exp_avg, e.m));
    v_expected.set(i, stored(moments, Draw::exp_avg_sq, e.v));
    if (amsgrad) largest_expected.set(i, stored(moments, Draw::exp_avg_sq, e.largest));
  }
  cpu::AdamWPiece piece;
  piece.type = type;
  piece.moments = moments;
  piece.param = param.data();
  piece.grad = grad.data();
  piece.exp_avg = m.data();
  piece.exp_avg_sq = v.data();
  piece.max_exp_avg_sq = amsgrad ? largest.data() : nullptr;
  piece.numel = numel;
  piece.rounding = rounding;
  cpu::adamw(piece, step);
  const std::string what = std::string(dtype_name(type)) + " parameters, amsgrad " + std::to_string(amsgrad) +
                           ", numel " + std::to_string(numel) +
                           (rounding == nullptr ? "" : ", run " + std::to_string(rounding->run));
  EXPECT_TRUE(param.equals(param_expected, false)) << what;
  EXPECT_TRUE(m.equals(m_expected, false)) << what;
  EXPECT_TRUE(v.equals(v_expected, false)) << what;
  EXPECT_TRUE(largest.equals(largest_expected, false)) << what;
}

TEST_P(Optimizer, AdamWEqualsItsReference) {
  std::mt19937_64 random(1);
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool amsgrad : {false, true}) {
      for (const double beta1 : {0.9, 0.3, 0.5}) {
        for (const int64_t numel : kSizes) {
          check_adamw(type, DType::f32, numel, adamw_step(beta1, numel % 2 == 1), amsgrad, nullptr, random);
        }
      }
    }
  }
}

TEST_P(Optimizer, AdamWRoundsStochasticallyByTheElementsNumber) {
  std::mt19937_64 random(5);
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const bool amsgrad : {false, true}) {
      for (const int64_t numel : kSizes) {
        for (const int64_t run : {int64_t{1}, int64_t{13}, numel + 20}) {
          const cpu::Rounding rounding = {{0x123456789abcdefULL, 3}, (uint64_t{5} << 40) + 3, run, run + 4, 6};
          check_adamw(type, DType::bf16, numel, adamw_step(0.9, false), amsgrad, &rounding, random);
        }
      }
    }
  }
}

TEST(Philox, GivesTheKnownAnswers) {
  // From the authors' Random123 1.14: kat_vectors, philox4x32 10.
  const auto words = [](PhiloxBlock counter, uint32_t key0, uint32_t key1) {
    const PhiloxBlock block = philox(counter, key0, key1);
    return std::vector<uint32_t>(block.words, block.words + 4);
  };
  EXPECT_EQ(words({{0, 0, 0, 0}}, 0, 0), (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(words({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(words({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0),
            (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST_P(Optimizer, AdamWRefusesOtherTypes) {
  cpu::AdamWPiece piece;
  piece.type = DType::f64;
  EXPECT_THROW(cpu::adamw(piece, AdamWStep()), Error);
  piece.type = DType::bf16;
  piece.moments = DType::f16;
  EXPECT_THROW(cpu::adamw(piece, AdamWStep()), Error);
}

TEST_P(Optimizer, SquaresAreSummedInF64) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (const DType type : reference::kTypes) {
    for (const int64_t numel : kSizes) {
      Buffer values(type, numel);
      double lanes[cpu::kNumLanes] = {};
      for (int64_t i = 0; i < numel; ++i) {
        values.set(i, normal(random));
        lanes[i % cpu::kNumLanes] += values.get_double(i) * values.get_double(i);
      }
      double expected = 0.0;
      for (const double lane : lanes) expected += lane;
      EXPECT_EQ(cpu::sum_squares(type, values.data(), numel), expected) << dtype_name(type);
    }
  }
  EXPECT_THROW(cpu::sum_squares(DType::byte, nullptr, 0), Error);
}

TEST_P(Optimizer, MultipliesInPlace) {
  std::mt19937_64 random(4);
  const double factor = 0.3;
  for (const DType type : reference::kTypes) {
    for (const int64_t numel : kSizes) {
      Buffer values(type, numel);
      fill(values, numel, random);
      Buffer expected = values;
      for (int64_t i = 0; i < numel; ++i) {
        if (type == DType::f64) {
          expected.set(i, values.get_double(i) * factor);
        } else {
          expected.set(i, values.get_float(i) * static_cast<float>(factor));
        }
      }
      cpu::multiply(type, values.data(), numel, factor);
      EXPECT_TRUE(values.equals(expected, false)) << dtype_name(type);
    }
  }
  EXPECT_THROW(cpu::multiply(DType::byte, nullptr, 0, 1.0), Error);
}

INSTANTIATE_TEST_SUITE_P(Isa, Optimizer, reference::kAllIsas, reference::isa_name);

}  // namespace
}  // namespace fsdp2x
