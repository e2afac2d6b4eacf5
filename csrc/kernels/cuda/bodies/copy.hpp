// One thread's share of a tile of a copy plan: moves unchanged, or casts, adds, and zeros.
#pragma once

#include "kernels/cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

// Maps element i of a tile to a side with pieces that are `gap` elements apart. The number of pieces before the tile is
// divided out once. After that, 32 bits are enough, whose division is many times faster than that of 64.
struct PieceIndex {
  int64_t piece_numel;
  int64_t gap;  // 0: dense
  int64_t num_before;
  int64_t shift;  // added to i, gives its distance from the last piece that begins before the tile
  FSDP2X_HOST_DEVICE bool is_dense() const { return gap == 0; }
  FSDP2X_HOST_DEVICE int64_t operator()(int64_t i) const {
    if (is_dense()) return i;
    const auto past = static_cast<uint32_t>(i + shift);
    const auto piece = static_cast<uint32_t>(piece_numel);
    return i + (num_before + past / piece) * gap;
  }
};

struct DenseIndex {
  FSDP2X_HOST_DEVICE bool is_dense() const { return true; }
  FSDP2X_HOST_DEVICE int64_t operator()(int64_t i) const { return i; }
};

FSDP2X_HOST_DEVICE PieceIndex piece_index(const CopySegment& segment, int64_t stride, int64_t tile) {
  if (stride == segment.piece_numel || segment.piece_numel == segment.numel) return {segment.piece_numel, 0, 0, 0};
  const int64_t begin = (tile - segment.first_tile) * kTileNumel;
  const int64_t num_before = begin / segment.piece_numel;
  return {segment.piece_numel, stride - segment.piece_numel, num_before, -num_before * segment.piece_numel};
}

// A copy step loads and stores in two halves, so that a thread has two vectors in flight. The compiler cannot move a
// load before a store that might touch the same memory.

// Moves units of one size, bit for bit.
template <class U, class SrcIndex, class DstIndex>
struct MoveStep {
  const void* src;
  void* dst;
  SrcIndex src_index;
  DstIndex dst_index;
  template <int N>
  struct Values {
    U units[N];
  };
  template <int N>
  FSDP2X_HOST_DEVICE Values<N> load_at(int64_t i) const {
    Values<N> values;
    load_units<U, N>(src, src_index(i), values.units);
    return values;
  }
  template <int N>
  FSDP2X_HOST_DEVICE void store_at(int64_t i, const Values<N>& values) const {
    store_units<U, N>(dst, dst_index(i), values.units);
  }
  FSDP2X_HOST_DEVICE MoveStep<U, DenseIndex, DenseIndex> dense() const { return {src, dst, {}, {}}; }
};

// `kFloats`: the destination is f32.
template <bool kFloats, class SrcIndex, class DstIndex>
struct CastStep {
  const void* src;
  void* dst;
  SrcIndex src_index;
  DstIndex dst_index;
  DType src_type;
  DType dst_type;
  bool add;  // to the existing value
  template <int N>
  struct Values {
    float elements[N];
  };
  template <int N>
  FSDP2X_HOST_DEVICE Values<N> load_at(int64_t i) const {
    Values<N> values;
    load<N>(src_type, src, src_index(i), values.elements);
    if (add) {
      float old[N];
      load_known<kFloats, N>(dst_type, dst, dst_index(i), old);
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) values.elements[k] = old[k] + values.elements[k];
    }
    return values;
  }
  template <int N>
  FSDP2X_HOST_DEVICE void store_at(int64_t i, const Values<N>& values) const {
    store_known<kFloats, N>(dst_type, dst, dst_index(i), values.elements);
  }
  FSDP2X_HOST_DEVICE CastStep<kFloats, DenseIndex, DenseIndex> dense() const {
    return {src, dst, {}, {}, src_type, dst_type, add};
  }
};

// Works as `walk`, in two halves. Strided pieces consist of complete vectors if there are any, so the rest is dense.
template <int V, class Step>
FSDP2X_HOST_DEVICE void walk_in_pairs(TileRange range, int64_t first_vector, bool use_vectors, int thread,
                                      const Step& step) {
  if (!use_vectors || first_vector > range.end) first_vector = range.end;
  FSDP2X_NO_UNROLL
  for (int64_t i = range.begin + thread; i < first_vector; i += kThreads) {
    step.template store_at<1>(i, step.template load_at<1>(i));
  }
  const int64_t num_vectors = (range.end - first_vector) / V;
  constexpr bool kHasPairs = V * kThreads < kTileNumel;  // of bytes, a tile is one vector a thread
  FSDP2X_NO_UNROLL
  for (int64_t v = thread; v < num_vectors; v += 2 * kThreads) {
    const int64_t here = first_vector + v * V;
    const auto values = step.template load_at<V>(here);
    if (kHasPairs && v + kThreads < num_vectors) {
      const int64_t there = here + kThreads * V;
      const auto more = step.template load_at<V>(there);
      step.template store_at<V>(there, more);
    }
    step.template store_at<V>(here, values);
  }
  const int64_t last = first_vector + num_vectors * V + thread;
  const auto rest = step.dense();
  if (last < range.end) rest.template store_at<1>(last, rest.template load_at<1>(last));
}

