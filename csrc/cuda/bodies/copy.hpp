// One thread's share of a tile of a copy plan: moves unchanged, or casts, scales, adds and zeroes.
#pragma once

#include "cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

// Where element i of a segment lies on a side with pieces `stride` apart.
struct PieceIndex {
  int64_t piece_numel;
  int64_t stride;
  bool dense;
  FSDP2X_HOST_DEVICE int64_t operator()(int64_t i) const {
    if (dense) return i;
    if (i <= INT32_MAX && piece_numel <= INT32_MAX) {  // the division of 64 bits is many times slower
      const auto index = static_cast<uint32_t>(i);
      const auto piece = static_cast<uint32_t>(piece_numel);
      return static_cast<int64_t>(index / piece) * stride + index % piece;
    }
    return i / piece_numel * stride + i % piece_numel;
  }
};

FSDP2X_HOST_DEVICE PieceIndex piece_index(const CopySegment& segment, int64_t stride) {
  const bool dense = stride == segment.piece_numel || segment.piece_numel == segment.numel;
  return {segment.piece_numel, stride, dense};
}

// A step of a copy loads and stores in two halves, so that a thread has two vectors on their way at once: the compiler
// cannot move a load before a store that might touch the same memory.

// Moves units of one size, bit for bit.
template <class U>
struct MoveStep {
  const void* src;
  void* dst;
  PieceIndex src_index;
  PieceIndex dst_index;
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
};

template <class A>
struct CastStep {
  const void* src;
  void* dst;
  PieceIndex src_index;
  PieceIndex dst_index;
  DType src_type;
  DType dst_type;
  Scale scale;
  bool add;
  template <int N>
  struct Values {
    A elements[N];
  };
  template <int N>
  FSDP2X_HOST_DEVICE Values<N> load_at(int64_t i) const {
    Values<N> values;
    load<A, N>(src_type, src, src_index(i), values.elements);
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) values.elements[k] = scaled(values.elements[k], scale);
    if (add) {
      A old[N];
      load<A, N>(dst_type, dst, dst_index(i), old);
      FSDP2X_UNROLL
      for (int k = 0; k < N; ++k) values.elements[k] = old[k] + values.elements[k];
    }
    return values;
  }
  template <int N>
  FSDP2X_HOST_DEVICE void store_at(int64_t i, const Values<N>& values) const {
    store<A, N>(dst_type, dst, dst_index(i), values.elements);
  }
};

// As `walk`, in two halves.
template <int V, class Step>
FSDP2X_HOST_DEVICE void walk_in_pairs(TileRange range, int64_t first_vector, bool use_vectors, int thread,
                                      const Step& step) {
  if (!use_vectors || first_vector > range.end) first_vector = range.end;
  for (int64_t i = range.begin + thread; i < first_vector; i += kThreads) {
    step.template store_at<1>(i, step.template load_at<1>(i));
  }
  const int64_t num_vectors = (range.end - first_vector) / V;
  for (int64_t v = thread; v < num_vectors; v += 2 * kThreads) {
    const int64_t here = first_vector + v * V;
    const auto values = step.template load_at<V>(here);
    if (v + kThreads < num_vectors) {
      const int64_t there = here + kThreads * V;
      const auto more = step.template load_at<V>(there);
      step.template store_at<V>(there, more);
    }
    step.template store_at<V>(here, values);
  }
  for (int64_t i = first_vector + num_vectors * V + thread; i < range.end; i += kThreads) {
    step.template store_at<1>(i, step.template load_at<1>(i));
  }
}

struct ZeroStep {
  void* dst;
  template <int N>
  FSDP2X_HOST_DEVICE void run(int64_t i) const {
    const uint8_t zeros[N] = {};
    store_units<uint8_t, N>(dst, i, zeros);
  }
};

FSDP2X_HOST_DEVICE bool pieces_fit(const CopySegment& segment, const PieceIndex& index, int vector_numel) {
  return index.dense || (segment.piece_numel % vector_numel == 0 && index.stride % vector_numel == 0);
}

// The first element that starts a 16-byte word on both sides, or -1. Between strided pieces only element 0 will do.
FSDP2X_HOST_DEVICE int64_t first_aligned(const void* src, int src_bytes, const void* dst, int dst_bytes, bool dense) {
  // The narrow side has the coarser grid: a word of it is a whole number of words of the other.
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
  const bool both_dense = step.src_index.dense && step.dst_index.dense;
  const int64_t head = first_aligned(step.src, src_bytes, step.dst, dst_bytes, both_dense);
  const bool use_vectors =
      head >= 0 && pieces_fit(segment, step.src_index, V) && pieces_fit(segment, step.dst_index, V);
  // Tiles begin behind the head, so that every tile begins with a vector; the first one takes the head as well.
  TileRange range = range_of(tile, segment.first_tile, segment.numel);
  const int64_t first_vector = range.begin + (use_vectors ? head : 0);
  if (use_vectors) {
    if (range.begin != 0) range.begin += head;
    range.end = range.begin == 0 ? kTileNumel + head : range.begin + kTileNumel;
    if (range.end > segment.numel) range.end = segment.numel;
  }
  if (range.begin < range.end) walk_in_pairs<V>(range, first_vector, use_vectors, thread, step);
}

