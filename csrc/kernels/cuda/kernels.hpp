// The kernels of csrc/kernels/cuda as a table of functions. One table launches on the device. Another one runs plain
// versions of the same index and element functions on the host. Code that uses a table does not know which one it has.
//
// Every function enqueues on `stream`, allocates nothing, and waits for nothing. All pointers are in the table's memory
// (device or host), stay valid until the stream has passed, and are aligned to their elements. Ranges that start at a
// multiple of 16 bytes move in 16-byte words. Throws fsdp2x::Error if a launch fails or the arguments are invalid.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"
#include "kernels/cuda/plan.hpp"
#include "kernels/rules/optimizer_rules.hpp"
#include "kernels/rules/philox.hpp"

struct CUstream_st;

namespace fsdp2x::cuda {

using Stream = CUstream_st*;  // cudaStream_t without the runtime's headers, ignored by reference kernels

enum class ScaleMode : uint8_t { none, multiply, divide };

struct Scale {
  double value = 1.0;
  double reciprocal = 1.0;
  ScaleMode mode = ScaleMode::none;
};

// Divides by `divisor`, and multiplies instead if that gives the same bits.
Scale divide_by(double divisor);

enum class TableMode : uint8_t {
  write,  // becomes the value
  add,    // the value is added
  skip,   // stays as it is
};

// Gradients of a launch, by entry. A null base with `write` packs zeros. Flags are written unless the entry is skipped.
struct PackTable {
  const void* base[kMaxTable] = {};
  TableMode mode[kMaxTable] = {};
  bool flag[kMaxTable] = {};
};

// Targets of the reduced rows of each parameter, by entry.
struct TargetTable {
  void* base[kMaxTable] = {};
  TableMode mode[kMaxTable] = {};
};

struct ReduceArgs {
  Scale scale;
  bool round = false;  // round the scaled sum to the source's type first, as a collective in that type returns it
};

struct AdamWArgs {
  AdamWStep steps[kMaxGroups];
  const void* grads[kMaxTable] = {};  // null: the entry's segments are not stepped
  const float* grad_scale = nullptr;  // null, or the factor of all gradients, in the table's memory
  bool stochastic = false;  // bf16 parameters and moments, and codes, are rounded by `rounding`, not to nearest
  bool coded = false;       // moments are codes
  RoundingKey rounding;
};

// Two arrays that are compared as bits, and the destination of the list of changes. Fields that only the list kernel
// needs may be null while masks are made.
struct ChangesArgs {
  const void* now = nullptr;
  void* held = nullptr;  // becomes `now` at listed positions
  int64_t numel = 0;
  int element_bytes = 0;               // a power of two up to 16
  int element_shift = 0;               // its logarithm
  uint16_t* masks = nullptr;           // num_masks(): 16 elements each
  int64_t* tile_counts = nullptr;      // num_tiles(): number of changes
  const int64_t* tile_ends = nullptr;  // running sums of tile_counts, each including its own tile
  int64_t* positions = nullptr;        // as many as the last sum, as are values
  void* values = nullptr;

  FSDP2X_HOST_DEVICE int64_t num_tiles() const { return (numel + kTileNumel - 1) / kTileNumel; }
  FSDP2X_HOST_DEVICE int64_t num_masks() const { return num_tiles() * (kTileNumel / 16); }
  // Returns where the list of a tile begins.
  FSDP2X_HOST_DEVICE int64_t begin_of(int64_t tile) const { return tile == 0 ? 0 : tile_ends[tile - 1]; }
};

// Values and their codes, laid out by the segments of a plan.
struct EncodeWireArgs {
  const void* values = nullptr;
  void* segments = nullptr;
  // The int8 rounding errors of the last call, with codes and scales laid out like those of the segments. Null: errors
  // are dropped.
  void* errors = nullptr;
  bool is_missing[kMaxTable] = {};  // by entry, for formats with scales: zeros are coded, errors stay
};

// The same segments of all ranks, laid end to end, and the target of their sums, in fp32 and scaled.
struct SumWireArgs {
  const void* segments = nullptr;
  int64_t rank_bytes = 0;
  int num_ranks = 0;
  Scale scale;
  void* values = nullptr;
};

struct Kernels {
  const char* name;

  // Runs a plan of copies and casts from base to base.
  void (*copy)(const CopyList& list, const void* src, void* dst, Stream stream);

  // Packs dense gradients (plan_pack) with a cast. Where an entry is written, pads become zero and flags 1 or 0.
  void (*pack_gradients)(const PackList& list, const PackTable& grads, void* dst, Stream stream);

  // target (+)= cast(scale(source)), in fp32: the epilogue of a collective, which has summed.
  void (*reduce)(const ReduceList& list, const void* source, const TargetTable& targets, const ReduceArgs& args,
                 Stream stream);

  // Sums the squares of gradients in their targets, one sum for each tile. Skipped ones are 0.
  void (*sum_squares)(const ReduceList& list, const TargetTable& targets, double* tile_sums, Stream stream);

  // Sums each kSumNumel of `num` values, and the rest, always in the same order. Without values, it writes one 0.
  void (*add_up)(const double* values, int64_t num, double* sums, Stream stream);

  // *norm = sqrt(*square_sum). *factor = min(1, max_norm / (*norm + 1e-6)), NaN if the norm is. Rounds like torch:
  // everything after the square root is fp32, or f64 if `in_f64`.
  void (*clip_factor)(const double* square_sum, double max_norm, bool in_f64, double* norm, double* factor,
                      Stream stream);

  // Multiplies gradients in their targets by *factor rounded to float, unless it is 1.
  void (*scale_gradients)(const ReduceList& list, const TargetTable& targets, const double* factor, Stream stream);

  // Runs one step over any number of ranges, in fp32. The parameter uses the moments before these are rounded to their
  // type.
  void (*adamw)(const AdamWList& list, const AdamWArgs& args, Stream stream);

  // Returns whether work for `stream` becomes part of a graph instead of running. Enqueues nothing.
  bool (*is_capturing)(Stream stream);

  // Makes masks of the elements that differ, and counts them in each tile.
  void (*mark_changes)(const ChangesArgs& args, Stream stream);

  // Lists positions, ascending, and values of the marked elements. `held` takes these values.
  void (*list_changes)(const ChangesArgs& args, Stream stream);

  // Encodes values and stores the rounding errors. Bit for bit equal to kernels/cpu/wire.hpp.
  void (*encode_wire)(const WireList& list, const EncodeWireArgs& args, Stream stream);

  // Decodes codes of formats with scales to values in their pieces.
  void (*decode_wire)(const WireList& list, const void* segments, void* values, Stream stream);

  // Sums the values of all ranks' codes, in rank order, to dense f32. Not for fp8.
  void (*sum_wire)(const WireList& list, const SumWireArgs& args, Stream stream);
};

// Null if fsdp2x was built without nvcc.
const Kernels* device_kernels();

}  // namespace fsdp2x::cuda
