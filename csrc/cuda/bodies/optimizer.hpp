// One thread's share of an optimizer step over ranges of the pools. The arithmetic is that of
// csrc/cpu/kernel_loops.hpp, operation by operation: what torch rounds once is a fused multiply-add, everything else
// rounds twice.
#pragma once

#include <math.h>

#include "cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

FSDP2X_HOST_DEVICE uint64_t number_of(const Numbers& numbers, int64_t i) {
  const int64_t place = numbers.run == 0 ? i : i / numbers.run * numbers.stride + i % numbers.run;
  return numbers.first + static_cast<uint64_t>(place);
}

// The elements of a vector have to be numbered one after the other.
FSDP2X_HOST_DEVICE bool vectors_are_numbered(const Numbers& numbers) {
  return numbers.run == 0 || numbers.run % kVectorNumel == 0;
}

// Stores as `type`: bf16 by the random bits of elements `number` on when kStochastic, to nearest otherwise. Kernels
// that draw no random bits are kernels of their own: they need far fewer registers.
template <int N, bool kStochastic>
FSDP2X_HOST_DEVICE void store_rounded(DType type, void* base, int64_t i, const float* values, RoundingKey key,
                                      Draw draw, uint64_t number) {
  if (!kStochastic || type != DType::bf16) return store<float, N>(type, base, i, values);
  const PhiloxBlock first = rounding_block(key, draw, number);
  // A vector that does not begin with a block ends in the next one.
  const bool has_second = N > 1 && number % kRoundingBlock != 0;
  const PhiloxBlock second = has_second ? rounding_block(key, draw, number + N - 1) : first;
  uint16_t codes[N];
  FSDP2X_UNROLL
  for (int k = 0; k < N; ++k) {
    const uint64_t own = number + static_cast<uint64_t>(k);
    const bool in_first = own / kRoundingBlock == number / kRoundingBlock;
    const uint32_t bits = in_first ? rounding_bits(first, own) : rounding_bits(second, own);
    codes[k] = stochastic_bf16(bits_of(values[k]), bits);
  }
  store_units<uint16_t, N>(base, i, codes);
}

FSDP2X_HOST_DEVICE bool is_word_aligned_or_null(const void* address) {
  return address == nullptr || is_word_aligned(address);
}

// Ranges of floats alone are stepped a word at a time, as `walk_written` says, by a stepper that knows the types.
template <class Stepper, class FloatStepper>
FSDP2X_HOST_DEVICE void walk_steps(bool all_floats, TileRange range, bool use_vectors, int thread,
                                   const Stepper& stepper, const FloatStepper& float_stepper) {
  if (all_floats) return walk<kFloatVectorNumel>(range, range.begin, use_vectors, thread, float_stepper);
  walk<kVectorNumel>(range, range.begin, use_vectors, thread, stepper);
}

// `kFloats`: parameter, gradient and moments are f32.
template <bool kStochastic, bool kFloats>
struct AdamWStepper {
  const AdamWSegment& segment;
  const void* grad;
  AdamWStep step;
  float grad_scale;
  RoundingKey rounding;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const DType param_type = kFloats ? DType::f32 : segment.param_type;
    const DType grad_type = kFloats ? DType::f32 : segment.grad_type;
    const DType moment_type = kFloats ? DType::f32 : segment.moment_type;
    const uint64_t number = kStochastic ? number_of(segment.numbers, i) : 0;
    float p[N], g[N], m[N], v[N], largest[N] = {};
    load<float, N>(grad_type, grad, i, g);
    load<float, N>(param_type, segment.param, i, p);
    load<float, N>(moment_type, segment.exp_avg, i, m);
    load<float, N>(moment_type, segment.exp_avg_sq, i, v);
    const bool amsgrad = segment.max_exp_avg_sq != nullptr;
    if (amsgrad) load<float, N>(moment_type, segment.max_exp_avg_sq, i, largest);
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
    store_rounded<N, kStochastic>(param_type, segment.param, i, p, rounding, Draw::param, number);
    store_rounded<N, kStochastic>(moment_type, segment.exp_avg, i, m, rounding, Draw::exp_avg, number);
    store_rounded<N, kStochastic>(moment_type, segment.exp_avg_sq, i, v, rounding, Draw::exp_avg_sq, number);
    // With the bits of exp_avg_sq: where the largest is the new one, both are stored equal.
    if (amsgrad) {
      store_rounded<N, kStochastic>(moment_type, segment.max_exp_avg_sq, i, largest, rounding, Draw::exp_avg_sq,
                                    number);
    }
    if (segment.shadow != nullptr) store<float, N>(DType::bf16, segment.shadow, i, p);
  }
};

