// What a kernel is launched with: segments cut into tiles, built once on the host and uploaded once by their user.
//
//   image of a plan in the memory of the kernels:  | segment 0 | segment 1 | ... | segment of tile 0 | of tile 1 | ...
//   |
//
// A block of threads takes one tile, so that one launch serves parameters of any number and size. Everything that
// changes from step to step (bases, scales, gradients) is a kernel parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "core/layout.hpp"

namespace fsdp2x::cuda {

inline constexpr int kTileNumel = 4096;  // a multiple of every vector length
inline constexpr int kMaxTable = 320;    // gradients a launch can name: kernel parameters end at 4 KiB
inline constexpr int kMaxRanks = 72;     // peers a launch can name
inline constexpr int kMaxGroups = 32;    // sets of hyperparameters a launch can name

// A plan as a launch takes it: pointers into the uploaded image.
template <class Segment>
struct List {
  const Segment* segments = nullptr;
  const uint32_t* tile_segments = nullptr;
  int64_t num_tiles = 0;
  bool has_f64 = false;  // computed in f64 as far as segments have an f64 side, in fp32 otherwise
};

template <class Segment>
struct Plan {
  std::vector<Segment> segments;
  std::vector<uint32_t> tile_segments;  // per tile: the segment it belongs to
  int first = 0;                        // index of the parameter that is entry 0 of the launch's table
  bool has_f64 = false;

  int64_t num_tiles() const { return static_cast<int64_t>(tile_segments.size()); }
  size_t image_bytes() const { return segments.size() * sizeof(Segment) + tile_segments.size() * sizeof(uint32_t); }
  // To host memory of image_bytes; the user copies it to where the kernels run and keeps it alive there.
  void write_image(void* image) const {
    if (segments.empty()) return;
    const size_t bytes = segments.size() * sizeof(Segment);
    std::memcpy(image, segments.data(), bytes);
    std::memcpy(static_cast<std::byte*>(image) + bytes, tile_segments.data(), tile_segments.size() * sizeof(uint32_t));
  }
  // `image`: the uploaded one, at a multiple of 16 bytes.
  List<Segment> list(const void* image) const {
    const auto* tiles = static_cast<const std::byte*>(image) + segments.size() * sizeof(Segment);
    return {static_cast<const Segment*>(image), reinterpret_cast<const uint32_t*>(tiles), num_tiles(), has_f64};
  }
};

// A `Copy` as the kernels read it: `count` pieces, then zeros. Offsets in bytes, everything else in elements.
struct CopySegment {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int64_t numel = 0;  // of all pieces
  int64_t piece_numel = 1;
  int64_t src_stride = 0;
  int64_t dst_stride = 0;
  int64_t pad_numel = 0;  // zeros behind the pieces, which are dense in the destination then
  int64_t first_tile = 0;
  int32_t source = 0;  // entry of the launch's table
  DType src = DType::f32;
  DType dst = DType::f32;
};

// Rows to be summed: `numel` elements at `src_offset` bytes from every source's base go to a target.
struct ReduceSegment {
  int64_t src_offset = 0;
  int64_t numel = 0;
  int64_t first_tile = 0;
  int32_t target = 0;  // entry of the launch's table
  DType src = DType::f32;
  DType dst = DType::f32;
  bool operator==(const ReduceSegment&) const = default;
};

// The numbers by which the elements of a range draw their random bits, as cpu::Rounding has them: element i is number
// first + i / run * stride + i % run, so that rows that lie apart in the whole parameter draw what they would there.
struct Numbers {
  uint64_t first = 0;
  int64_t run = 0;  // 0: all follow each other
  int64_t stride = 0;
  bool operator==(const Numbers&) const = default;
};

// A range of elements that an optimizer steps. The pointers are those of the memory it lies in for as long as the plan
// is used; only gradients may move.
struct AdamWSegment {
  void* param = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;  // null: no amsgrad
  void* shadow = nullptr;          // null, or bf16: receives the new parameter, rounded to nearest
  int64_t grad_offset = 0;         // bytes from the gradient's base
  int64_t numel = 0;
  int64_t first_tile = 0;
  Numbers numbers;
  int32_t source = 0;  // entry of the launch's table of gradients
  int32_t group = 0;   // entry of the launch's table of steps
  DType param_type = DType::f32;
  DType grad_type = DType::f32;
  DType moment_type = DType::f32;  // f32 or bf16
  bool operator==(const AdamWSegment&) const = default;
};

struct SgdSegment {
  void* param = nullptr;
  void* buffer = nullptr;  // null: no momentum
  void* shadow = nullptr;
  int64_t grad_offset = 0;
  int64_t numel = 0;
  int64_t first_tile = 0;
  Numbers numbers;
  int32_t source = 0;
  int32_t group = 0;
  DType param_type = DType::f32;
  DType grad_type = DType::f32;
  DType buffer_type = DType::f32;  // f32 or bf16
  bool operator==(const SgdSegment&) const = default;
};

using CopyPlan = Plan<CopySegment>;
using CopyList = List<CopySegment>;
using ReducePlan = Plan<ReduceSegment>;
using ReduceList = List<ReduceSegment>;
using AdamWPlan = Plan<AdamWSegment>;
using AdamWList = List<AdamWSegment>;
using SgdPlan = Plan<SgdSegment>;
using SgdList = List<SgdSegment>;

// Cuts segments into tiles. Empty segments are left out. Throws Error when there are more tiles than a launch can have.
CopyPlan make_plan(std::vector<CopySegment> segments);
ReducePlan make_plan(std::vector<ReduceSegment> segments);
// Throws Error as well for a type that the kernels do not step (parameters and gradients are f32, bf16 or f16, moments
// and buffers f32 or bf16), and for a group or gradient that no launch can name.
AdamWPlan make_plan(std::vector<AdamWSegment> segments);
SgdPlan make_plan(std::vector<SgdSegment> segments);

// --- the plans of a unit; one table entry is one parameter ----------------------------------------------------------

CopyPlan plan_copies(std::span<const Copy> copies);

// Shard pool -> this rank's rows of the gather slot.
CopyPlan plan_cast_to_slot(const Layout& layout);

// Shard pool -> this rank's gather segment.
CopyPlan plan_cast_to_segment(const Layout& layout);

// The W gather segments, `segment_bytes` apart -> the gather slot.
CopyPlan plan_copy_out(const Layout& layout, size_t segment_bytes);

// As plan_copy_out, for `Kernels::all_gather_peer`: entry r of the table is where rank r's own segment lies. Begins
// with the rank behind this one, so that ranks do not all read from the same peer.
CopyPlan plan_all_gather_peer(const Layout& layout);

// Whole gradients, dense, of `grad_types[parameter]` -> the W reduce segments, `segment_bytes` apart, with every byte
// of theirs up to layout.reduce_segment_bytes() written. Several plans when there are more than kMaxTable parameters;
// the table's entry i is then parameter `first + i`.
std::vector<CopyPlan> plan_pack(const Layout& layout, std::span<const DType> grad_types, size_t segment_bytes);

// This rank's reduced segment (`src_offset` bytes from the sources' bases) -> the gradients. `src_offset` is 0 after a
// reduce-scatter, and rank * segment_bytes when `Kernels::reduce` reads the peers' packed buffers. Several plans as in
// plan_pack.
std::vector<ReducePlan> plan_reduce(const Layout& layout, size_t src_offset);

}  // namespace fsdp2x::cuda
