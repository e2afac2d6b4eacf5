// An optimizer's step: over resting shards (engine/params/shards.hpp), and known to the next pass.
#pragma once

#include <Python.h>

#include <memory>
#include <set>
#include <vector>

#include "engine/params/param_group.hpp"

namespace fsdp2x {

// While it lives, writing to the shards of an optimizer's parameters writes what the next gather shows: nothing is
// copied afterwards. What cannot be opened can be written as ever.
class WritableShards {
 public:
  // `param_groups`: a list of dicts with a list of "params", as optimizers have it; what is none is passed over.
  WritableShards(const Gil& gil, PyObject* param_groups);
  ~WritableShards() { close_shards(); }
  WritableShards(const WritableShards&) = delete;
  WritableShards& operator=(const WritableShards&) = delete;

  // The step has ended: ranks compare it in their next pass.
  void close();
  size_t num_opened() const { return opened_.size(); }

 private:
  void close_shards();

  std::vector<std::weak_ptr<ParamGroup>> opened_;
  std::set<std::shared_ptr<Commons>> stepped_;  // one of each root
};

}  // namespace fsdp2x
