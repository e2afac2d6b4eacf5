// A copy plan that runs repeatedly, with what a device has prepared to run it in one launch.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "core/layout.hpp"

namespace fsdp2x {

struct CopyProgram {
  CopyProgram() = default;
  explicit CopyProgram(std::vector<Copy> made) : copies(std::move(made)) {}
  bool empty() const { return copies.empty(); }

  std::vector<Copy> copies;
  mutable std::shared_ptr<void> prepared;  // made at the first run by the one layer that runs it
};

}  // namespace fsdp2x
