// One thread's share of an AdamW step over 8-bit moments (kernels/rules/moment_codes.hpp).
//
//   pass of a block of threads:  peaks of 8 elements a thread | barrier | peaks of 32 threads: a block of codes | step
//
// `step` repeats the computation of `peaks`: its inputs are in the nearest cache, and no array has to live across the
// barrier. The scales do, since the first thread of a block of codes writes them.
#pragma once

#include "kernels/cuda/bodies/optimizer.hpp"
#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x::cuda {

inline constexpr int kBlockThreads = kMomentBlock / kVectorNumel;            // of a block of codes
inline constexpr int kCodedPasses = kTileNumel / (kThreads * kVectorNumel);  // of a block of threads over its tile
static_assert(kTileNumel % kMomentBlock == 0 && kThreads % kBlockThreads == 0);

// A number for each moment.
struct MomentTriple {
  float exp_avg = 0.0f;
  float exp_avg_sq = 0.0f;
  float max_exp_avg_sq = 0.0f;
};

// Returns the peaks of the block of codes that contains `thread`. `peaks` are those of all threads.
FSDP2X_HOST_DEVICE MomentTriple block_peaks(const MomentTriple* peaks, int thread) {
  MomentTriple block;
  const int first = thread / kBlockThreads * kBlockThreads;
  for (int k = 0; k < kBlockThreads; ++k) {
    const MomentTriple& other = peaks[first + k];
    block.exp_avg = larger_peak(block.exp_avg, other.exp_avg);
    block.exp_avg_sq = larger_peak(block.exp_avg_sq, other.exp_avg_sq);
    block.max_exp_avg_sq = larger_peak(block.max_exp_avg_sq, other.max_exp_avg_sq);
  }
  return block;
}

FSDP2X_HOST_DEVICE bool is_code_word_aligned(const void* codes) {
  return reinterpret_cast<uintptr_t>(codes) % kVectorNumel == 0;
}

template <bool kStochastic>
struct CodedAdamWStepper {
  const AdamWSegment& segment;
  const void* grad;
  AdamWStep step;
  float grad_scale;
  RoundingKey rounding;
  MomentTriple scales;  // before the step

  template <int N, bool kSigned>
  FSDP2X_HOST_DEVICE void load_moments(const void* codes, float scale, int64_t i, float* values) const {
    uint8_t units[N];
    load_units<uint8_t, N>(codes, i, units);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) values[k] = decoded_moment<kSigned>(units[k], scale);
  }

  template <int N, bool kSigned>
  FSDP2X_HOST_DEVICE void store_moments(void* codes, float peak, int64_t i, const float* values, Draw draw,
                                        uint64_t number) const {
    const float inverse = inverse_moment_scale(moment_scale(peak));
    uint8_t units[N];
    if constexpr (!kStochastic) {
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) units[k] = encoded_moment<kSigned, false>(values[k], inverse, 0);
    } else if constexpr (N == 1) {
      const uint32_t bits = rounding_bits(rounding_block(rounding, draw, number), number);
      units[0] = encoded_moment<kSigned, true>(values[0], inverse, bits);
    } else {
      const PhiloxBlock bits = bits_of_vector(rounding, draw, number);
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) {
        units[k] = encoded_moment<kSigned, true>(values[k], inverse, bits.words[k / 2] >> (k % 2 * 16) & 0xffffu);
      }
    }
    store_units<uint8_t, N>(codes, i, units);
  }

  // Computes the moments after the gradient. `second`: the value under the root.
  template <int N>
  FSDP2X_HOST_DEVICE void moments(int64_t i, float* m, float* v, float* second) const {
    float g[N];
    load<N>(segment.type, grad, i, g);
    load_moments<N, true>(segment.exp_avg, scales.exp_avg, i, m);
    load_moments<N, false>(segment.exp_avg_sq, scales.exp_avg_sq, i, v);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      step.update_moments(g[k] * step.sign * grad_scale, m[k], v[k]);
      second[k] = v[k];
    }
    if (segment.max_exp_avg_sq == nullptr) return;
    float before[N];
    load_moments<N, false>(segment.max_exp_avg_sq, scales.max_exp_avg_sq, i, before);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) second[k] = largest_square(before[k], v[k]);
  }

  template <int N>
  FSDP2X_HOST_DEVICE void add_peaks(int64_t i, MomentTriple& peaks) const {
    float m[N], v[N], second[N];
    moments<N>(i, m, v, second);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      peaks.exp_avg = larger_peak(peaks.exp_avg, fabsf(m[k]));
      peaks.exp_avg_sq = larger_peak(peaks.exp_avg_sq, v[k]);
      peaks.max_exp_avg_sq = larger_peak(peaks.max_exp_avg_sq, second[k]);
    }
  }

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i, const MomentTriple& peaks) const {
    const uint64_t number = kStochastic ? number_of(segment.numbers, i) : 0;
    float p[N], m[N], v[N], second[N];
    moments<N>(i, m, v, second);
    store_moments<N, true>(segment.exp_avg, peaks.exp_avg, i, m, Draw::exp_avg, number);
    store_moments<N, false>(segment.exp_avg_sq, peaks.exp_avg_sq, i, v, Draw::exp_avg_sq, number);
    if (segment.max_exp_avg_sq != nullptr) {
      store_moments<N, false>(segment.max_exp_avg_sq, peaks.max_exp_avg_sq, i, second, Draw::exp_avg_sq, number);
    }
    load<N>(segment.type, segment.param, i, p);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) p[k] = step.stepped(p[k], m[k], second[k]);
    store_rounded<N, kStochastic>(segment.type, segment.param, i, p, rounding, Draw::param, number);
  }
};

