// One thread's share of a reduction: sum over the sources in rank order, scale, accumulate, square; and the passes over
// gradients that are already in place.
#pragma once

#include <math.h>

#include "cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

// What a thread has seen of its tile.
struct Seen {
  double squares = 0.0;
  bool all_finite = true;
  template <class A>
  FSDP2X_HOST_DEVICE void add(A value) {
    squares += static_cast<double>(value) * static_cast<double>(value);
    all_finite = all_finite && is_finite(value);
  }
};

template <class A>
struct ReduceStep {
  const PeerTable& sources;
  int64_t src_offset;
  void* dst;
  DType src_type;
  DType dst_type;
  const ReduceArgs& args;
  bool add;
  Seen seen;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) {
    A sum[N];
    load<A, N>(src_type, at(sources.base[0], src_offset), i, sum);
    for (int rank = 1; rank < sources.num_ranks; ++rank) {
      A more[N];
      load<A, N>(src_type, at(sources.base[rank], src_offset), i, more);
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) sum[k] = sum[k] + more[k];
    }
    A old[N] = {};
    if (add) load<A, N>(dst_type, dst, i, old);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) {
      A value = scaled(sum[k], args.scale);
      if (args.round) value = rounded(src_type, value);
      value = rounded(dst_type, value);
      // What is added is the cast sum, as if a gradient of the target's type had been made and then added.
      if (add) value = rounded(dst_type, old[k] + value);
      seen.add(value);
      sum[k] = value;
    }
    store<A, N>(dst_type, dst, i, sum);
  }
};

template <bool kHasF64>
struct ReduceBody {
  ReduceList list;
  PeerTable sources;
  TargetTable targets;
  ReduceArgs args;

  template <class A>
  FSDP2X_HOST_DEVICE Seen run_as(const ReduceSegment& segment, int64_t tile, int thread) const {
    void* dst = targets.base[segment.target];
    ReduceStep<A> step = {sources,
                          segment.src_offset,
                          dst,
                          segment.src,
                          segment.dst,
                          args,
                          targets.mode[segment.target] == TableMode::add,
                          Seen()};
    bool use_vectors = is_word_aligned(dst);
    for (int rank = 0; rank < sources.num_ranks; ++rank) {
      use_vectors = use_vectors && is_word_aligned(at(sources.base[rank], segment.src_offset));
    }
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk_written(segment.dst, range, use_vectors, thread, step);
    return step.seen;
  }

  FSDP2X_HOST_DEVICE Seen run(int64_t tile, int thread) const {
    const ReduceSegment& segment = list.segments[list.tile_segments[tile]];
    if (targets.mode[segment.target] == TableMode::skip) return Seen();
    if constexpr (kHasF64) {
      if (segment.src == DType::f64 || segment.dst == DType::f64) return run_as<double>(segment, tile, thread);
    }
    return run_as<float>(segment, tile, thread);
  }
  FSDP2X_HOST_DEVICE double* tile_sums() const { return args.tile_sums; }
  FSDP2X_HOST_DEVICE float* found_inf() const { return args.found_inf; }
};

// --- gradients in place ----------------------------------------------------------------------------------------------

template <class A>
struct SquareStep {
  const void* src;
  DType type;
  Seen seen;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) {
    A values[N];
    load<A, N>(type, src, i, values);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) seen.add(values[k]);
  }
};

template <bool kHasF64>
struct SquareBody {
  ReduceList list;
  TargetTable targets;
  double* sums;
  float* inf;

  template <class A>
  FSDP2X_HOST_DEVICE Seen run_as(const ReduceSegment& segment, int64_t tile, int thread) const {
    const void* src = targets.base[segment.target];
    SquareStep<A> step = {src, segment.dst, Seen()};
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk_written(segment.dst, range, is_word_aligned(src), thread, step);  // in the order of a reduction
    return step.seen;
  }

  FSDP2X_HOST_DEVICE Seen run(int64_t tile, int thread) const {
    const ReduceSegment& segment = list.segments[list.tile_segments[tile]];
    if (targets.mode[segment.target] == TableMode::skip) return Seen();
    if constexpr (kHasF64) {
      if (segment.dst == DType::f64) return run_as<double>(segment, tile, thread);
    }
    return run_as<float>(segment, tile, thread);
  }
  FSDP2X_HOST_DEVICE double* tile_sums() const { return sums; }
  FSDP2X_HOST_DEVICE float* found_inf() const { return inf; }
};

template <class A>
struct ScaleStep {
  void* data;
  DType type;
  A factor;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    A values[N];
    load<A, N>(type, data, i, values);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) values[k] = values[k] * factor;
    store<A, N>(type, data, i, values);
  }
};

template <bool kHasF64>
struct ScaleBody {
  static constexpr int kBlocks = 4;
  ReduceList list;
  TargetTable targets;
  const double* factor;

  template <class A>
  FSDP2X_HOST_DEVICE void run_as(const ReduceSegment& segment, int64_t tile, int thread) const {
    void* data = targets.base[segment.target];
    const ScaleStep<A> step = {data, segment.dst, static_cast<A>(*factor)};
    const TileRange range = range_of(tile, segment.first_tile, segment.numel);
    walk_written(segment.dst, range, is_word_aligned(data), thread, step);
  }

  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const ReduceSegment& segment = list.segments[list.tile_segments[tile]];
    if (targets.mode[segment.target] == TableMode::skip || *factor == 1.0) return;
    if constexpr (kHasF64) {
      if (segment.dst == DType::f64) return run_as<double>(segment, tile, thread);
    }
    run_as<float>(segment, tile, thread);
  }
};

// --- sums over a block -----------------------------------------------------------------------------------------------

// Folds the upper half of `num` values onto the lower: repeated down to one, the same order on every device.
FSDP2X_HOST_DEVICE void fold_half(double* values, int half, int thread) {
  if (thread < half) values[thread] += values[thread + half];
}

inline constexpr int kSumThreads = 1024;  // of the one block that adds up

FSDP2X_HOST_DEVICE double strided_sum(const double* values, int64_t num, int thread) {
  double sum = 0.0;
  for (int64_t i = thread; i < num; i += kSumThreads) sum += values[i];
  return sum;
}

// The square root of torch's total_norm, and the factor of its clip_grads_with_norm_, which divides a number by a
// tensor as the number times the reciprocal.
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
