// An optimizer's step over resting shards (engine/params/shards.hpp), reported to the next pass.
#pragma once

#include <Python.h>

#include <memory>
#include <set>
#include <vector>

#include "engine/params/param_group.hpp"

namespace fsdp2x {

// While it lives, writes to the shards of an optimizer's parameters go where the next gather reads, so nothing is
// copied afterwards. Shards that cannot be opened are written as usual.
class WritableShards {
 public:
  // `param_groups`: a list of dicts with a list of "params", as optimizers have it. Anything else is skipped.
  WritableShards(const Gil& gil, PyObject* param_groups);
  ~WritableShards() { close_shards(); }
  WritableShards(const WritableShards&) = delete;
  WritableShards& operator=(const WritableShards&) = delete;

  // Ends the step. Ranks compare it in their next pass.
  void close();

 private:
  void close_shards();

  std::vector<std::weak_ptr<ParamGroup>> opened_;
  std::set<std::shared_ptr<Commons>> stepped_;  // one for each root
};

}  // namespace fsdp2x