// For each pass, a launch calls scales and peaks, then step, for all threads of a block.
template <bool kStochastic>
struct CodedAdamWBody {
  static constexpr int kBlocks = kStochastic ? 2 : 3;
  AdamWList list;
  AdamWArgs args;

  FSDP2X_HOST_DEVICE const AdamWSegment& segment_of(int64_t tile) const {
    return list.segments[list.tile_segments[tile]];
  }
  FSDP2X_HOST_DEVICE bool steps(int64_t tile) const { return args.grads[segment_of(tile).source] != nullptr; }

  FSDP2X_HOST_DEVICE MomentTriple scales(int64_t tile, int pass, int thread) const {
    const AdamWSegment& segment = segment_of(tile);
    const TileRange range = range_of_thread(segment, tile, pass, thread);
    MomentTriple scales;
    if (range.begin >= range.end) return scales;
    const int64_t block = range.begin / kMomentBlock;
    scales.exp_avg = segment.exp_avg_scales[block];
    scales.exp_avg_sq = segment.exp_avg_sq_scales[block];
    if (segment.max_exp_avg_sq != nullptr) scales.max_exp_avg_sq = segment.max_exp_avg_sq_scales[block];
    return scales;
  }

  FSDP2X_HOST_DEVICE MomentTriple peaks(int64_t tile, int pass, int thread, const MomentTriple& scales) const {
    const AdamWSegment segment = segment_of(tile);
    const TileRange range = range_of_thread(segment, tile, pass, thread);
    const auto stepper = stepper_of(segment, scales);
    MomentTriple peaks;
    if (is_vector(segment, range)) {
      stepper.template add_peaks<kVectorNumel>(range.begin, peaks);
    } else {
      FSDP2X_NO_UNROLL
      for (int64_t i = range.begin; i < range.end; ++i) stepper.template add_peaks<1>(i, peaks);
    }
    return peaks;
  }

  // `peaks`: of the block of codes.
  FSDP2X_HOST_DEVICE void step(int64_t tile, int pass, int thread, const MomentTriple& scales,
                               const MomentTriple& peaks) const {
    const AdamWSegment segment = segment_of(tile);
    const TileRange range = range_of_thread(segment, tile, pass, thread);
    if (range.begin >= range.end) return;
    const auto stepper = stepper_of(segment, scales);
    if (is_vector(segment, range)) {
      stepper.template run<kVectorNumel>(range.begin, peaks);
    } else {
      FSDP2X_NO_UNROLL
      for (int64_t i = range.begin; i < range.end; ++i) stepper.template run<1>(i, peaks);
    }
    if (range.begin % kMomentBlock != 0) return;
    const int64_t block = range.begin / kMomentBlock;
    segment.exp_avg_scales[block] = moment_scale(peaks.exp_avg);
    segment.exp_avg_sq_scales[block] = moment_scale(peaks.exp_avg_sq);
    if (segment.max_exp_avg_sq != nullptr) segment.max_exp_avg_sq_scales[block] = moment_scale(peaks.max_exp_avg_sq);
  }

 private:
  FSDP2X_HOST_DEVICE TileRange range_of_thread(const AdamWSegment& segment, int64_t tile, int pass, int thread) const {
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    const int64_t begin = range.begin + (int64_t{pass} * kThreads + thread) * kVectorNumel;
    return {begin, begin + kVectorNumel < range.end ? begin + kVectorNumel : range.end};
  }

  FSDP2X_HOST_DEVICE CodedAdamWStepper<kStochastic> stepper_of(const AdamWSegment& segment,
                                                               const MomentTriple& scales) const {
    return {segment,
            args.grads[segment.source],
            args.steps[segment.group],
            args.grad_scale == nullptr ? 1.0f : *args.grad_scale,
            args.rounding,
            scales};
  }

  FSDP2X_HOST_DEVICE bool is_vector(const AdamWSegment& segment, TileRange range) const {
    return range.end - range.begin == kVectorNumel && is_word_aligned(args.grads[segment.source]) &&
           is_word_aligned(segment.param) && is_code_word_aligned(segment.exp_avg) &&
           is_code_word_aligned(segment.exp_avg_sq) && is_code_word_aligned(segment.max_exp_avg_sq) &&
           (!kStochastic || vectors_are_numbered(segment.numbers));
  }
};

}  // namespace fsdp2x::cuda
