// A unit on its way to another root.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/schedule/unit.hpp"

namespace fsdp2x {

// The unit is sharded meanwhile; finish() gathers it there, as far as it was, with what this rank had written to its
// parameters.
class UnitMove {
 public:
  explicit UnitMove(std::shared_ptr<Unit> unit);
  void finish();

 private:
  std::shared_ptr<Unit> unit_;
  ParamState state_;
  std::vector<std::pair<at::Tensor, at::Tensor>>
      before_;  // unsharded parameters and their values, as somebody may have written to them
};

}  // namespace fsdp2x
