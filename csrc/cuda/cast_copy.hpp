// Runs a copy plan on the device, with its casts, in one launch: a rank's shard pool into its rows of the gather slot.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/layout.hpp"

namespace fsdp2x::cuda {

// What a segment does with an element: copy that many bytes, or cast.
enum class CastMode : uint8_t {
  copy1,
  copy2,
  copy4,
  copy8,
  f32_to_bf16,
  f32_to_f16,
  bf16_to_f32,
  bf16_to_f16,
  f16_to_f32,
  f16_to_bf16,
};

// A `Copy` as the kernel reads it. Offsets in bytes, everything else in elements.
struct CastSegment {
  size_t src_offset = 0;
  size_t dst_offset = 0;
  int64_t numel = 0;  // of all pieces
  int64_t piece_numel = 0;
  int64_t src_stride = 0;
  int64_t dst_stride = 0;
  int64_t first_tile = 0;  // the segments before it have this many tiles
  CastMode mode = CastMode::copy1;
  bool aligned = false;  // every vector of it starts at a multiple of 16 bytes from both bases
};

// The caller copies `segments` into device memory that it owns, once; a launch passes that pointer.
struct CastPlan {
  std::vector<CastSegment> segments;
  int64_t num_tiles = 0;
};

// Empty copies are left out. Throws Error for a cast that is not in CastMode: f64 is copied but never cast here.
CastPlan plan_casts(std::span<const Copy> copies);

// Enqueues the plan on `stream` from one base pointer to the other, both of the current device. `segments`: the plan's,
// in device memory, alive until the stream has passed. Sources and destinations do not overlap. Nothing is allocated
// and nothing is waited for. Throws Error when the launch fails.
void cast_to_slot(const CastSegment* segments, int num_segments, int64_t num_tiles, const void* src_base,
                  void* dst_base, cudaStream_t stream);

}  // namespace fsdp2x::cuda
