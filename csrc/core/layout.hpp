// Where every parameter of a unit lies: in the shard pool, the gather slot, the reduce scratch and the rank-major
// segments. The only place that knows how rows map to ranks. Built once per unit, immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/dtype.hpp"

namespace fsdp2x {

// A cache line of the host. Every parameter begins on a multiple of it in pools, slots, scratches and segments, and so
// do the flags and scales beside them. Sizes of all of these, and of device buffers, are multiples. Python packs
// tensors by it as `_C.ALIGN_BYTES`.
inline constexpr size_t kAlignBytes = 64;

constexpr size_t align_up(size_t bytes, size_t alignment = kAlignBytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// Rows of `rank` when `dim` rows are cut as torch.chunk cuts them: ceil(dim / world) rows each, the last ranks short or
// empty.
RowRange shard_rows(int64_t dim, int world, int rank);

// What the layout needs to know of one parameter. Its global tensor is seen as [outer, dim, inner] and sharded along
// `dim`: outer == 1 for Shard(0).
struct ParamShape {
  int64_t outer = 1;
  int64_t dim = 0;
  int64_t inner = 1;
  DType orig = DType::f32;     // dtype of the sharded parameter and of `.grad`
  DType compute = DType::f32;  // dtype of the unsharded parameter
  DType reduce = DType::f32;   // dtype gradients are summed in
  bool trainable = true;
  bool in_slot = true;  // false: gathered by somebody else (an all-gather extension)
  int64_t numel() const { return outer * dim * inner; }
  // What peers may read a gradient in: as autograd made it, where a sum in fp32 loses nothing by that.
  DType packed() const {
    const bool narrow = compute == DType::bf16 || compute == DType::f16;
    return narrow && reduce == DType::f32 ? compute : reduce;
  }
};

// A strided copy of `count` pieces of `piece_numel` elements each. Offsets in bytes from a base pointer, strides in
// elements.
struct Copy {
  size_t src_offset = 0;
  size_t dst_offset = 0;
  int64_t count = 0;
  int64_t piece_numel = 0;
  int64_t src_stride = 0;
  int64_t dst_stride = 0;
  DType src = DType::f32;
  DType dst = DType::f32;
};

struct ParamPlace {
  ParamShape shape;
  RowRange rows;                     // of this rank
  int64_t shard_numel = 0;           // outer * rows.size() * inner
  int64_t padded_shard_numel = 0;    // outer * ceil(dim / world) * inner: the same on every rank
  size_t shard_offset = 0;           // in the shard pool, bytes
  size_t gradient_offset = 0;        // in the gradient pool, bytes; trainable parameters only
  size_t slot_offset = 0;            // in the gather slot, bytes
  size_t scratch_offset = 0;         // in the reduce scratch, bytes; trainable parameters only
  size_t wide_scratch_offset = 0;    // likewise when everything is packed in the reduce dtype
  size_t gather_segment_offset = 0;  // in one rank's gather segment, bytes
  size_t reduce_segment_offset = 0;  // in one rank's reduce segment, bytes; trainable parameters only
};

// The same elements in as few copies: pieces of one size that lie at even steps on both sides, as those of all ranks of
// one parameter do, become one strided copy. Sorted by destination; no two copies may write the same place.
std::vector<Copy> joined(std::vector<Copy> copies);

// Rows of a shard (contiguous at `shard_offset`) -> their place in the whole tensor at `whole_offset`.
Copy shard_to_whole(const ParamShape& shape, RowRange rows, size_t shard_offset, DType src, size_t whole_offset,
                    DType dst);

class Layout {
 public:
  // `whole_chunks`: a parameter's place in the slot has room for `world` equal chunks of padded_shard_numel elements,
  // so that a collective can gather into it even when the last ranks are short.
  Layout(std::vector<ParamShape> shapes, int world, int rank, bool whole_chunks = false);

  int world() const { return ranks_.world; }
  bool has_whole_chunks() const { return ranks_.whole_chunks; }
  int rank() const { return ranks_.rank; }
  const std::vector<ParamPlace>& params() const { return params_; }

  size_t shard_pool_bytes() const { return shard_pool_bytes_; }
  // Holds the shards' gradients, aligned and padded as the shards are: trainable parameters only.
  size_t gradient_pool_bytes() const { return gradient_pool_bytes_; }
  // Whether a rank's reduce segment holds every gradient at its place in the gradient pool, in the dtype of `.grad`.
  bool can_reduce_in_place() const;
  size_t slot_bytes() const { return slot_bytes_; }
  // The scratch begins with one flag byte per parameter (all parameters, in order), rounded up to kAlignBytes;
  // scratch_offset of the parameters counts from the start of the scratch and lies behind the flags. Gradients that are
  // only copied are packed in ParamShape::packed(), gradients that are added up in the reduce dtype: the wide scratch.
  size_t scratch_bytes() const { return scratch_bytes_; }
  size_t wide_scratch_bytes() const { return wide_scratch_bytes_; }
  size_t gather_segment_bytes() const { return gather_segment_bytes_; }
  size_t reduce_segment_bytes() const { return reduce_segment_bytes_; }
  // A rank's reduce segment, then one flag per parameter in the reduce dtype (> 0: some rank has a gradient).
  size_t flagged_segment_bytes() const { return reduce_segment_bytes_ + align_up(params_.size() * sizeof(double)); }
  // The same parameters, of which those alone are trainable that were and that `trains` names too.
  Layout training(const std::vector<bool>& trains) const;

  // Whether shards may rest in the slot: as rows of the whole parameters, one piece each, that no gather has to cast.
  bool can_rest_in_slot() const;
  // Where they begin there, in bytes, by parameter.
  std::vector<size_t> offsets_in_slot() const;

  // This rank's shard pool -> its rows in the gather slot, with the cast. Empty shards are left out.
  const std::vector<Copy>& shard_to_slot() const { return shard_to_slot_; }
  // This rank's shard pool -> its gather segment, with the cast.
  const std::vector<Copy>& shard_to_segment() const { return shard_to_segment_; }
  // Segment of `source_rank` (offset from that segment's start) -> the gather slot. Pads are left out.
  std::vector<Copy> segment_to_slot(int source_rank) const;
  // The segments of all ranks, laid end to end every `segment_bytes` -> the gather slot.
  std::vector<Copy> segments_to_slot(size_t segment_bytes) const;
  // Whole unsharded gradient of parameter `param` (contiguous, dtype `grad`) -> the W reduce segments laid end to
  // end, with the cast. Pads are not written: zero the buffer once.
  std::vector<Copy> gradient_to_segments(size_t param, DType grad) const;

 private:
  struct Ranks {
    int world;
    int rank;
    bool whole_chunks;
  };

  Ranks ranks_;
  std::vector<ParamPlace> params_;
  size_t shard_pool_bytes_ = 0;
  size_t gradient_pool_bytes_ = 0;
  size_t slot_bytes_ = 0;
  size_t scratch_bytes_ = 0;
  size_t wide_scratch_bytes_ = 0;
  size_t gather_segment_bytes_ = 0;
  size_t reduce_segment_bytes_ = 0;
  std::vector<Copy> shard_to_slot_;
  std::vector<Copy> shard_to_segment_;
};

}  // namespace fsdp2x
