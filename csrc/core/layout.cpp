// Computes the offsets and copy plans of a unit. Pools and segments store a shard as a contiguous [outer, rows, inner]
// block, followed by its pad. So only the full tensor ever needs strides.
#include "core/layout.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace fsdp2x {
namespace {

void check_shape(size_t index, const ParamShape& shape) {
  const std::string which = "layout: parameter " + std::to_string(index);
  if (shape.outer < 0 || shape.dim < 0 || shape.inner < 0) {
    throw Error(which + " has a negative size: got outer " + std::to_string(shape.outer) + ", dim " +
                std::to_string(shape.dim) + ", inner " + std::to_string(shape.inner));
  }
  if ((shape.orig == DType::byte) != (shape.compute == DType::byte)) {
    throw Error(which + " cannot be cast from " + dtype_name(shape.orig) + " to " + dtype_name(shape.compute) +
                ", because bytes are only moved. Give it the same dtype for storage and compute.");
  }
  if (shape.trainable && (shape.orig == DType::byte || shape.reduce == DType::byte)) {
    throw Error(which + " is trainable but its dtype (" + dtype_name(shape.orig) + ", reduced in " +
                dtype_name(shape.reduce) + ") cannot be summed. Freeze it or use a floating dtype.");
  }
}

size_t num_bytes(int64_t numel, DType dtype) { return static_cast<size_t>(numel) * dtype_bytes(dtype); }

// Merges a strided plan whose pieces are adjacent on both sides into one piece.
Copy merged(Copy copy) {
  const bool dense = copy.src_stride == copy.piece_numel && copy.dst_stride == copy.piece_numel;
  if (copy.count == 1 || dense) {
    copy.piece_numel *= copy.count;
    copy.count = 1;
    copy.src_stride = copy.dst_stride = copy.piece_numel;
  }
  return copy;
}

// Returns the elements from one offset to the other, or 0 if that is not a positive integer.
int64_t step_between(size_t from, size_t to, DType dtype) {
  const size_t bytes = to > from ? to - from : 0;
  return bytes % dtype_bytes(dtype) == 0 ? static_cast<int64_t>(bytes / dtype_bytes(dtype)) : 0;
}

// Adds `next` to `copy` as its last piece if it lies at that place. Otherwise changes nothing.
bool append(Copy& copy, const Copy& next) {
  const bool alike = copy.src == next.src && copy.dst == next.dst && copy.piece_numel == next.piece_numel;
  if (!alike || next.count != 1 || next.src_offset < copy.src_offset) return false;
  const auto ends_at = [&copy](size_t offset, int64_t stride, DType dtype) {
    return offset + num_bytes(stride * copy.count, dtype);
  };
  if (copy.count == 1) {
    const bool same_source = next.src_offset == copy.src_offset;
    copy.src_stride = same_source ? 0 : step_between(copy.src_offset, next.src_offset, copy.src);
    copy.dst_stride = step_between(copy.dst_offset, next.dst_offset, copy.dst);
    if ((copy.src_stride == 0 && !same_source) || copy.dst_stride < copy.piece_numel) return false;
  } else if (next.src_offset != ends_at(copy.src_offset, copy.src_stride, copy.src) ||
             next.dst_offset != ends_at(copy.dst_offset, copy.dst_stride, copy.dst)) {
    return false;
  }
  ++copy.count;
  return true;
}

}  // namespace

std::vector<Copy> joined(std::vector<Copy> copies) {
  std::sort(copies.begin(), copies.end(), [](const Copy& a, const Copy& b) { return a.dst_offset < b.dst_offset; });
  std::vector<Copy> result;
  for (const Copy& copy : copies) {
    if (result.empty() || !append(result.back(), copy)) result.push_back(copy);
  }
  return result;
}

Copy shard_to_whole(const ParamShape& shape, RowRange rows, size_t shard_offset, DType src, size_t whole_offset,
                    DType dst) {
  Copy copy;
  copy.src_offset = shard_offset;
  copy.dst_offset = whole_offset + num_bytes(rows.begin * shape.inner, dst);
  copy.count = shape.outer;
  copy.piece_numel = rows.size() * shape.inner;
  copy.src_stride = copy.piece_numel;
  copy.dst_stride = shape.dim * shape.inner;
  copy.src = src;
  copy.dst = dst;
  return merged(copy);
}

RowRange shard_rows(int64_t dim, int world, int rank) {
  const int64_t chunk = (dim + world - 1) / world;
  const int64_t begin = std::min(dim, chunk * rank);
  return {begin, std::min(dim, begin + chunk)};
}

