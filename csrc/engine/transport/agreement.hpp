// The ranks of a process group agree on each collective before it is posted. As long as a rank repeats what all ranks
// have done before, that costs a hash and no message. Anything else is compared through the group's store first
// (python/fsdp2x/base/agreement.py has the protocol), so unequal collectives never meet.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/collective_order.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

class ParamGroup;

class Agreement {
 public:
  // Python callables: ask(description) compares with the peers and raises if they post something else;
  // leave(why) reports that this rank's forward or backward raised.
  Agreement(PyRef ask, PyRef leave) : ask_(std::move(ask)), leave_(std::move(leave)) {}

  // The number of a unit's group on this process group. The ranks call it in the same order. `label`: the model, for
  // messages.
  uint64_t add_subject(const std::string& label);

  // Before a collective of `group`, which is `subject` here, is posted. Takes the GIL only to ask. Throws if the ranks
  // disagree, or if one of them has left the pass.
  void post(uint64_t subject, const ParamGroup& group, Operation operation, size_t segment_bytes, DType type);
  // The same for a collective of Python. `kind` is compared, `what` follows the rank in messages: "clips gradients".
  void post_other(const Gil& gil, const std::string& kind, const std::string& what, Operation operation,
                  size_t segment_bytes, DType type);
  // This rank's pass has raised: peers that wait in it are told.
  void leave(const Pass& pass, const std::string& why) noexcept;

  // A peer has left or has posted something else, or this rank has left: what is on its way may never end.
  bool is_broken() const { return is_broken_; }
  void set_broken(bool is_broken) { is_broken_ = is_broken; }
  // The next collective is compared whether it is expected or not.
  void ask_next() { must_ask_ = true; }
  void restart();
  uint64_t num_posted() const;
  // The collective number `number`, counted from 0, as `ask` is given it; None if it is too long ago.
  pybind11::object describe_posted(const Gil& gil, uint64_t number) const;

 private:
  struct Subject {
    std::string label;
    std::string name;  // of the unit, or what Python posts
  };
  void post(const Collective& next, const ParamGroup* group);
  pybind11::dict describe(const Collective& collective, uint64_t number) const;

  PyRef ask_, leave_;
  mutable std::mutex mutex_;  // a thread of Python reads what was posted; never held while the GIL is taken
  CollectiveOrder order_;
  std::atomic<bool> must_ask_ = false;
  std::atomic<bool> is_broken_ = false;
  uint64_t num_subjects_ = 0;
  std::map<uint64_t, Subject> subjects_;
};

// Before a collective of `group` over its shards, or over its replicas. See Agreement::post.
void agree_on_shards(const ParamGroup& group, Operation operation, size_t segment_bytes, DType type);
void agree_on_replicas(const ParamGroup& group, size_t segment_bytes, DType type);

}  // namespace fsdp2x
