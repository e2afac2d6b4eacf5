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

// The random bits of elements `number` to `number` + 7, two to a word, as they lie in a block. Elements that do not
// begin with a block end in the next one: its words are shifted in behind, by selections that are the same for all
// elements.
FSDP2X_HOST_DEVICE PhiloxBlock bits_of_vector(RoundingKey key, Draw draw, uint64_t number) {
  const PhiloxBlock first = rounding_block(key, draw, number);
  const auto past = static_cast<uint32_t>(number % kRoundingBlock);
  const PhiloxBlock second = past != 0 ? rounding_block(key, draw, number + kRoundingBlock) : first;
  uint32_t words[8];
  FSDP2X_UNROLL
  for (int i = 0; i < 4; ++i) {
    words[i] = first.words[i];
    words[i + 4] = second.words[i];
  }
  FSDP2X_UNROLL
  for (int i = 0; i < 6; ++i) words[i] = (past & 4) != 0 ? words[i + 2] : words[i];
  FSDP2X_UNROLL
  for (int i = 0; i < 5; ++i) words[i] = (past & 2) != 0 ? words[i + 1] : words[i];
  FSDP2X_UNROLL
  for (int i = 0; i < 4; ++i) words[i] = (past & 1) != 0 ? words[i] >> 16 | words[i + 1] << 16 : words[i];
  return {{words[0], words[1], words[2], words[3]}};
}

// Stores as `type`: bf16 by the random bits of elements `number` on when kStochastic, to nearest otherwise. Kernels
// that draw no random bits are kernels of their own: they need far fewer registers.
template <int N, bool kStochastic>
FSDP2X_HOST_DEVICE void store_rounded(DType type, void* base, int64_t i, const float* values, RoundingKey key,
                                      Draw draw, uint64_t number) {
  static_assert(!kStochastic || N == 1 || N == kRoundingBlock);
  if (!kStochastic || type != DType::bf16) return store<N>(type, base, i, values);
  uint16_t codes[N];
  if constexpr (N == 1) {
    codes[0] = stochastic_bf16(bits_of(values[0]), rounding_bits(rounding_block(key, draw, number), number));
  } else {
    const PhiloxBlock bits = bits_of_vector(key, draw, number);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      codes[k] = stochastic_bf16(bits_of(values[k]), bits.words[k / 2] >> (k % 2 * 16) & 0xffffu);
    }
  }
  store_units<uint16_t, N>(base, i, codes);
}

FSDP2X_HOST_DEVICE bool is_word_aligned_or_null(const void* address) {
  return address == nullptr || is_word_aligned(address);
}

// One element's moments behind a gradient; torch interpolates from the nearer end.
FSDP2X_HOST_DEVICE void update_moments(const AdamWStep& step, float gradient, float& m, float& v) {
  const bool from_average = step.weight < 0.5f;
  const float coefficient = from_average ? step.weight : step.weight - 1.0f;
  m = fmaf(coefficient, gradient - m, from_average ? m : gradient);
  v = fmaf(step.rest2 * gradient, gradient, v * step.beta2);
}

FSDP2X_HOST_DEVICE float largest_square(float before, float v) { return before >= v || before != before ? before : v; }

FSDP2X_HOST_DEVICE float stepped_param(const AdamWStep& step, float p, float m, float second) {
  const float denominator = sqrtf(second) / step.root + step.eps;
  return p * step.decay + step.minus_size * m / denominator;
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
    const DType type = kFloats ? DType::f32 : segment.type;
    const DType moment_type = kFloats || segment.moment_type == DType::f32 ? DType::f32 : DType::bf16;
    const uint64_t number = kStochastic ? number_of(segment.numbers, i) : 0;
    float p[N], g[N], m[N], v[N];
    load<N>(type, grad, i, g);
    load<N>(type, segment.param, i, p);
    load<N>(moment_type, segment.exp_avg, i, m);
    load<N>(moment_type, segment.exp_avg_sq, i, v);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) update_moments(step, g[k] * step.sign * grad_scale, m[k], v[k]);
    store_rounded<N, kStochastic>(moment_type, segment.exp_avg_sq, i, v, rounding, Draw::exp_avg_sq, number);
    if (segment.max_exp_avg_sq != nullptr) {
      float largest[N];
      load<N>(moment_type, segment.max_exp_avg_sq, i, largest);
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) v[k] = largest_square(largest[k], v[k]);
      // With the bits of exp_avg_sq: where the largest is the new one, both are stored equal.
      store_rounded<N, kStochastic>(moment_type, segment.max_exp_avg_sq, i, v, rounding, Draw::exp_avg_sq, number);
    }
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) p[k] = stepped_param(step, p[k], m[k], v[k]);
    store_rounded<N, kStochastic>(type, segment.param, i, p, rounding, Draw::param, number);
    store_rounded<N, kStochastic>(moment_type, segment.exp_avg, i, m, rounding, Draw::exp_avg, number);
  }
};