struct ZeroStep {
  void* dst;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const uint8_t zeros[N] = {};
    store_units<uint8_t, N>(dst, i, zeros);
  }
};

FSDP2X_HOST_DEVICE bool pieces_fit(const DenseIndex&, int) { return true; }
FSDP2X_HOST_DEVICE bool pieces_fit(const PieceIndex& index, int vector_numel) {
  return index.is_dense() || (index.piece_numel % vector_numel == 0 && index.gap % vector_numel == 0);
}

// Returns the first element that starts a 16-byte word on both sides, or -1. Between strided pieces only element 0
// qualifies.
FSDP2X_HOST_DEVICE int64_t first_aligned(const void* src, int src_bytes, const void* dst, int dst_bytes, bool dense) {
  // The narrow side has the coarser grid: one of its words is a multiple of the other side's words.
  const void* narrow = src_bytes <= dst_bytes ? src : dst;
  const void* wide = src_bytes <= dst_bytes ? dst : src;
  const int narrow_bytes = src_bytes <= dst_bytes ? src_bytes : dst_bytes;
  const int wide_bytes = src_bytes <= dst_bytes ? dst_bytes : src_bytes;
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(narrow) % kWordBytes);
  const int head = past == 0 ? 0 : (kWordBytes - past) / narrow_bytes;
  if (head != 0 && !dense) return -1;
  return is_word_aligned(at(wide, static_cast<int64_t>(head) * wide_bytes)) ? head : -1;
}

template <int V, class Step>
FSDP2X_HOST_DEVICE void walk_segment(const CopySegment& segment, int64_t tile, int src_bytes, int dst_bytes, int thread,
                                     const Step& step) {
  const bool both_dense = step.src_index.is_dense() && step.dst_index.is_dense();
  const int64_t head = first_aligned(step.src, src_bytes, step.dst, dst_bytes, both_dense);
  const bool use_vectors = head >= 0 && pieces_fit(step.src_index, V) && pieces_fit(step.dst_index, V);
  // Tiles begin after the head, so that every tile begins with a vector. The first tile also takes the head.
  TileRange range = range_of(tile, segment.first_tile, segment.numel);
  const int64_t first_vector = range.begin + (use_vectors ? head : 0);
  if (use_vectors) {
    if (range.begin != 0) range.begin += head;
    range.end = range.begin == 0 ? kTileNumel + head : range.begin + kTileNumel;
    if (range.end > segment.numel) range.end = segment.numel;
  }
  if (range.begin < range.end) walk_in_pairs<V>(range, first_vector, use_vectors, thread, step);
}

template <class U, class SrcIndex, class DstIndex>
FSDP2X_HOST_DEVICE void move_tile(const CopySegment& segment, int64_t tile, const void* src, SrcIndex src_index,
                                  void* dst, DstIndex dst_index, int thread) {
  const MoveStep<U, SrcIndex, DstIndex> step = {src, dst, src_index, dst_index};
  walk_segment<kWordBytes / sizeof(U)>(segment, tile, sizeof(U), sizeof(U), thread, step);
}

// Written floats use a vector of one word, as in `walk_written`.
template <bool kFloats, class SrcIndex, class DstIndex>
FSDP2X_HOST_DEVICE void cast_known_tile(const CopySegment& segment, int64_t tile, const void* src, SrcIndex src_index,
                                        void* dst, DstIndex dst_index, bool add, int thread) {
  const CastStep<kFloats, SrcIndex, DstIndex> step = {src, dst, src_index, dst_index, segment.src, segment.dst, add};
  walk_segment<kFloats ? kFloatVectorNumel : kVectorNumel>(segment, tile, segment.src == DType::f32 ? 4 : 2,
                                                           kFloats ? 4 : 2, thread, step);
}

template <class SrcIndex, class DstIndex>
FSDP2X_HOST_DEVICE void cast_tile(const CopySegment& segment, int64_t tile, const void* src, SrcIndex src_index,
                                  void* dst, DstIndex dst_index, bool add, int thread) {
  if (segment.dst == DType::f32) {
    return cast_known_tile<true>(segment, tile, src, src_index, dst, dst_index, add, thread);
  }
  cast_known_tile<false>(segment, tile, src, src_index, dst, dst_index, add, thread);
}

// Zeros the tile's part of a rank's region from element `first` on.
FSDP2X_HOST_DEVICE void zero_tile(const PackSegment& segment, int64_t tile, void* dst, int64_t first, int thread) {
  const int64_t bytes = segment.dst == DType::f32 ? 4 : 2;
  TileRange range = range_of(tile, 0, segment.region_numel);
  if (range.begin < first) range.begin = first;
  if (range.begin >= range.end) return;
  range = {range.begin * bytes, range.end * bytes};
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(at(dst, range.begin)) % kWordBytes);
  const ZeroStep step = {dst};
  walk<kWordBytes>(range, range.begin + (past == 0 ? 0 : kWordBytes - past), true, thread, step);
}

