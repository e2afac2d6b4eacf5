// Optimizer steps on the kernels, against the CPU's if it has them, else element by element by hand.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "executor.hpp"
#include "kernels/cpu/optimizers.hpp"

namespace fsdp2x::cuda {
namespace {

using Bytes = std::vector<std::byte>;
using reference::Buffer;

constexpr std::array kSizes = {1, 7, 8, 4095, 4103};

AdamWStep adamw_step(float weight = 0.1f) { return {0.999f, weight, 0.95f, 0.05f, 0.3f, 1e-8f, -2e-3f, 1.0f}; }

Buffer normal_values(DType type, int64_t numel, std::mt19937_64& random, bool positive = false) {
  std::normal_distribution<float> normal;
  Buffer buffer(type, numel);
  for (int64_t i = 0; i < numel; ++i) {
    const float value = normal(random);
    buffer.set(i, positive ? std::fabs(value) : value);
  }
  return buffer;
}

// Rounds to bf16 by the random bits of one element, from the definition. The result is the larger neighbor if the
// cut-off part and the random number carry. For an infinity they do not.
uint16_t by_hand(float value, RoundingKey key, Draw draw, uint64_t index) {
  const PhiloxBlock block = philox({{static_cast<uint32_t>(index / 8),
                                     static_cast<uint32_t>(index / 8 >> 32) + 0x40000000u * static_cast<uint32_t>(draw),
                                     static_cast<uint32_t>(key.step), static_cast<uint32_t>(key.step >> 32)}},
                                   static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
  const uint32_t word = block.words[index % 8 / 2];
  const uint32_t bits = reference::to_bits(value);
  if (std::isnan(value)) return 0x7fc0;
  const uint32_t random = index % 2 == 0 ? word % 65536 : word / 65536;
  const uint32_t carry = bits % 65536 + random >= 65536 ? 1 : 0;
  return static_cast<uint16_t>(bits / 65536 + carry);
}

struct State {
  Buffer param, grad, m, v, largest;
};

struct AdamWCase {
  DType type = DType::f32;
  DType moments = DType::f32;
  int64_t numel = 0;
  size_t shift = 0;  // of all memory, in elements
  bool amsgrad = false;
  bool stochastic = false;
  float grad_scale = 1.0f;
  float weight = 0.1f;  // of the gradient in exp_avg
  Numbers numbers;
};

uint64_t number_of(const Numbers& numbers, int64_t i) {
  const int64_t run = numbers.run == 0 ? INT64_MAX : numbers.run;
  return numbers.first + static_cast<uint64_t>(i / run * numbers.stride + i % run);
}

void set_rounded(Buffer& buffer, int64_t i, float value, const AdamWCase& c, RoundingKey key, Draw draw) {
  if (c.stochastic && buffer.type() == DType::bf16) {
    buffer.set_raw(i, by_hand(value, key, draw, number_of(c.numbers, i)));
  } else {
    buffer.set(i, value);
  }
}

void step_by_hand(State& s, const AdamWStep& step, const AdamWCase& c, RoundingKey key) {
  for (int64_t i = 0; i < c.numel; ++i) {
    const float g = s.grad.get_float(i) * c.grad_scale;
    const float old = s.m.get_float(i);
    // torch interpolates from the nearer end.
    const float m = step.weight < 0.5f ? std::fma(step.weight, g - old, old) : std::fma(step.weight - 1.0f, g - old, g);
    const float v = std::fma(step.one_minus_beta2 * g, g, s.v.get_float(i) * step.beta2);
    float second = v;
    if (c.amsgrad) {
      second = std::isnan(v) ? v : std::max(s.largest.get_float(i), v);
      set_rounded(s.largest, i, second, c, key, Draw::exp_avg_sq);
    }
    const float p =
        s.param.get_float(i) * step.decay + step.neg_step_size * m / (std::sqrt(second) / step.sqrt_bias2 + step.eps);
    set_rounded(s.param, i, p, c, key, Draw::param);
    set_rounded(s.m, i, m, c, key, Draw::exp_avg);
    set_rounded(s.v, i, v, c, key, Draw::exp_avg_sq);
  }
}

void expect_adamw(const AdamWCase& c, std::mt19937_64& random) {
  State state = {normal_values(c.type, c.numel, random), normal_values(c.type, c.numel, random),
                 normal_values(c.moments, c.numel, random), normal_values(c.moments, c.numel, random, true),
                 normal_values(c.moments, c.numel, random, true)};
  // Special values at every place of a vector.
  for (int64_t i = 0; i < c.numel; ++i) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    if (i % 11 == 3) state.grad.set(i, i % 2 == 0 ? kInfinity : -kInfinity);
    if (i % 11 == 4) state.param.set(i, kInfinity);
    if (i % 11 == 5) state.grad.set(i, std::numeric_limits<float>::quiet_NaN());
  }
  const auto upload = [&](const Buffer& buffer) {
    return Region(bytes_of(buffer, c.numel), c.shift * dtype_bytes(buffer.type()));
  };
  const Region param = upload(state.param), grad = upload(state.grad), m = upload(state.m), v = upload(state.v),
               largest = upload(state.largest);
  const Region scale(std::as_bytes(std::span(&c.grad_scale, 1)), 0);

  AdamWSegment segment;
  segment.param = param.data();
  segment.exp_avg = m.data();
  segment.exp_avg_sq = v.data();
  segment.max_exp_avg_sq = c.amsgrad ? largest.data() : nullptr;
  segment.numel = c.numel;
  segment.numbers = c.numbers;
  segment.source = 3;
  segment.group = 2;
  segment.type = c.type;
  segment.moment_type = c.moments;
  AdamWArgs args;
  args.steps[2] = adamw_step(c.weight);
  args.grads[3] = grad.data();
  args.grad_scale = c.grad_scale == 1.0f ? nullptr : scale.as<float>();
  args.stochastic = c.stochastic;
  args.rounding = {0x123456789abcdefu, 77};
  const Uploaded plan(make_plan(std::vector{segment}));
  kernels().adamw(plan.list(), args, nullptr);

  State expected = state;
  step_by_hand(expected, args.steps[2], c, args.rounding);
  const std::string what = std::string(dtype_name(c.type)) + ", moments " + dtype_name(c.moments) + ", " +
                           std::to_string(c.numel) + " elements, shift " + std::to_string(c.shift) +
                           (c.stochastic ? ", stochastic" : "") + (c.amsgrad ? ", amsgrad" : "");
  EXPECT_TRUE(same(c.type, param.read(), bytes_of(expected.param, c.numel))) << "parameters, " << what;
  EXPECT_TRUE(same(c.moments, m.read(), bytes_of(expected.m, c.numel))) << "exp_avg, " << what;
  EXPECT_TRUE(same(c.moments, v.read(), bytes_of(expected.v, c.numel))) << "exp_avg_sq, " << what;
  EXPECT_TRUE(same(c.moments, largest.read(), bytes_of(expected.largest, c.numel))) << "max_exp_avg_sq, " << what;
  EXPECT_EQ(grad.read(), bytes_of(state.grad, c.numel));

  if (c.moments == DType::f32 && !(c.stochastic && c.type == DType::bf16) && c.grad_scale == 1.0f) {
    cpu::AdamWPiece piece;
    piece.type = c.type;
    piece.param = state.param.data();
    piece.grad = state.grad.data();
    piece.exp_avg = static_cast<float*>(state.m.data());
    piece.exp_avg_sq = static_cast<float*>(state.v.data());
    piece.max_exp_avg_sq = c.amsgrad ? static_cast<float*>(state.largest.data()) : nullptr;
    piece.numel = c.numel;
    cpu::adamw(piece, args.steps[2]);
    EXPECT_TRUE(same(c.type, param.read(), bytes_of(state.param, c.numel))) << "as on the CPU, " << what;
  }
}

TEST(AdamW, EveryTypeSizeAndOption) {
  std::mt19937_64 random(1);
  // Numbers from a block's beginning, from elsewhere, and in rows that are apart in the full parameter.
  const std::array numbers = {Numbers(), Numbers{(uint64_t{1} << 40) + 5, 0, 0}, Numbers{16, 24, 1000},
                              Numbers{43, 24, 1000}, Numbers{41, 13, 77}};
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType moments : {DType::f32, DType::bf16}) {
      for (const int64_t numel : kSizes) {
        for (const bool amsgrad : {false, true}) {
          for (const size_t shift : {size_t{0}, size_t{1}}) {
            AdamWCase c = {type, moments, numel, shift, amsgrad, false, 1.0f, 0.1f, {}};
            expect_adamw(c, random);
            c.grad_scale = 0.37f;
            c.weight = 0.6f;
            expect_adamw(c, random);
            c.stochastic = true;
            for (size_t i = 0; i < numbers.size(); ++i) {
              c.numbers = numbers[i];
              c.weight = i % 2 == 0 ? 0.1f : 0.6f;
              expect_adamw(c, random);
            }
          }
        }
      }
    }
  }
}

