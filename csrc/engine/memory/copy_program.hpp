// A copy plan that runs again and again, with what a device has prepared to run it in one launch.
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
  mutable std::shared_ptr<void> prepared;  // of the one layer that runs it, made at the first run
};

}  // namespace fsdp2x