// Moves elements of a type other than `byte`.
template <class SrcIndex, class DstIndex>
FSDP2X_HOST_DEVICE void move_typed_tile(const CopySegment& segment, int64_t tile, const void* src, SrcIndex src_index,
                                        void* dst, DstIndex dst_index, int thread) {
  if (segment.src == DType::f32) {
    return move_tile<uint32_t>(segment, tile, src, src_index, dst, dst_index, thread);
  }
  move_tile<uint16_t>(segment, tile, src, src_index, dst, dst_index, thread);
}

// --- bodies ----------------------------------------------------------------------------------------------------------

struct CopyBody {
  static constexpr int kBlocks = 6;  // as in PackBody
  CopyList list;
  const void* src_base;
  void* dst_base;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const CopySegment& segment = list.segments[list.tile_segments[tile]];
    const void* src = at(src_base, segment.src_offset);
    void* dst = at(dst_base, segment.dst_offset);
    const PieceIndex src_index = piece_index(segment, segment.src_stride, tile);
    const PieceIndex dst_index = piece_index(segment, segment.dst_stride, tile);
    if (segment.src != segment.dst)
      return cast_tile(segment, tile, src, src_index, dst, dst_index, /*add=*/false, thread);
    if (segment.src == DType::byte) {
      return move_tile<uint8_t>(segment, tile, src, src_index, dst, dst_index, thread);
    }
    move_typed_tile(segment, tile, src, src_index, dst, dst_index, thread);
  }
};

// Returns the rows of one rank as a separate segment whose offsets are 0, without those that the plan leaves out.
FSDP2X_HOST_DEVICE CopySegment rows_of(const PackSegment& segment, int64_t begin) {
  const int64_t left = segment.dim - begin;
  CopySegment rows;
  rows.piece_numel = rows.dst_stride = (left < segment.rows ? left : segment.rows) * segment.inner;
  rows.numel = segment.outer * rows.piece_numel;
  if (segment.outer == 1) {
    rows.numel = rows.numel < segment.first ? 0 : rows.numel - segment.first;
    if (rows.numel > segment.region_numel) rows.numel = segment.region_numel;
    rows.piece_numel = rows.dst_stride = rows.numel;
  }
  rows.src_stride = segment.dim * segment.inner;
  rows.src = segment.src;
  rows.dst = segment.dst;
  return rows;
}

// The bits of 1 in the types of a flag.
inline constexpr uint32_t kOneInF32 = 0x3f800000;
inline constexpr uint16_t kOneInBf16 = 0x3f80, kOneInF16 = 0x3c00;

FSDP2X_HOST_DEVICE void write_flag(const PackSegment& segment, void* out, bool flag, int thread) {
  FSDP2X_NO_UNROLL
  for (int i = thread; i < segment.flag_numel; i += kThreads) {
    const bool is_one = i == 0 && flag;
    if (segment.flag_type == DType::f32) {
      const uint32_t bits = is_one ? kOneInF32 : 0;
      store_units<uint32_t, 1>(out, i, &bits);
    } else {
      const uint16_t one = segment.flag_type == DType::bf16 ? kOneInBf16 : kOneInF16;
      const uint16_t bits = is_one ? one : uint16_t{0};
      store_units<uint16_t, 1>(out, i, &bits);
    }
  }
}

struct PackBody {
  static constexpr int kBlocks = 6;  // a tile is few turns of a loop, so other blocks hide the plan lookup
  PackList list;
  PackTable grads;
  void* dst;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const PackSegment& segment = list.segments[list.tile_segments[tile]];
    const TableMode mode = grads.mode[segment.source];
    if (mode == TableMode::skip) return;
    const void* base = grads.base[segment.source];
    const auto number = static_cast<uint32_t>(tile - segment.first_tile);
    const uint32_t rank = number / static_cast<uint32_t>(segment.rank_tiles);
    tile = number - rank * static_cast<uint32_t>(segment.rank_tiles);  // of the rank
    char* rank_dst = at(dst, rank * segment.rank_bytes);
    if (tile == 0) write_flag(segment, at(rank_dst, segment.flag_offset), grads.flag[segment.source], thread);
    const bool add = mode == TableMode::add;
    if (segment.region_numel == 0 || (add && base == nullptr)) return;
    int64_t begin = rank * segment.rows;
    if (begin > segment.dim) begin = segment.dim;
    const CopySegment rows = rows_of(segment, begin);
    void* out = at(rank_dst, segment.dst_offset);
    if (base == nullptr) return zero_tile(segment, tile, out, 0, thread);
    const void* src = at(base, (begin * segment.inner + segment.first) * (segment.src == DType::f32 ? 4 : 2));
    const PieceIndex src_index = piece_index(rows, rows.src_stride, tile);
    if (segment.src == segment.dst && !add) {
      move_typed_tile(rows, tile, src, src_index, out, DenseIndex(), thread);
    } else {
      cast_tile(rows, tile, src, src_index, out, DenseIndex(), add, thread);
    }
    if (!add) zero_tile(segment, tile, out, rows.numel, thread);
  }
};

}  // namespace fsdp2x::cuda
