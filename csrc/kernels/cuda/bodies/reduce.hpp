// One thread's share of a reduction: scales and accumulates summed rows. Also the passes over gradients in place.
#pragma once

#include <math.h>

#include "kernels/cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

// `kFloats`: the target is f32.
template <bool kFloats>
struct ReduceStep {
  const void* source;
  const ReduceSegment& segment;
  void* dst;
  const ReduceArgs& args;
  bool add;

  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    float sum[N];
    load<N>(segment.src, at(source, segment.src_offset), i, sum);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      sum[k] = scaled(sum[k], args.scale);
      if (args.round) sum[k] = rounded(segment.src, sum[k]);
    }
    if (add) {
      float old[N];
      load_known<kFloats, N>(segment.dst, dst, i, old);
      // Add the cast sum, as if a gradient of the target's type had been made and then added.
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) sum[k] = old[k] + (kFloats ? sum[k] : rounded(segment.dst, sum[k]));
    }
    store_known<kFloats, N>(segment.dst, dst, i, sum);
  }
};

struct ReduceBody {
  static constexpr int kBlocks = 6;  // as many as possible without register spills
  ReduceList list;
  const void* source;
  TargetTable targets;
  ReduceArgs args;

  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const ReduceSegment segment = list.segments[list.tile_segments[tile]];
    const TableMode mode = targets.mode[segment.target];
    if (mode == TableMode::skip) return;
    void* dst = targets.base[segment.target];
    const bool use_vectors = is_word_aligned(dst) && is_word_aligned(at(source, segment.src_offset));
    const bool add = mode == TableMode::add;
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    const ReduceStep<true> float_step = {source, segment, dst, args, add};
    const ReduceStep<false> step = {source, segment, dst, args, add};
    walk_written(segment.dst, range, use_vectors, thread, float_step, step);
  }
};

// --- gradients in place ----------------------------------------------------------------------------------------------

template <bool kFloats>
struct SquareStep {
  const void* src;
  DType type;
  double& sum;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    float values[N];
    load_known<kFloats, N>(type, src, i, values);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) sum += static_cast<double>(values[k]) * static_cast<double>(values[k]);
  }
};

struct SquareBody {
  ReduceList list;
  TargetTable targets;
  double* tile_sums;

  // Returns the thread's part of the tile's sum.
  FSDP2X_HOST_DEVICE double run(int64_t tile, int thread) const {
    const ReduceSegment& segment = list.segments[list.tile_segments[tile]];
    double sum = 0.0;
    if (targets.mode[segment.target] == TableMode::skip) return sum;
    const void* src = targets.base[segment.target];
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    const SquareStep<true> float_step = {src, segment.dst, sum};
    const SquareStep<false> step = {src, segment.dst, sum};
    walk_written(segment.dst, range, is_word_aligned(src), thread, float_step, step);
    return sum;
  }
};

template <bool kFloats>
struct ScaleStep {
  void* data;
  DType type;
  float factor;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    float values[N];
    load_known<kFloats, N>(type, data, i, values);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) values[k] = values[k] * factor;
    store_known<kFloats, N>(type, data, i, values);
  }
};

struct ScaleBody {
  static constexpr int kBlocks = 4;
  ReduceList list;
  TargetTable targets;
  const double* factor;

  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const ReduceSegment& segment = list.segments[list.tile_segments[tile]];
    if (targets.mode[segment.target] == TableMode::skip || *factor == 1.0) return;
    void* data = targets.base[segment.target];
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    const ScaleStep<true> float_step = {data, segment.dst, static_cast<float>(*factor)};
    const ScaleStep<false> step = {data, segment.dst, static_cast<float>(*factor)};
    walk_written(segment.dst, range, is_word_aligned(data), thread, float_step, step);
  }
};

// --- sums over a block -----------------------------------------------------------------------------------------------

// Folds the upper half of `num` values onto the lower. Repeated down to one value, this is the same order on every
// device.
FSDP2X_HOST_DEVICE void fold_half(double* values, int half, int thread) {
  if (thread < half) values[thread] += values[thread + half];
}

inline constexpr int kSumThreads = 1024;  // of a block that adds up

// Returns the thread's part of sum `block`. All of its loads are in flight at once.
FSDP2X_HOST_DEVICE double strided_sum(const double* values, int64_t num, int64_t block, int thread) {
  static_assert(kSumNumel % kSumThreads == 0);
  double sum = 0.0;
  FSDP2X_UNROLL
  for (int turn = 0; turn < kSumNumel / kSumThreads; ++turn) {
    const int64_t i = block * kSumNumel + turn * kSumThreads + thread;
    if (i < num) sum += values[i];
  }
  return sum;
}

// Computes the square root of torch's total_norm and the factor of its clip_grads_with_norm_. torch divides a number by
// a tensor as the number times the reciprocal.
template <class A>
FSDP2X_HOST_DEVICE void set_clip_factor(double square_sum, double max_norm, double* norm, double* factor) {
  const auto root = static_cast<A>(sqrt(square_sum));
  const A raw = A(1) / (root + static_cast<A>(1e-6)) * static_cast<A>(max_norm);
  *norm = static_cast<double>(root);
  *factor = raw > A(1) ? 1.0 : static_cast<double>(raw);
}

FSDP2X_HOST_DEVICE void set_clip_factor(double square_sum, double max_norm, bool in_f64, double* norm, double* factor) {
  if (in_f64) return set_clip_factor<double>(square_sum, max_norm, norm, factor);
  set_clip_factor<float>(square_sum, max_norm, norm, factor);
}

}  // namespace fsdp2x::cuda
