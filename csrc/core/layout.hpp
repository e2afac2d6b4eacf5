// Defines where every parameter of a unit lies: in the shard pool, the gather slot, and the rank-major segments. Only
// this class maps rows to ranks. Built once per unit, immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/dtype.hpp"

namespace fsdp2x {

// A cache line of the host. In pools, slots, scratches, and segments, every parameter begins on a multiple of it, and
// so do flags and scales. Their sizes, and those of device buffers, are multiples too. Python packs tensors by it as
// `_C.ALIGN_BYTES`.
inline constexpr size_t kAlignBytes = 64;

constexpr size_t align_up(size_t bytes, size_t alignment = kAlignBytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// A part of every rank's reduce segment, in bytes.
struct Piece {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const { return end - begin; }
};

// Returns the rows of `rank` if `dim` rows are split as by torch.chunk: ceil(dim / world) rows each, while the last
// ranks have fewer or none.
RowRange shard_rows(int64_t dim, int world, int rank);

// Properties of one parameter that the layout needs. Its global tensor is viewed as [outer, dim, inner] and sharded
// along `dim`. Shard(0) has outer == 1.
struct ParamShape {
  int64_t outer = 1;
  int64_t dim = 0;
  int64_t inner = 1;
  DType orig = DType::f32;     // dtype of the sharded parameter
  DType compute = DType::f32;  // dtype of the unsharded parameter
  DType reduce = DType::f32;   // dtype gradients are summed in
  bool trainable = true;
  bool in_slot = true;  // false: an all-gather extension gathers it
  // Set if the parameter has its own `grad_dtype`: the dtype of `.grad`.
  std::optional<DType> grad_override = std::nullopt;
  bool takes_any_grad = false;  // that `grad_dtype` is None
  DType grad() const { return grad_override.value_or(orig); }
  int64_t numel() const { return outer * dim * inner; }
  // Returns the dtype in which peers read a packed gradient: the one of autograd, if a sum in fp32 loses nothing by
  // that.
  DType packed() const {
    const bool narrow = compute == DType::bf16 || compute == DType::f16;
    return narrow && reduce == DType::f32 ? compute : reduce;
  }
};

// A strided copy of `count` pieces of `piece_numel` elements each. Offsets are bytes from a base pointer, strides are
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
  size_t gradient_offset = 0;        // in the gradient pool, bytes, trainable parameters only
  size_t slot_offset = 0;            // in the gather slot, bytes
  size_t reduce_segment_offset = 0;  // in one rank's reduce segment, bytes, trainable parameters only
};

// Returns the same elements in as few copies as possible. Pieces of one size with even steps on both sides, such as
// those of all ranks of one parameter, become one strided copy. Sorted by destination. No two copies may write the same
// place.
std::vector<Copy> joined(std::vector<Copy> copies);

// Copies rows of a shard (contiguous at `shard_offset`) to their place in the full tensor at `whole_offset`.
Copy shard_to_whole(const ParamShape& shape, RowRange rows, size_t shard_offset, DType src, size_t whole_offset,
                    DType dst);

class Layout {
 public:
  // `whole_chunks`: a parameter's place in the slot has room for `world` equal chunks of padded_shard_numel elements,
  // so that a collective can gather into it even if the last ranks have fewer rows.
  Layout(std::vector<ParamShape> shapes, int world, int rank, bool whole_chunks = false);

  int world() const { return ranks_.world; }
  bool has_whole_chunks() const { return ranks_.whole_chunks; }
  int rank() const { return ranks_.rank; }
  const std::vector<ParamPlace>& params() const { return params_; }

  size_t shard_pool_bytes() const { return shard_pool_bytes_; }
  // Returns the bytes for the gradients of trainable shards, aligned and padded as the shards are.
  size_t gradient_pool_bytes() const { return gradient_pool_bytes_; }
  // Returns whether a rank's reduce segment holds every gradient at its place in the gradient pool, in the dtype of
  // `.grad`.
  bool can_reduce_in_place() const;
  size_t slot_bytes() const { return slot_bytes_; }
  // Bytes of the scratch, which has one flag byte per parameter, then W reduce segments. Gradients that are only copied
  // are packed in ParamShape::packed(). Gradients that are added up use the reduce dtype: the wide scratch.
  size_t scratch_bytes() const { return scratch_flags_bytes() + world_of(narrow_segment_bytes_); }
  size_t wide_scratch_bytes() const { return scratch_flags_bytes() + world_of(reduce_segment_bytes_); }
  size_t scratch_flags_bytes() const { return align_up(params_.size()); }
  // Returns the bytes of a rank if everything is gathered packed.
  size_t gather_segment_bytes() const { return gather_segment_bytes_; }
  size_t reduce_segment_bytes() const { return reduce_segment_bytes_; }
  // Returns the bytes of a rank's reduce segment and one flag per parameter in the reduce dtype (> 0: some rank has a
  // gradient).
  size_t flagged_segment_bytes() const { return reduce_segment_bytes_ + align_up(params_.size() * sizeof(double)); }
  // Returns the layout of the same parameters where only those that `trains` also marks stay trainable.
  Layout training(const std::vector<bool>& trains) const;
  // Returns the layout of the same parameters with ParamShape::packed() as their reduce dtype.
  Layout narrow() const;

  // Returns whether the shard pool of the only rank holds the full parameters as the slot would: no cast, same places.
  bool pool_is_slot() const;
  // Returns whether shards may rest in the slot: as rows of the full parameters, one piece each, without a cast at the
  // gather.
  bool can_rest_in_slot() const;
  // Returns their offsets there, in bytes, by parameter.
  std::vector<size_t> offsets_in_slot() const;

  // Copies this rank's shard pool to its rows in the gather slot, with the cast. Empty shards are left out.
  const std::vector<Copy>& shard_to_slot() const { return shard_to_slot_; }
  // Copies the full unsharded gradient of parameter `param` (contiguous, dtype `grad`) to the W reduce segments laid
  // end to end, with the cast. Pads are not written: zero the buffer once.
  std::vector<Copy> gradient_to_segments(size_t param, DType grad) const;

 private:
  struct Ranks {
    int world;
    int rank;
    bool whole_chunks;
  };

  size_t world_of(size_t segment_bytes) const { return segment_bytes * static_cast<size_t>(ranks_.world); }

  Ranks ranks_;
  std::vector<ParamPlace> params_;
  size_t shard_pool_bytes_ = 0;
  size_t gradient_pool_bytes_ = 0;
  size_t slot_bytes_ = 0;
  size_t gather_segment_bytes_ = 0;
  size_t reduce_segment_bytes_ = 0;
  size_t narrow_segment_bytes_ = 0;
  std::vector<Copy> shard_to_slot_;
};

}  // namespace fsdp2x
