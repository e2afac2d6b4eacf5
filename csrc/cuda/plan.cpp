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
    plan.segments.push_back(segment);
  }
  return plan;
}

// Pieces that the kernels could not count in 32 bits.
constexpr int64_t kMaxPieceNumel = int64_t{1} << 31;

// Long pieces as segments of their own.
std::vector<CopySegment> with_countable_pieces(std::vector<CopySegment>&& segments) {
  std::vector<CopySegment> result;
  for (const CopySegment& segment : segments) {
    if (segment.piece_numel <= kMaxPieceNumel || segment.numel == segment.piece_numel) {
      result.push_back(segment);
      continue;
    }
    const int64_t count = segment.numel / segment.piece_numel;
    for (int64_t piece = 0; piece < count; ++piece) {
      CopySegment& one = result.emplace_back(segment);
      one.numel = one.piece_numel;
      one.src_offset += piece * one.src_stride * static_cast<int64_t>(dtype_bytes(one.src));
      one.dst_offset += piece * one.dst_stride * static_cast<int64_t>(dtype_bytes(one.dst));
      if (piece + 1 < count) one.pad_numel = 0;
    }
  }
  return result;
}

CopySegment segment_of(const Copy& copy) {
  const int64_t width = copy.src == DType::f64 && copy.dst == DType::f64 ? 2 : 1;
  CopySegment segment;
  segment.src_offset = static_cast<int64_t>(copy.src_offset);
  segment.dst_offset = static_cast<int64_t>(copy.dst_offset);
  segment.numel = copy.count * copy.piece_numel * width;
  segment.piece_numel = copy.piece_numel * width;
  segment.src_stride = copy.src_stride * width;
  segment.dst_stride = copy.dst_stride * width;
  segment.src = width == 2 ? DType::f32 : copy.src;
  segment.dst = width == 2 ? DType::f32 : copy.dst;
  return segment;
}

bool has_kernels(const ParamPlace& place, DType type) {
  return place.shape.trainable && computes(type, place.shape.reduce);
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
    const bool moves_bytes = segment.src == DType::byte && segment.dst == DType::byte;
    if (!moves_bytes && !computes(segment.src, segment.dst)) {
      throw Error(std::string("the CUDA kernels cannot cast ") + dtype_name(segment.src) + " to " +
                  dtype_name(segment.dst) + ": they compute in fp32, and only move bytes");
    }
    if (segment.pad_numel > 0 && segment.numel > 0 && segment.dst_stride != segment.piece_numel) {
      throw Error("a copy plan has a pad behind pieces that lie apart: only dense pieces can be padded");
    }
  }
  return cut(with_countable_pieces(std::move(segments)));
}

ReducePlan make_plan(std::vector<ReduceSegment> segments) {
  for (const ReduceSegment& segment : segments) {
    if (!computes(segment.src, segment.dst)) {
      throw Error(std::string("the CUDA kernels cannot reduce ") + dtype_name(segment.src) + " to " +
                  dtype_name(segment.dst) + ": they compute in fp32");
    }
  }
  return cut(std::move(segments));
}

AdamWPlan make_plan(std::vector<AdamWSegment> segments) {
  for (const AdamWSegment& segment : segments) {
    if (!computes(segment.type) || !computes(segment.moment_type) || segment.moment_type == DType::f16) {
      throw Error(std::string("the CUDA kernels cannot step parameters of type ") + dtype_name(segment.type) +
                  " with moments of type " + dtype_name(segment.moment_type) +
                  "; expected f32, bf16 or f16, and f32 or bf16");
    }
    require_group(segment.group, kMaxGroups);
    require_entry(segment.source);
  }
  return cut(std::move(segments));
}

SgdPlan make_plan(std::vector<SgdSegment> segments) {
  for (const SgdSegment& segment : segments) {
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

std::vector<CopyPlan> plan_pack(const Layout& layout, std::span<const DType> grad_types, size_t segment_bytes) {
  if (grad_types.size() != layout.params().size()) {
    throw Error("plan_pack: " + std::to_string(grad_types.size()) + " gradient types for " +
                std::to_string(layout.params().size()) + " parameters");
  }
  return in_parts(layout, [&](size_t first, size_t end) {
    std::vector<CopySegment> segments;
    for (size_t param = first; param < end; ++param) {
      const ParamPlace& place = layout.params()[param];
      if (!has_kernels(place, grad_types[param])) continue;
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

std::vector<ReducePlan> plan_reduce(const Layout& layout) {
  return in_parts(layout, [&](size_t first, size_t end) {
    std::vector<ReduceSegment> segments;
    for (size_t param = first; param < end; ++param) {
      const ParamPlace& place = layout.params()[param];
      if (!has_kernels(place, place.shape.orig)) continue;
      ReduceSegment segment;
      segment.src_offset = static_cast<int64_t>(place.reduce_segment_offset);
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