Layout::Layout(std::vector<ParamShape> shapes, int world, int rank, bool whole_chunks)
    : ranks_{world, rank, whole_chunks} {
  if (world < 1 || rank < 0 || rank >= world) {
    throw Error("layout: rank " + std::to_string(rank) + " is not in a world of " + std::to_string(world));
  }
  params_.reserve(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    check_shape(i, shapes[i]);
    ParamPlace place;
    place.shape = shapes[i];
    const ParamShape& shape = place.shape;
    place.rows = shard_rows(shape.dim, world, rank);
    place.shard_numel = shape.outer * place.rows.size() * shape.inner;
    place.padded_shard_numel = shape.outer * shard_rows(shape.dim, world, 0).size() * shape.inner;

    place.shard_offset = shard_pool_bytes_;
    shard_pool_bytes_ += align_up(num_bytes(place.padded_shard_numel, shape.orig));
    if (shape.in_slot) {
      place.slot_offset = slot_bytes_;
      const int64_t chunks = whole_chunks ? world * place.padded_shard_numel : shape.numel();
      slot_bytes_ += align_up(num_bytes(std::max(chunks, shape.numel()), shape.compute));
      gather_segment_bytes_ += align_up(num_bytes(place.padded_shard_numel, shape.compute));
    }
    if (shape.trainable) {
      place.gradient_offset = gradient_pool_bytes_;
      gradient_pool_bytes_ += align_up(num_bytes(place.padded_shard_numel, shape.grad()));
      place.reduce_segment_offset = reduce_segment_bytes_;
      reduce_segment_bytes_ += align_up(num_bytes(place.padded_shard_numel, shape.reduce));
      narrow_segment_bytes_ += align_up(num_bytes(place.padded_shard_numel, shape.packed()));
    }
    params_.push_back(std::move(place));
  }

  for (const ParamPlace& place : params_) {
    if (place.shard_numel == 0 || !place.shape.in_slot) continue;
    const ParamShape& shape = place.shape;
    shard_to_slot_.push_back(
        shard_to_whole(shape, place.rows, place.shard_offset, shape.orig, place.slot_offset, shape.compute));
  }
}

bool Layout::can_reduce_in_place() const {
  return gradient_pool_bytes_ > 0 && std::all_of(params_.begin(), params_.end(), [](const ParamPlace& place) {
           return !place.shape.trainable ||
                  (place.shape.reduce == place.shape.grad() && place.reduce_segment_offset == place.gradient_offset);
         });
}

bool Layout::pool_is_slot() const {
  return ranks_.world == 1 && slot_bytes_ > 0 &&
         std::all_of(params_.begin(), params_.end(), [](const ParamPlace& place) {
           const ParamShape& shape = place.shape;
           return shape.in_slot && shape.orig == shape.compute && place.slot_offset == place.shard_offset;
         });
}

bool Layout::can_rest_in_slot() const {
  return slot_bytes_ > 0 && std::all_of(params_.begin(), params_.end(), [](const ParamPlace& place) {
           const ParamShape& shape = place.shape;
           return shape.in_slot && shape.orig == shape.compute && shape.outer == 1;
         });
}

std::vector<size_t> Layout::offsets_in_slot() const {
  std::vector<size_t> offsets;
  for (const ParamPlace& place : params_) {
    offsets.push_back(place.slot_offset + num_bytes(place.rows.begin * place.shape.inner, place.shape.compute));
  }
  return offsets;
}

Layout Layout::training(const std::vector<bool>& trains) const {
  std::vector<ParamShape> shapes;
  for (size_t i = 0; i < params_.size(); ++i) {
    shapes.push_back(params_[i].shape);
    shapes.back().trainable = shapes.back().trainable && trains.at(i);
  }
  return Layout(std::move(shapes), ranks_.world, ranks_.rank, ranks_.whole_chunks);
}

Layout Layout::narrow() const {
  std::vector<ParamShape> shapes;
  for (const ParamPlace& place : params_) {
    shapes.push_back(place.shape);
    shapes.back().reduce = place.shape.packed();
  }
  return Layout(std::move(shapes), ranks_.world, ranks_.rank, ranks_.whole_chunks);
}

std::vector<Copy> Layout::gradient_to_segments(size_t param, DType grad) const {
  if (param >= params_.size() || !params_[param].shape.trainable) {
    throw Error("layout: parameter " + std::to_string(param) + " of " + std::to_string(params_.size()) +
                " has no reduce segment, because it does not exist or is not trainable");
  }
  const ParamPlace& place = params_[param];
  const ParamShape& shape = place.shape;
  std::vector<Copy> copies;
  for (int rank = 0; rank < ranks_.world; ++rank) {
    const RowRange rows = shard_rows(shape.dim, ranks_.world, rank);
    if (shape.outer * rows.size() * shape.inner == 0) continue;
    Copy copy;
    copy.src_offset = num_bytes(rows.begin * shape.inner, grad);
    copy.dst_offset = static_cast<size_t>(rank) * reduce_segment_bytes_ + place.reduce_segment_offset;
    copy.count = shape.outer;
    copy.piece_numel = rows.size() * shape.inner;
    copy.src_stride = shape.dim * shape.inner;
    copy.dst_stride = copy.piece_numel;
    copy.src = grad;
    copy.dst = shape.reduce;
    copies.push_back(merged(copy));
  }
  return copies;
}

}  // namespace fsdp2x