template <bool kStochastic>
struct AdamWBody {
  static constexpr int kBlocks = kStochastic ? 2 : 4;
  AdamWList list;
  AdamWArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const AdamWSegment segment = list.segments[list.tile_segments[tile]];
    const void* base = args.grads[segment.source];
    if (base == nullptr) return;
    const AdamWStepper<kStochastic, false> stepper = {segment, at(base, segment.grad_offset), args.steps[segment.group],
                                                      args.grad_scale == nullptr ? 1.0f : *args.grad_scale,
                                                      args.rounding};
    const bool all_floats =
        segment.param_type == DType::f32 && segment.grad_type == DType::f32 && segment.moment_type == DType::f32;
    const bool use_vectors =
        is_word_aligned(stepper.grad) && is_word_aligned(segment.param) && is_word_aligned(segment.exp_avg) &&
        is_word_aligned(segment.exp_avg_sq) && is_word_aligned_or_null(segment.max_exp_avg_sq) &&
        is_word_aligned_or_null(segment.shadow) && (!kStochastic || vectors_are_numbered(segment.numbers));
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk_steps(all_floats, range, use_vectors, thread, stepper,
               AdamWStepper<false, true>{segment, stepper.grad, stepper.step, stepper.grad_scale, {}});
  }
};

// `kFloats`: parameter, gradient and buffer are f32.
template <bool kStochastic, bool kFloats>
struct SgdStepper {
  const SgdSegment& segment;
  const void* grad;
  SgdStep step;
  SgdMomentum momentum;
  float grad_scale;
  RoundingKey rounding;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const DType param_type = kFloats ? DType::f32 : segment.param_type;
    const DType grad_type = kFloats ? DType::f32 : segment.grad_type;
    const DType buffer_type = kFloats ? DType::f32 : segment.buffer_type;
    const uint64_t number = kStochastic ? number_of(segment.numbers, i) : 0;
    const bool later = momentum == SgdMomentum::later || momentum == SgdMomentum::later_nesterov;
    const bool nesterov = momentum == SgdMomentum::first_nesterov || momentum == SgdMomentum::later_nesterov;
    float p[N], g[N], b[N] = {};
    load<float, N>(grad_type, grad, i, g);
    load<float, N>(param_type, segment.param, i, p);
    if (later) load<float, N>(buffer_type, segment.buffer, i, b);
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
    store_rounded<N, kStochastic>(param_type, segment.param, i, p, rounding, Draw::param, number);
    if (momentum != SgdMomentum::none) {
      store_rounded<N, kStochastic>(buffer_type, segment.buffer, i, b, rounding, Draw::exp_avg, number);
    }
    if (segment.shadow != nullptr) store<float, N>(DType::bf16, segment.shadow, i, p);
  }
};

template <bool kStochastic>
struct SgdBody {
  static constexpr int kBlocks = kStochastic ? 2 : 4;
  SgdList list;
  SgdArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const SgdSegment segment = list.segments[list.tile_segments[tile]];
    const void* base = args.grads[segment.source];
    if (base == nullptr) return;
    const SgdStepper<kStochastic, false> stepper = {
        segment,
        at(base, segment.grad_offset),
        args.steps[segment.group],
        segment.buffer == nullptr ? SgdMomentum::none : args.momentum[segment.group],
        args.grad_scale == nullptr ? 1.0f : *args.grad_scale,
        args.rounding};
    const bool use_vectors = is_word_aligned(stepper.grad) && is_word_aligned(segment.param) &&
                             is_word_aligned_or_null(segment.buffer) && is_word_aligned_or_null(segment.shadow) &&
                             (!kStochastic || vectors_are_numbered(segment.numbers));
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    const bool all_floats =
        segment.param_type == DType::f32 && segment.grad_type == DType::f32 && segment.buffer_type == DType::f32;
    walk_steps(all_floats, range, use_vectors, thread, stepper,
               SgdStepper<false, true>{segment, stepper.grad, stepper.step, stepper.momentum, stepper.grad_scale, {}});
  }
};

}  // namespace fsdp2x::cuda
