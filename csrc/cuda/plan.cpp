// Cuts segments into tiles and makes the plans of a unit from its layout.
#include "cuda/plan.hpp"

#include <algorithm>
#include <climits>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace fsdp2x::cuda {

namespace {

int64_t numel_of(const CopySegment& segment) { return segment.numel + segment.pad_numel; }
template <class Segment>
int64_t numel_of(const Segment& segment) {
  return segment.numel;
}

// Optimizers step no f64.
template <class Segment>
bool is_f64(const Segment&) {
  return false;
}
bool is_f64(const CopySegment& segment) { return segment.src == DType::f64 || segment.dst == DType::f64; }
bool is_f64(const ReduceSegment& segment) { return segment.src == DType::f64 || segment.dst == DType::f64; }

template <class Segment>
Plan<Segment> cut(std::vector<Segment>&& segments) {
  Plan<Segment> plan;
  plan.segments.reserve(segments.size());
  for (Segment& segment : segments) {
    const int64_t numel = numel_of(segment);
    if (numel == 0) continue;
    const int64_t num_tiles = (numel + kTileNumel - 1) / kTileNumel;
    if (plan.num_tiles() + num_tiles > INT_MAX) {
      throw Error("a plan of the CUDA kernels has more than " + std::to_string(INT_MAX) + " tiles of " +
                  std::to_string(kTileNumel) + " elements, the most a launch can have: shard smaller units");
    }
    segment.first_tile = plan.num_tiles();
    plan.tile_segments.insert(plan.tile_segments.end(), static_cast<size_t>(num_tiles),
                              static_cast<uint32_t>(plan.segments.size()));
    plan.has_f64 = plan.has_f64 || is_f64(segment);
    plan.segments.push_back(segment);
  }
  return plan;
}

CopySegment segment_of(const Copy& copy) {
  if (copy.src != copy.dst && (copy.src == DType::byte || copy.dst == DType::byte)) {
    throw Error(std::string("a copy plan cannot cast ") + dtype_name(copy.src) + " to " + dtype_name(copy.dst) +
                ": bytes are only moved");
  }
  CopySegment segment;
  segment.src_offset = static_cast<int64_t>(copy.src_offset);
  segment.dst_offset = static_cast<int64_t>(copy.dst_offset);
  segment.numel = copy.count * copy.piece_numel;
  segment.piece_numel = copy.piece_numel;
  segment.src_stride = copy.src_stride;
  segment.dst_stride = copy.dst_stride;
  segment.src = copy.src;
  segment.dst = copy.dst;
  return segment;
}

void require_type(DType type, bool may_be_f16, const char* what) {
  if (type == DType::f32 || type == DType::bf16 || (may_be_f16 && type == DType::f16)) return;
  throw Error(std::string("the CUDA optimizer kernels take ") + what + " of type f32" +
              (may_be_f16 ? ", bf16 or f16" : " or bf16") + "; got " + dtype_name(type));
}

void require_group(int group, int max) {
  if (group >= 0 && group < max) return;
  throw Error("a range of an optimizer plan is of hyperparameter group " + std::to_string(group) +
              ": a launch takes 0 to " + std::to_string(max - 1) + "; make a plan for every " + std::to_string(max) +
              " groups");
}

void require_entry(int entry) {
  if (entry >= 0 && entry < kMaxTable) return;
  throw Error("a range of an optimizer plan names gradient " + std::to_string(entry) + ": a launch takes 0 to " +
              std::to_string(kMaxTable - 1) + "; make a plan for every " + std::to_string(kMaxTable) + " gradients");
}

// A rank's rows of a parameter in the reduce segments, and everything up to the next parameter as pad.
CopySegment packed_rows(const Layout& layout, const ParamPlace& place, int rank, const Copy* rows,
                        size_t segment_bytes) {
  const size_t element_bytes = dtype_bytes(place.shape.reduce);
  const size_t region = align_up(static_cast<size_t>(place.padded_shard_numel) * element_bytes) / element_bytes;
  CopySegment segment;
  if (rows != nullptr) segment = segment_of(*rows);
  segment.dst = place.shape.reduce;
  segment.dst_offset = static_cast<int64_t>(static_cast<size_t>(rank) * segment_bytes + place.reduce_segment_offset);
  segment.pad_numel = static_cast<int64_t>(region) - segment.numel;
  if (segment_bytes < layout.reduce_segment_bytes()) {
    throw Error("a reduce segment of " + std::to_string(segment_bytes) + " bytes is too short: the layout's has " +
                std::to_string(layout.reduce_segment_bytes()));
  }
  return segment;
}

template <class MakeSegments>
auto in_parts(const Layout& layout, const MakeSegments& make_segments) {
  std::vector<decltype(make_plan(make_segments(size_t{0}, size_t{0})))> plans;
  const size_t num_params = layout.params().size();
  for (size_t first = 0; first < num_params; first += kMaxTable) {
    const size_t end = std::min(num_params, first + kMaxTable);
    auto plan = make_plan(make_segments(first, end));
    if (plan.segments.empty()) continue;
    plan.first = static_cast<int>(first);
    plans.push_back(std::move(plan));
  }
  return plans;
}

}  // namespace

