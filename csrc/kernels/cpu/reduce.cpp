// The reduction kernel: one walk over the destination in tiles that stay in the first-level cache. Sources are read
// once, and the destination is written once.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/kernel_math.hpp"
#include "kernels/cpu/kernel_table.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x::cpu {
namespace {

DType source_type(const ReducePiece& piece, int source) {
  return piece.source_types == nullptr ? piece.src_type : piece.source_types[source];
}

bool all_f32(const ReducePiece& piece) {
  if (piece.src_type != DType::f32 || piece.dst_type != DType::f32) return false;
  for (int s = 0; s < piece.num_sources; ++s) {
    if (source_type(piece, s) != DType::f32) return false;
  }
  return true;
}

// Reduces fp32 to fp32 with few sources: sum, division, and accumulation stay in registers.
void reduce_fused(const KernelTable& table, const ReducePiece& piece, int64_t begin, int64_t end) {
  const float divisor = static_cast<float>(piece.divisor);
  const bool multiply = reciprocal_is_exact(divisor);
  const float factor = multiply ? 1.0f / divisor : divisor;
  const bool streams = !piece.accumulate && static_cast<size_t>(end - begin) * sizeof(float) >= kStreamSumBytes;
  const int index = piece.num_sources - 1;
  const auto loop =
      streams ? table.stream_sum_f32[!multiply][index] : table.sum_f32[piece.accumulate][!multiply][index];
  const float* sources[kMaxFusedSources];
  for (int s = 0; s < piece.num_sources; ++s) sources[s] = static_cast<const float*>(piece.sources[s]) + begin;
  loop(static_cast<float*>(piece.dst) + begin, sources, end - begin, factor);
}

// Sums `numel` elements from `begin` on and divides.
template <class A>
void sum_into(A* acc, int64_t numel, const Arithmetic<A>& ops, const ReducePiece& piece, int64_t begin) {
  const int src = static_cast<int>(piece.src_type);
  if (piece.num_sources == 0) {
    std::memset(acc, 0, static_cast<size_t>(numel) * sizeof(A));
    return;
  }
  for (int s = 0; s < piece.num_sources; ++s) {
    const DType type = source_type(piece, s);
    const auto take = (s == 0 ? ops.load : ops.add)[static_cast<int>(type)];
    take(acc, static_cast<const std::byte*>(piece.sources[s]) + static_cast<size_t>(begin) * dtype_bytes(type), numel);
  }
  divide_all(ops, acc, numel, piece.divisor);
  if (piece.round && dtype_bytes(piece.src_type) < sizeof(A)) {
    alignas(kTileAlignBytes) std::byte wire[kTileNumel * sizeof(A)];
    ops.store[src](wire, acc, numel);
    ops.load[src](acc, wire, numel);
  }
}

// The destination has the accumulator's type, so it serves as the accumulator.
template <class A>
void reduce_in_place(const Arithmetic<A>& ops, const ReducePiece& piece, int64_t begin, int64_t end) {
  constexpr int kOwn = static_cast<int>(std::is_same_v<A, double> ? DType::f64 : DType::f32);
  alignas(kTileAlignBytes) A tile[kTileNumel];
  for (; begin < end; begin += kTileNumel) {
    const int64_t count = std::min(kTileNumel, end - begin);
    A* out = static_cast<A*>(piece.dst) + begin;
    sum_into(piece.accumulate ? tile : out, count, ops, piece, begin);
    if (piece.accumulate) ops.add[kOwn](out, tile, count);
  }
}

// The destination is narrower, so a tile accumulates and is rounded to it.
template <class A>
void reduce_rounded(const Arithmetic<A>& ops, const ReducePiece& piece, int64_t begin, int64_t end) {
  constexpr int kOwn = static_cast<int>(std::is_same_v<A, double> ? DType::f64 : DType::f32);
  const int dst = static_cast<int>(piece.dst_type);
  alignas(kTileAlignBytes) A tile[kTileNumel];
  alignas(kTileAlignBytes) A sum[kTileNumel];
  for (; begin < end; begin += kTileNumel) {
    const int64_t count = std::min(kTileNumel, end - begin);
    std::byte* out = static_cast<std::byte*>(piece.dst) + static_cast<size_t>(begin) * dtype_bytes(piece.dst_type);
    sum_into(tile, count, ops, piece, begin);
    if (piece.accumulate) {
      // Add the cast sum, as if a gradient of dst's type had been made and then added.
      ops.load[dst](sum, out, count);
      ops.store[dst](out, tile, count);
      ops.load[dst](tile, out, count);
      ops.add[kOwn](tile, sum, count);
    }
    ops.store[dst](out, tile, count);
  }
}

template <class A>
void reduce_tiles(const Arithmetic<A>& ops, const ReducePiece& piece, int64_t begin, int64_t end) {
  constexpr DType kOwn = std::is_same_v<A, double> ? DType::f64 : DType::f32;
  return piece.dst_type == kOwn ? reduce_in_place(ops, piece, begin, end) : reduce_rounded(ops, piece, begin, end);
}

}  // namespace

void reduce(const ReducePiece& piece, int64_t begin, int64_t end) {
  require_summable(piece.src_type, "reduce");
  require_summable(piece.dst_type, "reduce");
  if (begin >= end) return;
  const KernelTable& table = kernel_table();
  if (piece.src_type == DType::f64 || piece.dst_type == DType::f64) return reduce_tiles(table.f64, piece, begin, end);
  if (all_f32(piece) && piece.num_sources >= 1 && piece.num_sources <= kMaxFusedSources) {
    return reduce_fused(table, piece, begin, end);
  }
  reduce_tiles(table.f32, piece, begin, end);
}

}  // namespace fsdp2x::cpu
