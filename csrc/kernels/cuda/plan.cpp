// Cuts segments into tiles and makes the plans of a unit from its layout.
#include "kernels/cuda/plan.hpp"

#include <algorithm>
#include <climits>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda {

namespace {

int64_t tiles_of(int64_t numel) { return (numel + kTileNumel - 1) / kTileNumel; }

int64_t tiles_of(const PackSegment& segment) { return int64_t{segment.num_ranks} * segment.rank_tiles; }
template <class Segment>
int64_t tiles_of(const Segment& segment) {
  return tiles_of(segment.numel);
}

template <class Segment>
Plan<Segment> cut(std::vector<Segment>&& segments) {
  Plan<Segment> plan;
  plan.segments.reserve(segments.size());
  for (Segment& segment : segments) {
    const int64_t num_tiles = tiles_of(segment);
    if (num_tiles == 0) continue;
    if (plan.num_tiles() + num_tiles > INT_MAX) {
      throw Error("a plan of the CUDA kernels has more than " + std::to_string(INT_MAX) + " tiles of " +
                  std::to_string(kTileNumel) + " elements, the limit of a launch. Shard smaller units.");
    }
    segment.first_tile = plan.num_tiles();
    plan.tile_segments.insert(plan.tile_segments.end(), static_cast<size_t>(num_tiles),
                              static_cast<uint32_t>(plan.segments.size()));
    plan.segments.push_back(segment);
  }
  return plan;
}

// Longer pieces cannot be counted in 32 bits.
constexpr int64_t kMaxPieceNumel = int64_t{1} << 31;

// Splits long pieces into separate segments.
std::vector<CopySegment> with_countable_pieces(std::vector<CopySegment>&& segments) {
  std::vector<CopySegment> result;
  for (const CopySegment& segment : segments) {
    if (segment.piece_numel <= kMaxPieceNumel || segment.numel == segment.piece_numel) {
      result.push_back(segment);
      continue;
    }
    const int64_t count = segment.numel / segment.piece_numel;
    for (int64_t piece = 0; piece < count; ++piece) {
      CopySegment& part = result.emplace_back(segment);
      part.numel = part.piece_numel;
      part.src_offset += piece * part.src_stride * static_cast<int64_t>(dtype_bytes(part.src));
      part.dst_offset += piece * part.dst_stride * static_cast<int64_t>(dtype_bytes(part.dst));
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
  throw Error("an optimizer plan: expected hyperparameter groups 0 to " + std::to_string(max - 1) + ", got " +
              std::to_string(group) + ". Make a plan for every " + std::to_string(max) + " groups.");
}

void require_entry(int entry) {
  if (entry >= 0 && entry < kMaxTable) return;
  throw Error("a plan: expected gradients 0 to " + std::to_string(kMaxTable - 1) + ", got " + std::to_string(entry) +
              ". Make a plan for every " + std::to_string(kMaxTable) + " gradients.");
}

PackSegment pack_segment(const Layout& layout, const ParamPlace& place, DType type, Piece piece) {
  PackSegment segment;
  segment.rank_bytes = static_cast<int64_t>(piece.size());
  segment.num_ranks = layout.world();
  segment.src = type;
  segment.dst = place.shape.reduce;
  if (!packs(place, type)) return segment;
  const size_t element_bytes = dtype_bytes(place.shape.reduce);
  // Everything up to the next parameter.
  const size_t bytes = align_up(static_cast<size_t>(place.padded_shard_numel) * element_bytes);
  const size_t begin = std::max(piece.begin, place.reduce_segment_offset);
  const size_t end = std::min(piece.end, place.reduce_segment_offset + bytes);
  if (begin >= end) return segment;
  segment.dst_offset = static_cast<int64_t>(begin - piece.begin);
  segment.first = static_cast<int64_t>((begin - place.reduce_segment_offset) / element_bytes);
  segment.outer = place.shape.outer;
  segment.dim = place.shape.dim;
  segment.inner = place.shape.inner;
  segment.rows = shard_rows(place.shape.dim, layout.world(), 0).size();
  segment.region_numel = static_cast<int64_t>((end - begin) / element_bytes);
  return segment;
}

DType flag_type_of(const Layout& layout) {
  for (const ParamPlace& place : layout.params()) {
    if (place.shape.reduce != DType::byte) return place.shape.reduce;
  }
  return DType::f32;
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

// Returns whether x * (1 / divisor) has the same bits as x / divisor for every x.
bool reciprocal_is_exact(double divisor) {
  int exponent = 0;
  const auto single = static_cast<float>(divisor);
  return std::fabs(std::frexp(divisor, &exponent)) == 0.5 && std::isnormal(single) && std::isnormal(1.0f / single);
}

}  // namespace

Scale divide_by(double divisor) {
  if (divisor == 1.0) return {};
  if (reciprocal_is_exact(divisor)) return {1.0 / divisor, divisor, ScaleMode::multiply};
  return {divisor, 1.0 / divisor, ScaleMode::divide};
}

CopyPlan make_plan(std::vector<CopySegment> segments) {
  for (const CopySegment& segment : segments) {
    const bool moves_bytes = segment.src == DType::byte && segment.dst == DType::byte;
    if (!moves_bytes && !computes(segment.src, segment.dst)) {
      throw Error(std::string("the CUDA kernels cannot cast ") + dtype_name(segment.src) + " to " +
                  dtype_name(segment.dst) + ", because they compute in fp32 and only move bytes");
    }
  }
  return cut(with_countable_pieces(std::move(segments)));
}

PackPlan make_plan(std::vector<PackSegment> segments) {
  for (PackSegment& segment : segments) {
    if (segment.region_numel > 0 && !computes(segment.src, segment.dst)) {
      throw Error(std::string("the CUDA kernels cannot pack ") + dtype_name(segment.src) + " as " +
                  dtype_name(segment.dst) + ", because they compute in fp32");
    }
    const int64_t num_tiles = std::max(tiles_of(segment.region_numel), int64_t{segment.flag_numel > 0 ? 1 : 0});
    segment.rank_tiles = static_cast<int32_t>(std::min<int64_t>(num_tiles, INT_MAX));
  }
  return cut(std::move(segments));
}

ReducePlan make_plan(std::vector<ReduceSegment> segments) {
  for (const ReduceSegment& segment : segments) {
    if (!computes(segment.src, segment.dst)) {
      throw Error(std::string("the CUDA kernels cannot reduce ") + dtype_name(segment.src) + " to " +
                  dtype_name(segment.dst) + ", because they compute in fp32");
    }
  }
  return cut(std::move(segments));
}

AdamWPlan make_plan(std::vector<AdamWSegment> segments) {
  for (const AdamWSegment& segment : segments) {
    const bool is_coded = segment.moment_type == DType::byte && segment.exp_avg_scales != nullptr &&
                          segment.exp_avg_sq_scales != nullptr &&
                          (segment.max_exp_avg_sq == nullptr || segment.max_exp_avg_sq_scales != nullptr);
    if (!computes(segment.type) || segment.moment_type == DType::f16 || !(computes(segment.moment_type) || is_coded)) {
      throw Error(std::string("the CUDA kernels cannot step parameters of type ") + dtype_name(segment.type) +
                  " with moments of type " + dtype_name(segment.moment_type) +
                  ". Expected f32, bf16, or f16, with moments of f32, bf16, or bytes with scales.");
    }
    require_group(segment.group, kMaxGroups);
    require_entry(segment.source);
  }
  return cut(std::move(segments));
}

WirePlan make_plan(std::vector<WireSegment> segments) {
  for (const WireSegment& segment : segments) {
    if (!computes(segment.type)) {
      throw Error(std::string("the CUDA kernels have no codes for ") + dtype_name(segment.type) +
                  ". Expected f32, bf16, or f16.");
    }
    if (segment.piece_numel != segment.numel && segment.piece_numel > kMaxPieceNumel) {
      throw Error("a piece has " + std::to_string(segment.piece_numel) +
                  " coded elements, but the CUDA kernels count only " + std::to_string(kMaxPieceNumel) +
                  ". Shard another dim of the parameter.");
    }
    require_entry(segment.source);
  }
  return cut(std::move(segments));
}

CopyPlan plan_copies(std::span<const Copy> copies) {
  std::vector<CopySegment> segments;
  for (const Copy& copy : copies) segments.push_back(segment_of(copy));
  return make_plan(std::move(segments));
}

bool packs(const ParamPlace& place, DType type) {
  const ParamShape& shape = place.shape;
  return has_kernels(place, type) && (shape.outer == 1 || shape.dim * shape.inner <= kMaxPieceNumel);
}

bool packs_flags(const Layout& layout) { return computes(flag_type_of(layout)); }

std::vector<PackPlan> plan_pack(const Layout& layout, std::span<const DType> grad_types, size_t segment_bytes,
                                std::optional<Piece> of_segments) {
  const Piece piece = of_segments.value_or(Piece{0, segment_bytes});
  const size_t num_params = layout.params().size();
  if (grad_types.size() != num_params) {
    throw Error("plan_pack: expected " + std::to_string(num_params) + " gradient types, one per parameter, got " +
                std::to_string(grad_types.size()));
  }
  const DType flag_type = flag_type_of(layout);
  const size_t num_flags = segment_bytes < layout.reduce_segment_bytes()
                               ? 0
                               : (segment_bytes - layout.reduce_segment_bytes()) / dtype_bytes(flag_type);
  if (segment_bytes < layout.reduce_segment_bytes() || (num_flags > 0 && num_flags < num_params)) {
    throw Error("a reduce segment of " + std::to_string(segment_bytes) + " bytes is too short. Expected " +
                std::to_string(layout.reduce_segment_bytes()) + " bytes, with or without " +
                std::to_string(num_params) + " flags after them");
  }
  const bool has_flags = num_flags > 0 && packs_flags(layout) && piece.end == segment_bytes;
  return in_parts(layout, [&](size_t first, size_t end) {
    std::vector<PackSegment> segments;
    for (size_t param = first; param < end; ++param) {
      PackSegment segment = pack_segment(layout, layout.params()[param], grad_types[param], piece);
      segment.source = static_cast<int32_t>(param - first);
      if (has_flags) {
        segment.flag_type = flag_type;
        segment.flag_offset =
            static_cast<int64_t>(layout.reduce_segment_bytes() + param * dtype_bytes(flag_type) - piece.begin);
        segment.flag_numel = param + 1 == num_params ? static_cast<int32_t>(num_flags - param) : 1;
      }
      segments.push_back(segment);
    }
    return segments;
  });
}

std::vector<ReducePlan> plan_reduce(const Layout& layout) {
  return in_parts(layout, [&](size_t first, size_t end) {
    std::vector<ReduceSegment> segments;
    for (size_t param = first; param < end; ++param) {
      const ParamPlace& place = layout.params()[param];
      if (!has_kernels(place, place.shape.grad())) continue;
      ReduceSegment segment;
      segment.src_offset = static_cast<int64_t>(place.reduce_segment_offset);
      segment.numel = place.shard_numel;
      segment.target = static_cast<int32_t>(param - first);
      segment.src = place.shape.reduce;
      segment.dst = place.shape.grad();
      segments.push_back(segment);
    }
    return segments;
  });
}

}  // namespace fsdp2x::cuda