CopyPlan make_plan(std::vector<CopySegment> segments) {
  for (const CopySegment& segment : segments) {
    if (segment.pad_numel > 0 && segment.numel > 0 && segment.dst_stride != segment.piece_numel) {
      throw Error("a copy plan has a pad behind pieces that lie apart: only dense pieces can be padded");
    }
  }
  return cut(std::move(segments));
}

ReducePlan make_plan(std::vector<ReduceSegment> segments) {
  for (const ReduceSegment& segment : segments) {
    if (segment.src == DType::byte || segment.dst == DType::byte) {
      throw Error("a reduce plan has elements of type byte: bytes are only moved");
    }
  }
  return cut(std::move(segments));
}

AdamWPlan make_plan(std::vector<AdamWSegment> segments) {
  for (const AdamWSegment& segment : segments) {
    require_type(segment.param_type, true, "parameters");
    require_type(segment.grad_type, true, "gradients");
    require_type(segment.moment_type, false, "moments");
    require_group(segment.group, kMaxGroups);
    require_entry(segment.source);
  }
  return cut(std::move(segments));
}

SgdPlan make_plan(std::vector<SgdSegment> segments) {
  for (const SgdSegment& segment : segments) {
    require_type(segment.param_type, true, "parameters");
    require_type(segment.grad_type, true, "gradients");
    require_type(segment.buffer_type, false, "momentum buffers");
    require_group(segment.group, kMaxGroups);
    require_entry(segment.source);
  }
  return cut(std::move(segments));
}

CopyPlan plan_copies(std::span<const Copy> copies) {
  std::vector<CopySegment> segments;
  for (const Copy& copy : copies) segments.push_back(segment_of(copy));
  return make_plan(std::move(segments));
}

CopyPlan plan_cast_to_slot(const Layout& layout) { return plan_copies(layout.shard_to_slot()); }

CopyPlan plan_cast_to_segment(const Layout& layout) { return plan_copies(layout.shard_to_segment()); }

CopyPlan plan_copy_out(const Layout& layout, size_t segment_bytes) {
  return plan_copies(layout.segments_to_slot(segment_bytes));
}

CopyPlan plan_all_gather_peer(const Layout& layout) {
  std::vector<CopySegment> segments;
  for (int distance = 1; distance <= layout.world(); ++distance) {
    const int rank = (layout.rank() + distance) % layout.world();
    for (const Copy& copy : layout.segment_to_slot(rank)) {
      segments.push_back(segment_of(copy));
      segments.back().source = rank;
    }
  }
  return make_plan(std::move(segments));
}

std::vector<CopyPlan> plan_pack(const Layout& layout, std::span<const DType> grad_types, size_t segment_bytes) {
  if (grad_types.size() != layout.params().size()) {
    throw Error("plan_pack: " + std::to_string(grad_types.size()) + " gradient types for " +
                std::to_string(layout.params().size()) + " parameters");
  }
  return in_parts(layout, [&](size_t first, size_t end) {
    std::vector<CopySegment> segments;
    for (size_t param = first; param < end; ++param) {
      const ParamPlace& place = layout.params()[param];
      if (!place.shape.trainable) continue;
      const std::vector<Copy> copies = layout.gradient_to_segments(param, grad_types[param]);
      for (int rank = 0; rank < layout.world(); ++rank) {
        const Copy* rows = nullptr;
        for (const Copy& copy : copies) {
          if (copy.dst_offset / layout.reduce_segment_bytes() == static_cast<size_t>(rank)) rows = &copy;
        }
        segments.push_back(packed_rows(layout, place, rank, rows, segment_bytes));
        segments.back().src = grad_types[param];
        segments.back().source = static_cast<int32_t>(param - first);
      }
    }
    return segments;
  });
}

std::vector<ReducePlan> plan_reduce(const Layout& layout, size_t src_offset) {
  return in_parts(layout, [&](size_t first, size_t end) {
    std::vector<ReduceSegment> segments;
    for (size_t param = first; param < end; ++param) {
      const ParamPlace& place = layout.params()[param];
      if (!place.shape.trainable) continue;
      ReduceSegment segment;
      segment.src_offset = static_cast<int64_t>(src_offset + place.reduce_segment_offset);
      segment.numel = place.shard_numel;
      segment.target = static_cast<int32_t>(param - first);
      segment.src = place.shape.reduce;
      segment.dst = place.shape.orig;
      segments.push_back(segment);
    }
    return segments;
  });
}

}  // namespace fsdp2x::cuda
