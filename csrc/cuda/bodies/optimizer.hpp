// One thread's share of an optimizer step over ranges of the pools. The arithmetic is that of
// csrc/cpu/kernel_loops.hpp, operation by operation: what torch rounds once is a fused multiply-add, everything else
// rounds twice.
#pragma once

#include <math.h>

#include "cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

// Stores as `type`: bf16 by the random bits of these elements when `stochastic`, to nearest otherwise.
template <int N>
FSDP2X_HOST_DEVICE void store_rounded(DType type, void* base, int64_t i, const float* values, bool stochastic,
                                      RoundingKey key, Draw draw, uint64_t index) {
  if (!stochastic || type != DType::bf16) return store<float, N>(type, base, i, values);
  const PhiloxBlock random = rounding_block(key, draw, index);
  uint16_t codes[N];
  FSDP2X_UNROLL
  for (int k = 0; k < N; ++k) {
    // A vector is a whole block, a single element lies anywhere in one.
    const uint64_t place = N == 1 ? index : static_cast<uint64_t>(k);
    codes[k] = stochastic_bf16(bits_of(values[k]), rounding_bits(random, place));
  }
  store_units<uint16_t, N>(base, i, codes);
}

FSDP2X_HOST_DEVICE bool is_word_aligned_or_null(const void* address) {
  return address == nullptr || is_word_aligned(address);
}

struct AdamWStepper {
  const AdamWSegment& segment;
  const void* grad;
  AdamWStep step;
  float grad_scale;
  bool stochastic;
  RoundingKey rounding;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const uint64_t index = segment.first_index + static_cast<uint64_t>(i);
    float p[N], g[N], m[N], v[N], largest[N] = {};
    load<float, N>(segment.grad_type, grad, i, g);
    load<float, N>(segment.param_type, segment.param, i, p);
    load<float, N>(segment.moment_type, segment.exp_avg, i, m);
    load<float, N>(segment.moment_type, segment.exp_avg_sq, i, v);
    const bool amsgrad = segment.max_exp_avg_sq != nullptr;
    if (amsgrad) load<float, N>(segment.moment_type, segment.max_exp_avg_sq, i, largest);
    // torch interpolates from the nearer end.
    const bool from_average = step.weight < 0.5f;
    const float coefficient = from_average ? step.weight : step.weight - 1.0f;
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      const float gradient = g[k] * step.sign * grad_scale;
      m[k] = fmaf(coefficient, gradient - m[k], from_average ? m[k] : gradient);
      v[k] = fmaf(step.rest2 * gradient, gradient, v[k] * step.beta2);
      float second = v[k];
      if (amsgrad) {
        second = largest[k] >= v[k] || largest[k] != largest[k] ? largest[k] : v[k];
        largest[k] = second;
      }
      const float denominator = sqrtf(second) / step.root + step.eps;
      p[k] = p[k] * step.decay + step.minus_size * m[k] / denominator;
    }
    store_rounded<N>(segment.param_type, segment.param, i, p, stochastic, rounding, Draw::param, index);
    store_rounded<N>(segment.moment_type, segment.exp_avg, i, m, stochastic, rounding, Draw::exp_avg, index);
    store_rounded<N>(segment.moment_type, segment.exp_avg_sq, i, v, stochastic, rounding, Draw::exp_avg_sq, index);
    // A maximum never decays, so nothing is lost when it is rounded to nearest.
    if (amsgrad) store<float, N>(segment.moment_type, segment.max_exp_avg_sq, i, largest);
    if (segment.shadow != nullptr) store<float, N>(DType::bf16, segment.shadow, i, p);
  }
};

struct AdamWBody {
  AdamWList list;
  AdamWArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const AdamWSegment segment = list.segments[list.tile_segments[tile]];
    const void* base = args.grads[segment.source];
    if (base == nullptr) return;
    const AdamWStepper stepper = {segment,
                                  at(base, segment.grad_offset),
                                  args.steps[segment.group],
                                  args.grad_scale == nullptr ? 1.0f : *args.grad_scale,
                                  args.stochastic,
                                  args.rounding};
    const bool use_vectors = is_word_aligned(stepper.grad) && is_word_aligned(segment.param) &&
                             is_word_aligned(segment.exp_avg) && is_word_aligned(segment.exp_avg_sq) &&
                             is_word_aligned_or_null(segment.max_exp_avg_sq) && is_word_aligned_or_null(segment.shadow);
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk<kVectorNumel>(range, range.begin, use_vectors, thread, stepper);
  }
};

struct SgdStepper {
  const SgdSegment& segment;
  const void* grad;
  SgdStep step;
  SgdMomentum momentum;
  float grad_scale;
  bool stochastic;
  RoundingKey rounding;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const uint64_t index = segment.first_index + static_cast<uint64_t>(i);
    const bool later = momentum == SgdMomentum::later || momentum == SgdMomentum::later_nesterov;
    const bool nesterov = momentum == SgdMomentum::first_nesterov || momentum == SgdMomentum::later_nesterov;
    float p[N], g[N], b[N] = {};
    load<float, N>(segment.grad_type, grad, i, g);
    load<float, N>(segment.param_type, segment.param, i, p);
    if (later) load<float, N>(segment.buffer_type, segment.buffer, i, b);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      float d = g[k] * step.sign * grad_scale;
      if (step.weight_decay != 0.0f) d = fmaf(step.weight_decay, p[k], d);
      if (momentum != SgdMomentum::none) {
        b[k] = later ? fmaf(step.rest, d, b[k] * step.momentum) : d;
        d = nesterov ? fmaf(step.momentum, b[k], d) : b[k];
      }
      p[k] = fmaf(step.minus_lr, d, p[k]);
    }
    store_rounded<N>(segment.param_type, segment.param, i, p, stochastic, rounding, Draw::param, index);
    if (momentum != SgdMomentum::none) {
      store_rounded<N>(segment.buffer_type, segment.buffer, i, b, stochastic, rounding, Draw::exp_avg, index);
    }
    if (segment.shadow != nullptr) store<float, N>(DType::bf16, segment.shadow, i, p);
  }
};

struct SgdBody {
  SgdList list;
  SgdArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const SgdSegment segment = list.segments[list.tile_segments[tile]];
    const void* base = args.grads[segment.source];
    if (base == nullptr) return;
    const SgdStepper stepper = {segment,
                                at(base, segment.grad_offset),
                                args.steps[segment.group],
                                segment.buffer == nullptr ? SgdMomentum::none : args.momentum[segment.group],
                                args.grad_scale == nullptr ? 1.0f : *args.grad_scale,
                                args.stochastic,
                                args.rounding};
    const bool use_vectors = is_word_aligned(stepper.grad) && is_word_aligned(segment.param) &&
                             is_word_aligned_or_null(segment.buffer) && is_word_aligned_or_null(segment.shadow);
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk<kVectorNumel>(range, range.begin, use_vectors, thread, stepper);
  }
};

}  // namespace fsdp2x::cuda
