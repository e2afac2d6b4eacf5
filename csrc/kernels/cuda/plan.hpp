// The arguments of a kernel launch: segments cut into tiles, built once on the host and uploaded once by their user.
//
//   image of a plan in the memory of the kernels:  | segment 0 | segment 1 | ... | segment of tile 0 | of tile 1 | ...
//   |
//
// A block of threads takes one tile, so that one launch serves parameters of any number and size. Everything that
// changes between steps (bases, scales, gradients) is a kernel parameter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "core/layout.hpp"
#include "core/wire_format.hpp"

namespace fsdp2x::cuda {

inline constexpr int kTileNumel = 4096;  // a multiple of every vector length
inline constexpr int kSumNumel = 8192;   // values that one block adds up
inline constexpr int kMaxTable = 320;    // gradients in one launch: kernel parameters end at 4 KiB
inline constexpr int kMaxGroups = 32;    // sets of hyperparameters in one launch

// Returns the number of sums that add_up writes for `num` values.
inline int64_t num_sums(int64_t num) { return num == 0 ? 1 : (num + kSumNumel - 1) / kSumNumel; }

// A plan as a launch takes it: pointers into the uploaded image.
template <class Segment>
struct List {
  const Segment* segments = nullptr;
  const uint32_t* tile_segments = nullptr;
  int64_t num_tiles = 0;
};

template <class Segment>
struct Plan {
  std::vector<Segment> segments;
  std::vector<uint32_t> tile_segments;  // per tile: the segment that it belongs to
  int first = 0;                        // index of the parameter that is entry 0 of the launch's table

