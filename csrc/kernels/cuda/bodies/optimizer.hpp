// One thread's share of an optimizer step over ranges of the pools, by kernels/rules/optimizer_rules.hpp.
#pragma once

#include "kernels/cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

FSDP2X_HOST_DEVICE uint64_t number_of(const Numbers& numbers, int64_t i) {
  const int64_t place = numbers.run == 0 ? i : i / numbers.run * numbers.stride + i % numbers.run;
  return numbers.first + static_cast<uint64_t>(place);
}

// Returns whether the elements of a vector are numbered consecutively.
FSDP2X_HOST_DEVICE bool vectors_are_numbered(const Numbers& numbers) {
  return numbers.run == 0 || numbers.run % kVectorNumel == 0;
}

// Returns the random bits of elements `number` to `number` + 7, two in each word, as in a block. If the elements do not
// begin with a block, they end in the next one. Its words are shifted in by selections that are the same for all
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

// Stores as `type`. If kStochastic, bf16 is rounded by the random bits of elements `number` on, otherwise to nearest.
// Kernels without random bits are compiled separately, because they need far fewer registers.
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

// `kFloats`: parameter, gradient, and moments are f32.
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
    for (int k = 0; k < N; ++k) step.update_moments(g[k] * step.sign * grad_scale, m[k], v[k]);
    store_rounded<N, kStochastic>(moment_type, segment.exp_avg_sq, i, v, rounding, Draw::exp_avg_sq, number);
    if (segment.max_exp_avg_sq != nullptr) {
      float largest[N];
      load<N>(moment_type, segment.max_exp_avg_sq, i, largest);
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) v[k] = largest_square(largest[k], v[k]);
      // Uses the bits of exp_avg_sq, so that both are stored equal if the largest is the new one.
      store_rounded<N, kStochastic>(moment_type, segment.max_exp_avg_sq, i, v, rounding, Draw::exp_avg_sq, number);
    }
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) p[k] = step.stepped(p[k], m[k], v[k]);
    store_rounded<N, kStochastic>(type, segment.param, i, p, rounding, Draw::param, number);
    store_rounded<N, kStochastic>(moment_type, segment.exp_avg, i, m, rounding, Draw::exp_avg, number);
  }
};

template <bool kStochastic>
struct AdamWBody {
  static constexpr int kBlocks = kStochastic ? 3 : 4;
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
                             is_word_aligned(segment.max_exp_avg_sq) &&
                             (!kStochastic || vectors_are_numbered(segment.numbers));
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    // Only floats are stepped a word at a time, as `walk_written` says. Stochastic rounding is for other types.
    if constexpr (!kStochastic) {
      if (segment.type == DType::f32 && segment.moment_type == DType::f32) {
        const AdamWStepper<false, true> float_stepper = {segment, grad, stepper.step, stepper.grad_scale, {}};
        return walk<kFloatVectorNumel>(range, range.begin, use_vectors, thread, float_stepper);
      }
    }
    walk<kVectorNumel>(range, range.begin, use_vectors, thread, stepper);
  }
};

}  // namespace fsdp2x::cuda
