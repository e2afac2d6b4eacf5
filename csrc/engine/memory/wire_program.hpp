// Numbers that are coded or decoded again and again (core/wire_format.hpp), with what a device has prepared to do it.
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
  mutable std::shared_ptr<void> prepared;   // of the one layer that runs it, made at the first run
};

}  // namespace fsdp2x