template <bool kStochastic>
struct AdamWBody {
  static constexpr int kBlocks = kStochastic ? 2 : 4;
  AdamWList list;
  AdamWArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const AdamWSegment segment = list.segments[list.tile_segments[tile]];
    const void* grad = args.grads[segment.source];
    if (grad == nullptr) return;
    const AdamWStepper<kStochastic, false> stepper = {
        segment, grad, args.steps[segment.group], args.grad_scale == nullptr ? 1.0f : *args.grad_scale, args.rounding};
    const bool use_vectors = is_word_aligned(grad) && is_word_aligned(segment.param) &&
                             is_word_aligned(segment.exp_avg) && is_word_aligned(segment.exp_avg_sq) &&
                             is_word_aligned_or_null(segment.max_exp_avg_sq) &&
                             (!kStochastic || vectors_are_numbered(segment.numbers));
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    // Floats alone are stepped a word at a time, as `walk_written` says. Stochastic rounding is for others.
    if constexpr (!kStochastic) {
      if (segment.type == DType::f32 && segment.moment_type == DType::f32) {
        const AdamWStepper<false, true> float_stepper = {segment, grad, stepper.step, stepper.grad_scale, {}};
        return walk<kFloatVectorNumel>(range, range.begin, use_vectors, thread, float_stepper);
      }
    }
    walk<kVectorNumel>(range, range.begin, use_vectors, thread, stepper);
  }
};

// Of floats alone.
struct SgdStepper {
  const SgdSegment& segment;
  const void* grad;
  SgdStep step;
  SgdMomentum momentum;
  float grad_scale;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const bool later = momentum == SgdMomentum::later || momentum == SgdMomentum::later_nesterov;
    const bool nesterov = momentum == SgdMomentum::first_nesterov || momentum == SgdMomentum::later_nesterov;
    float p[N], g[N], b[N] = {};
    load_units<float, N>(grad, i, g);
    load_units<float, N>(segment.param, i, p);
    if (later) load_units<float, N>(segment.buffer, i, b);
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
    store_units<float, N>(segment.param, i, p);
    if (momentum != SgdMomentum::none) store_units<float, N>(segment.buffer, i, b);
  }
};

struct SgdBody {
  static constexpr int kBlocks = 4;
  SgdList list;
  SgdArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const SgdSegment segment = list.segments[list.tile_segments[tile]];
    const void* grad = args.grads[segment.source];
    if (grad == nullptr) return;
    const SgdStepper stepper = {segment, grad, args.steps[segment.group], args.momentum[segment.group],
                                args.grad_scale == nullptr ? 1.0f : *args.grad_scale};
    const bool use_vectors =
        is_word_aligned(grad) && is_word_aligned(segment.param) && is_word_aligned_or_null(segment.buffer);
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk<kFloatVectorNumel>(range, range.begin, use_vectors, thread, stepper);
  }
};

// Of floats alone.
struct LionStepper {
  const LionSegment& segment;
  const void* grad;
  LionStep step;
  float grad_scale;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    float p[N], g[N], m[N];
    load_units<float, N>(grad, i, g);
    load_units<float, N>(segment.param, i, p);
    load_units<float, N>(segment.average, i, m);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      const float d = g[k] * step.sign * grad_scale;
      const float way = fmaf(step.rest1, d, m[k] * step.beta1);
      m[k] = fmaf(step.rest2, d, m[k] * step.beta2);
      const float sign = way > 0.0f ? 1.0f : way < 0.0f ? -1.0f : way;
      p[k] = fmaf(step.minus_lr, sign, p[k] * step.decay);
    }
    store_units<float, N>(segment.param, i, p);
    store_units<float, N>(segment.average, i, m);
  }
};

struct LionBody {
  static constexpr int kBlocks = 4;
  LionList list;
  LionArgs args;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const LionSegment segment = list.segments[list.tile_segments[tile]];
    const void* grad = args.grads[segment.source];
    if (grad == nullptr) return;
    const LionStepper stepper = {segment, grad, args.steps[segment.group],
                                 args.grad_scale == nullptr ? 1.0f : *args.grad_scale};
    const bool use_vectors =
        is_word_aligned(grad) && is_word_aligned(segment.param) && is_word_aligned(segment.average);
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk<kFloatVectorNumel>(range, range.begin, use_vectors, thread, stepper);
  }
};

}  // namespace fsdp2x::cuda
