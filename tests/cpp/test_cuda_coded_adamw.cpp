// AdamW over 8-bit moments on the kernels, against the CPU's, bit for bit.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/error.hpp"
#include "executor.hpp"
#include "kernels/cpu/optimizers.hpp"
#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x::cuda {
namespace {

using reference::Buffer;

constexpr std::array kSizes = {1, 7, 8, 255, 256, 1000, 4095, 4103, 8200};

struct Codes {
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  Codes(int64_t numel, std::mt19937_64& random)
      : codes(static_cast<size_t>(numel)), scales(static_cast<size_t>((numel + kMomentBlock - 1) / kMomentBlock)) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    std::lognormal_distribution<float> size(0.0f, 2.0f);
    for (float& scale : scales) scale = random() % 12 == 0 ? 0.0f : size(random);
  }
};

struct OnExecutor {
  Region codes, scales;
  OnExecutor(const Codes& values, size_t shift)
      : codes(std::as_bytes(std::span(values.codes)), shift), scales(std::as_bytes(std::span(values.scales)), 0) {}
  void expect_equal(const Codes& values, const std::string& what) const {
    EXPECT_EQ(codes.read_as<uint8_t>(), values.codes) << what;
    const std::vector<float> got = scales.read_as<float>();
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_TRUE(got[i] == values.scales[i] || (std::isnan(got[i]) && std::isnan(values.scales[i])))
          << what << ", scale " << i << ": got " << got[i] << ", expected " << values.scales[i];
    }
  }
};

struct Case {
  DType type = DType::f32;
  int64_t numel = 0;
  size_t shift = 0;  // of parameter, gradient, and codes, in elements
  bool amsgrad = false;
  bool stochastic = false;
  float grad_scale = 1.0f;
  Numbers numbers;
};

void expect_step(const Case& c, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  Buffer param(c.type, c.numel), grad(c.type, c.numel);
  for (int64_t i = 0; i < c.numel; ++i) {
    param.set(i, normal(random));
    grad.set(i, random() % 5 == 0 ? 0.0f : normal(random));
    if (random() % 2000 == 0) grad.set(i, std::numeric_limits<float>::infinity());
    if (random() % 2000 == 0) grad.set(i, std::numeric_limits<float>::quiet_NaN());
  }
  Codes m(c.numel, random), v(c.numel, random), largest(c.numel, random);
  const size_t width = dtype_bytes(c.type);
  const Region params(bytes_of(param, c.numel), c.shift * width), grads(bytes_of(grad, c.numel), c.shift * width);
  const OnExecutor ms(m, c.shift), vs(v, c.shift), maxima(largest, c.shift);
  const Region scale(std::as_bytes(std::span(&c.grad_scale, 1)), 0);

  AdamWSegment segment;
  segment.param = params.data();
  segment.exp_avg = ms.codes.data();
  segment.exp_avg_sq = vs.codes.data();
  segment.exp_avg_scales = ms.scales.as<float>();
  segment.exp_avg_sq_scales = vs.scales.as<float>();
  if (c.amsgrad) segment.max_exp_avg_sq = maxima.codes.data();
  if (c.amsgrad) segment.max_exp_avg_sq_scales = maxima.scales.as<float>();
  segment.numel = c.numel;
  segment.numbers = c.numbers;
  segment.source = 3;
  segment.group = 2;
  segment.type = c.type;
  segment.moment_type = DType::byte;
  AdamWArgs args;
  args.steps[2] = {0.999f, 0.1f, 0.95f, 0.05f, 0.3f, 1e-8f, -2e-3f, 1.0f};
  args.grads[3] = grads.data();
  args.grad_scale = c.grad_scale == 1.0f ? nullptr : scale.as<float>();
  args.stochastic = c.stochastic;
  args.coded = true;
  args.rounding = {0x123456789abcdefu, 77};
  std::vector<AdamWSegment> segments(2, segment);
  segments[0].source = 0;  // a gradient that is missing
  const Uploaded plan(make_plan(segments));
  kernels().adamw(plan.list(), args, nullptr);

  cpu::Rounding rounding;
  rounding.key = args.rounding;
  rounding.first = c.numbers.first;
  rounding.run = c.numbers.run == 0 ? c.numel : c.numbers.run;
  rounding.stride = c.numbers.run == 0 ? c.numel : c.numbers.stride;
  AdamWStep step = args.steps[2];
  step.sign *= c.grad_scale;
  cpu::AdamWPiece piece;
  piece.type = c.type;
  piece.moments = DType::byte;
  piece.param = param.data();
  piece.grad = grad.data();
  piece.exp_avg = m.codes.data();
  piece.exp_avg_sq = v.codes.data();
  piece.max_exp_avg_sq = c.amsgrad ? largest.codes.data() : nullptr;
  piece.exp_avg_scales = m.scales.data();
  piece.exp_avg_sq_scales = v.scales.data();
  piece.max_exp_avg_sq_scales = largest.scales.data();
  piece.numel = c.numel;
  piece.rounding = c.stochastic ? &rounding : nullptr;
  cpu::adamw(piece, step);

  const std::string what = std::string(dtype_name(c.type)) + ", " + std::to_string(c.numel) + " elements, shift " +
                           std::to_string(c.shift) + (c.stochastic ? ", stochastic" : "") +
                           (c.amsgrad ? ", amsgrad" : "");
  EXPECT_TRUE(same(c.type, params.read(), bytes_of(param, c.numel))) << "parameters, " << what;
  ms.expect_equal(m, "exp_avg, " + what);
  vs.expect_equal(v, "exp_avg_sq, " + what);
  maxima.expect_equal(largest, "max_exp_avg_sq, " + what);
}

TEST(CodedAdamW, EveryTypeSizeAndOption) {
  std::mt19937_64 random(1);
  const std::array numbers = {Numbers(), Numbers{(uint64_t{1} << 40) + 5, 0, 0}, Numbers{16, 24, 1000},
                              Numbers{41, 13, 77}};
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int64_t numel : kSizes) {
      for (const bool amsgrad : {false, true}) {
        for (const size_t shift : {size_t{0}, size_t{1}}) {
          Case c = {type, numel, shift, amsgrad, false, 1.0f, {}};
          expect_step(c, random);
          c.grad_scale = 0.37f;
          expect_step(c, random);
          c.stochastic = true;
          c.numbers = numbers[random() % numbers.size()];
          expect_step(c, random);
        }
      }
    }
  }
}

TEST(CodedAdamW, PlansRefuseCodesWithoutScales) {
  float scales = 0.0f;
  AdamWSegment segment;
  segment.numel = 1;
  segment.moment_type = DType::byte;
  EXPECT_THROW(make_plan(std::vector{segment}), Error);
  segment.exp_avg_scales = segment.exp_avg_sq_scales = &scales;
  EXPECT_NO_THROW(make_plan(std::vector{segment}));
  segment.max_exp_avg_sq = &scales;
  EXPECT_THROW(make_plan(std::vector{segment}), Error);
}

}  // namespace
}  // namespace fsdp2x::cuda