  int64_t num_tiles() const { return static_cast<int64_t>(tile_segments.size()); }
  size_t image_bytes() const { return segments.size() * sizeof(Segment) + tile_segments.size() * sizeof(uint32_t); }
  // Writes to host memory of image_bytes. The user copies it to the kernels' memory and keeps it alive there.
  void write_image(void* image) const {
    if (segments.empty()) return;
    const size_t bytes = segments.size() * sizeof(Segment);
    std::memcpy(image, segments.data(), bytes);
    std::memcpy(static_cast<std::byte*>(image) + bytes, tile_segments.data(), tile_segments.size() * sizeof(uint32_t));
  }
  // `image`: the uploaded one, at a multiple of 16 bytes.
  List<Segment> list(const void* image) const {
    const auto* tiles = static_cast<const std::byte*>(image) + segments.size() * sizeof(Segment);
    return {static_cast<const Segment*>(image), reinterpret_cast<const uint32_t*>(tiles), num_tiles()};
  }
};

// A `Copy` as the kernels read it. Offsets are bytes, everything else is elements. An f64 is a pair of f32.
struct CopySegment {
  int64_t src_offset = 0;
  int64_t dst_offset = 0;
  int64_t numel = 0;  // of all pieces
  int64_t piece_numel = 1;
  int64_t src_stride = 0;
  int64_t dst_stride = 0;
  int64_t first_tile = 0;
  DType src = DType::f32;
  DType dst = DType::f32;
};

// A full gradient, dense, on its way to the segments of all ranks: one entry, however many ranks there are. It has
// `outer` blocks of `dim` rows of `inner` elements. Each rank gets `rows` rows of every block, and the last ranks fewer
// or none.
//
//   segment of a rank:  | .. rows of all blocks | pad: zeros | .. | flag | zeros | ..
//
struct PackSegment {
  int64_t dst_offset = 0;   // of rank 0's rows, in bytes
  int64_t flag_offset = 0;  // of rank 0's flag, in bytes
  int64_t rank_bytes = 0;   // from one rank's segment to the next
  int64_t outer = 1;
  int64_t dim = 0;
  int64_t inner = 1;
  int64_t rows = 0;
  int64_t first = 0;         // elements of a rank's rows before `dst_offset` that are left out, only if `outer` is 1
  int64_t region_numel = 0;  // of a rank's rows and pad from there on, 0: only the flag
  int64_t first_tile = 0;
  int32_t num_ranks = 1;
  int32_t rank_tiles = 1;  // of one rank
  int32_t flag_numel = 0;  // the flag and the zeros after it, 0: no flag
  int32_t source = 0;      // entry of the launch's table
  DType src = DType::f32;
  DType dst = DType::f32;
  DType flag_type = DType::f32;
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

// The numbers by which the elements of a range draw their random bits, as in cpu::Rounding. Element i has number first
// + i / run * stride + i % run. So rows that are apart in the full parameter draw the same bits as there.
struct Numbers {
  uint64_t first = 0;
  int64_t run = 0;  // 0: all numbers are consecutive
  int64_t stride = 0;
  bool operator==(const Numbers&) const = default;
};

// A range of elements that AdamW steps. The pointers must stay valid as long as the plan is used. Only gradients
// may move.
struct AdamWSegment {
  void* param = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;   // null: no amsgrad
  float* exp_avg_scales = nullptr;  // one for each block of codes (kernels/rules/moment_codes.hpp), null without codes
  float* exp_avg_sq_scales = nullptr;
  float* max_exp_avg_sq_scales = nullptr;
  int64_t numel = 0;
  int64_t first_tile = 0;
  Numbers numbers;
  int32_t source = 0;              // entry of the launch's table of gradients
  int32_t group = 0;               // entry of the launch's table of steps
  DType type = DType::f32;         // of the parameter and its gradient
  DType moment_type = DType::f32;  // f32, bf16, or byte (codes: all segments of a launch or none)
  bool operator==(const AdamWSegment&) const = default;
};

// Values in pieces, and their codes, dense and from the beginning of a block on (core/wire_format.hpp). Offsets are
// bytes. Those of codes and scales count from the start of a rank's segment or of all of them.
struct WireSegment {
  int64_t values_offset = 0;
  int64_t codes_offset = 0;
  int64_t scales_offset = 0;  // for formats with scales
  int64_t numel = 0;          // of all pieces
  int64_t piece_numel = 1;
  int64_t stride = 0;  // elements from one piece of values to the next
  int64_t first_tile = 0;
  int32_t source = 0;  // entry of the launch's table
  DType type = DType::f32;
  WireFormat format = WireFormat::plain;  // plain: unchanged f32
};

using CopyPlan = Plan<CopySegment>;
using CopyList = List<CopySegment>;
using PackPlan = Plan<PackSegment>;
using PackList = List<PackSegment>;
using ReducePlan = Plan<ReduceSegment>;
using ReduceList = List<ReduceSegment>;
using AdamWPlan = Plan<AdamWSegment>;
using AdamWList = List<AdamWSegment>;
using WirePlan = Plan<WireSegment>;
using WireList = List<WireSegment>;

// The kernels compute in fp32: they can move values with an f64 side, but neither cast nor add them.
inline bool computes(DType type) { return type == DType::f32 || type == DType::bf16 || type == DType::f16; }
inline bool computes(DType src, DType dst) { return computes(src) && computes(dst); }
inline bool serves(const Copy& copy) { return copy.src == copy.dst || computes(copy.src, copy.dst); }

// Cuts segments into tiles. Empty segments are left out. Throws Error for a type that the kernels do not compute, and
// if there are more tiles than a launch can have.
CopyPlan make_plan(std::vector<CopySegment> segments);
PackPlan make_plan(std::vector<PackSegment> segments);
ReducePlan make_plan(std::vector<ReduceSegment> segments);
// Also throws Error for moments that are neither f32, bf16, nor codes with scales, and for a group or gradient beyond
// the tables of a launch.
AdamWPlan make_plan(std::vector<AdamWSegment> segments);
// Also throws Error for pieces of more than 2^31 elements.
WirePlan make_plan(std::vector<WireSegment> segments);

// --- the plans of a unit; one table entry is one parameter ----------------------------------------------------------

// Plans copies that the kernels serve.
CopyPlan plan_copies(std::span<const Copy> copies);

// Returns whether kernels pack a gradient of `type`: they must compute the cast and be able to count the pieces.
bool packs(const ParamPlace& place, DType type);
// Returns whether the flags that follow the rows of this layout have a type that the kernels write.
bool packs_flags(const Layout& layout);

// Plans dense full gradients of `grad_types[parameter]` into the W reduce segments, `segment_bytes` apart. Every byte
// of the segments is written, except for gradients that `packs` rejects and flags that `packs_flags` rejects. The bytes
// after layout.reduce_segment_bytes() have room for a flag of each parameter. Returns several plans if there are more
// than kMaxTable parameters. The table's entry i is then parameter `first + i`. `piece`: only this part of
// each segment, laid end to end. It begins and ends as in a ReductionPlan.
std::vector<PackPlan> plan_pack(const Layout& layout, std::span<const DType> grad_types, size_t segment_bytes,
                                std::optional<Piece> piece = std::nullopt);

// Plans this rank's reduced segment, at the sources' bases, into the gradients. Returns several plans as plan_pack
// does, without parameters that have an f64 side.
std::vector<ReducePlan> plan_reduce(const Layout& layout);

}  // namespace fsdp2x::cuda