// Ranges of two groups, and one without a gradient, in one launch.
TEST(AdamW, RangesHaveTheirOwnGroupsAndGradients) {
  constexpr int64_t kNumel = 5000;
  std::mt19937_64 random(2);
  const Buffer values = normal_values(DType::f32, 3 * kNumel, random);
  const Buffer grads = normal_values(DType::f32, 2 * kNumel, random);
  const Region param(bytes_of(values, 3 * kNumel), 0), grad(bytes_of(grads, 2 * kNumel), 0);
  const Buffer zeros(DType::f32, 3 * kNumel);
  const std::vector<std::byte> nothing(3 * kNumel * 4);
  const Region m(nothing, 0), v(nothing, 0);
  std::vector<AdamWSegment> segments(3);
  for (size_t i = 0; i < 3; ++i) {
    segments[i].param = param.as<float>() + i * kNumel;
    segments[i].exp_avg = m.as<float>() + i * kNumel;
    segments[i].exp_avg_sq = v.as<float>() + i * kNumel;
    segments[i].numel = kNumel;
    segments[i].source = static_cast<int32_t>(i);
    segments[i].group = i == 2 ? 1 : 0;
  }
  AdamWArgs args;
  args.steps[0] = adamw_step();
  args.steps[1] = adamw_step();
  args.steps[1].neg_step_size = -1e-1f;
  args.grads[0] = grad.data();
  args.grads[2] = grad.as<float>() + kNumel;
  const Uploaded plan(make_plan(segments));
  kernels().adamw(plan.list(), args, nullptr);
  const std::vector<float> got = param.read_as<float>();
  for (int64_t i = 0; i < 3 * kNumel; ++i) {
    const int64_t range = i / kNumel;
    float expected = values.get_float(i);
    if (range != 1) {
      const AdamWStep& step = args.steps[range == 2 ? 1 : 0];
      const float g = grads.get_float(range == 2 ? i - kNumel : i);
      const float mean = std::fma(step.weight, g, 0.0f);
      const float square = std::fma(step.one_minus_beta2 * g, g, 0.0f);
      expected = expected * step.decay + step.neg_step_size * mean / (std::sqrt(square) / step.sqrt_bias2 + step.eps);
    }
    ASSERT_EQ(got[static_cast<size_t>(i)], expected) << "element " << i;
  }
}