template <class U>
FSDP2X_HOST_DEVICE void move_tile(const CopySegment& segment, int64_t tile, const void* src, void* dst, int thread) {
  const MoveStep<U> step = {src, dst, piece_index(segment, segment.src_stride),
                            piece_index(segment, segment.dst_stride)};
  walk_segment<kWordBytes / sizeof(U)>(segment, tile, sizeof(U), sizeof(U), thread, step);
}

template <class A>
FSDP2X_HOST_DEVICE void cast_tile(const CopySegment& segment, int64_t tile, const void* src, void* dst, Scale scale,
                                  bool add, int thread) {
  const CastStep<A> step = {src,
                            dst,
                            piece_index(segment, segment.src_stride),
                            piece_index(segment, segment.dst_stride),
                            segment.src,
                            segment.dst,
                            scale,
                            add};
  walk_segment<kVectorNumel>(segment, tile, static_cast<int>(dtype_bytes(segment.src)),
                             static_cast<int>(dtype_bytes(segment.dst)), thread, step);
}

// In f64 where a side is f64. Plans without such segments run kernels without that code, which need fewer registers.
template <bool kHasF64>
FSDP2X_HOST_DEVICE void any_cast_tile(const CopySegment& segment, int64_t tile, const void* src, void* dst, Scale scale,
                                      bool add, int thread) {
  if constexpr (kHasF64) {
    if (segment.src == DType::f64 || segment.dst == DType::f64) {
      return cast_tile<double>(segment, tile, src, dst, scale, add, thread);
    }
  }
  cast_tile<float>(segment, tile, src, dst, scale, add, thread);
}

// Zeroes from element `first` on, in a dense destination.
FSDP2X_HOST_DEVICE void zero_tile(const CopySegment& segment, int64_t tile, void* dst, int64_t first, int thread) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(segment.dst));
  TileRange range = range_of(tile, segment.first_tile, segment.numel + segment.pad_numel);
  if (range.begin < first) range.begin = first;
  if (range.begin >= range.end) return;
  range = {range.begin * bytes, range.end * bytes};
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(at(dst, range.begin)) % kWordBytes);
  const ZeroStep step = {dst};
  walk<kWordBytes>(range, range.begin + (past == 0 ? 0 : kWordBytes - past), true, thread, step);
}

template <bool kHasF64>
FSDP2X_HOST_DEVICE void move_tile_of_floats(const CopySegment& segment, int64_t tile, const void* src, void* dst,
                                            int thread) {
  if constexpr (kHasF64) {
    if (segment.src == DType::f64) return move_tile<uint64_t>(segment, tile, src, dst, thread);
  }
  if (segment.src == DType::f32) return move_tile<uint32_t>(segment, tile, src, dst, thread);
  move_tile<uint16_t>(segment, tile, src, dst, thread);
}

template <bool kHasF64>
FSDP2X_HOST_DEVICE void copy_tile(const CopySegment& segment, int64_t tile, const void* src_base, void* dst_base,
                                  int thread) {
  const void* src = at(src_base, segment.src_offset);
  void* dst = at(dst_base, segment.dst_offset);
  if (segment.src != segment.dst) {
    return any_cast_tile<kHasF64>(segment, tile, src, dst, Scale(), false, thread);
  }
  if (segment.src == DType::byte) return move_tile<uint8_t>(segment, tile, src, dst, thread);
  move_tile_of_floats<kHasF64>(segment, tile, src, dst, thread);
}

// --- bodies ----------------------------------------------------------------------------------------------------------

template <bool kHasF64>
struct CopyBody {
  CopyList list;
  const void* src;
  void* dst;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    copy_tile<kHasF64>(list.segments[list.tile_segments[tile]], tile, src, dst, thread);
  }
};

template <bool kHasF64>
struct GatherPeersBody {
  CopyList list;
  PeerTable peers;
  void* dst;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const CopySegment& segment = list.segments[list.tile_segments[tile]];
    copy_tile<kHasF64>(segment, tile, peers.base[segment.source], dst, thread);
  }
};

template <bool kHasF64>
struct PackBody {
  CopyList list;
  PackTable grads;
  void* dst;
  Scale scale;
  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const CopySegment& segment = list.segments[list.tile_segments[tile]];
    const TableMode mode = grads.mode[segment.source];
    const void* base = grads.base[segment.source];
    const bool add = mode == TableMode::add;
    if (mode == TableMode::skip || (add && base == nullptr)) return;
    void* out = at(dst, segment.dst_offset);
    if (base == nullptr) return zero_tile(segment, tile, out, 0, thread);
    const void* src = at(base, segment.src_offset);
    if (segment.src == segment.dst && !add && scale.mode == ScaleMode::none) {
      move_tile_of_floats<kHasF64>(segment, tile, src, out, thread);
    } else {
      any_cast_tile<kHasF64>(segment, tile, src, out, scale, add, thread);
    }
    if (!add) zero_tile(segment, tile, out, segment.numel, thread);
  }
};

}  // namespace fsdp2x::cuda
