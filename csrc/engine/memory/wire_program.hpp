// Segments that are coded or decoded repeatedly (core/wire_format.hpp), with what a device has prepared for it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/cuda/plan.hpp"

namespace fsdp2x {

struct WireProgram {
  WireProgram() = default;
  explicit WireProgram(std::vector<cuda::WireSegment> made) : segments(std::move(made)) {}
  bool empty() const { return segments.empty(); }

  std::vector<cuda::WireSegment> segments;  // `source`: the parameter, however many there are
  mutable std::shared_ptr<void> prepared;   // made at the first run by the one layer that runs it
};

}  // namespace fsdp2x