TEST(AdamW, PlansRefuseWhatTheKernelCannotStep) {
  const auto plan_with = [](auto change) {
    AdamWSegment segment;
    segment.numel = 1;
    change(segment);
    return make_plan(std::vector{segment});
  };
  EXPECT_NO_THROW(plan_with([](AdamWSegment&) {}));
  EXPECT_THROW(plan_with([](AdamWSegment& s) { s.type = DType::f64; }), Error);
  EXPECT_THROW(plan_with([](AdamWSegment& s) { s.type = DType::byte; }), Error);
  EXPECT_THROW(plan_with([](AdamWSegment& s) { s.moment_type = DType::f16; }), Error);
  EXPECT_THROW(plan_with([](AdamWSegment& s) { s.group = kMaxGroups; }), Error);
  EXPECT_THROW(plan_with([](AdamWSegment& s) { s.source = kMaxTable; }), Error);
}

// --- random rounding -------------------------------------------------------------------------------------------------

TEST(Philox, StochasticRoundingIsUnbiasedAndKeepsWhatIsExact) {
  const float low = 1.0f, high = 1.0f + 0x1p-7f;
  for (const float share : {0.0f, 0.125f, 0.5f, 0.9f}) {
    const float value = low + share * (high - low);
    int num_up = 0;
    constexpr int kDraws = 40000;
    for (uint64_t i = 0; i < kDraws; ++i) {
      const uint32_t random = rounding_bits(rounding_block({7, 1}, Draw::param, i), i);
      const uint16_t code = stochastic_bf16(reference::to_bits(value), random);
      ASSERT_TRUE(code == 0x3f80 || code == 0x3f81);
      num_up += code == 0x3f81;
    }
    // Five standard deviations.
    EXPECT_NEAR(num_up, share * kDraws, 5 * std::sqrt(kDraws * 0.25)) << "share " << share;
  }
  EXPECT_EQ(stochastic_bf16(0x7f800000u, 0xffffu), 0x7f80) << "infinity";
  EXPECT_EQ(stochastic_bf16(0xff800001u, 0xffffu), 0xffc0) << "NaN";
}

TEST(Philox, DrawsAndStepsAndRanksDiffer) {
  const PhiloxBlock base = rounding_block({1, 1}, Draw::param, 0);
  for (const PhiloxBlock& other : {rounding_block({1, 1}, Draw::exp_avg, 0),
                                   rounding_block({1, 1}, Draw::exp_avg_sq, 0), rounding_block({1, 2}, Draw::param, 0),
                                   rounding_block({2, 1}, Draw::param, 0), rounding_block({1, 1}, Draw::param, 8)}) {
    EXPECT_NE(base.words[0], other.words[0]);
  }
}

}  // namespace
}  // namespace fsdp2x::cuda
