// The copies of a group's gather, and the codes of a gather in a wire format.
//
//   shard pool --cast, encode--> own segment --all-gather--> W segments --copy out, decode--> slot
#pragma once

#include <utility>
#include <vector>

#include "core/gather_plan.hpp"
#include "engine/memory/copy_program.hpp"
#include "engine/memory/wire_program.hpp"

namespace fsdp2x {

struct GatherProgram {
  GatherProgram() = default;
  explicit GatherProgram(GatherPlan plan)
      : direct(std::move(plan.direct)),
        segment_bytes(plan.segment_bytes),
        to_slot(std::move(plan.shard_to_slot)),
        to_segment(std::move(plan.shard_to_segment)),
        copy_out(std::move(plan.staging_to_slot)) {}
  // Packs everything. The layouts of segments are the same on every device, so that CPU and device ranks could decode
  // each other's.
  GatherProgram(const Layout& layout, WireFormat format);

  std::vector<DirectGather> direct;
  size_t segment_bytes = 0;  // of one rank in the staging, 0: nothing is packed
  CopyProgram to_slot, to_segment, copy_out;
  WireProgram codes_to_segment, codes_to_slot;  // parameters in a wire format
};

}  // namespace fsdp2x
