// The ranks of a process group agree on each collective before it is posted. While a rank repeats a sequence that all
// ranks have already compared, that costs a hash and no message. Anything else is first compared through the group's
// store (python/fsdp2x/base/agreement.py has the protocol), so unequal collectives never meet.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/collective_order.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

class ParamGroup;

class Agreement {
 public:
  // Python callables: ask(description) compares with the peers and raises if they post something else. leave(why)
  // reports that this rank's forward or backward raised.
  Agreement(PyRef ask, PyRef leave) : ask_(std::move(ask)), leave_(std::move(leave)) {}

  // Returns the number of a unit's group on this process group. The ranks call it in the same order. `label`: the
  // model's name in messages.
  uint64_t add_subject(const std::string& label);

  // Call it before a collective of `group`, which is `subject` here, is posted. Takes the GIL only to ask. Throws if
  // the ranks disagree, or if one of them has left the pass. `parts`: a rank's bytes in each output of a gather in
  // place.
  void agree(uint64_t subject, const ParamGroup& group, Operation operation, size_t segment_bytes, DType type,
             const std::vector<size_t>& parts);
  // Does the same for a collective of Python. Ranks compare `kind`. `what` follows the rank in messages, for example
  // "clips gradients".
  void agree_on_other(const Gil& gil, const std::string& kind, const std::string& what, Operation operation,
                      size_t segment_bytes, DType type);
  // Begins a call outside of passes. Its collectives are a pass.
  void begin_call() { ++num_calls_; }
  void leave_call(const std::string& why) noexcept { leave(call(), why); }
  // Counts the collective that the ranks agreed on as posted. No exception may come between this call and the post: a
  // rank that leaves reports what it has counted, and its peers wait for these collectives.
  void count();
  // Reports that this rank's pass has raised to peers that wait in it.
  void leave(const Pass& pass, const std::string& why) noexcept;

  // Returns whether a peer has left or posted something else, or this rank has left. Collectives on their way may never
  // end.
  bool is_broken() const { return is_broken_; }
  void set_broken(bool is_broken) { is_broken_ = is_broken; }
  // Forces a comparison of the next collective, even if it is expected.
  void ask_next() { must_ask_ = true; }
  void restart();
  uint64_t num_posted() const;
  // Returns the description of collective `number`, counted from 0, that `ask` got. None if it is too long ago.
  pybind11::object describe_posted(const Gil& gil, uint64_t number) const;

 private:
  struct Subject {
    std::string label;
    std::string name;           // of the unit, or of Python's operation
    std::vector<size_t> parts;  // of its gathers in place, which are all alike
  };
  Pass call() const { return {PassKind::outside, nullptr, num_calls_}; }
  void agree(const Collective& next, const ParamGroup* group);
  // `group`: of a collective that is compared, so the description names its trained parameters. May be null.
  pybind11::dict describe(const Collective& collective, uint64_t number, const ParamGroup* group) const;

  PyRef ask_, leave_;
  mutable std::mutex mutex_;  // guards reads from a Python thread, never held while taking the GIL
  CollectiveOrder order_;
  std::optional<Collective> agreed_;  // not counted yet
  std::atomic<bool> must_ask_ = false;
  std::atomic<bool> is_broken_ = false;
  uint64_t num_subjects_ = 0;
  uint64_t num_calls_ = 0;
  std::map<uint64_t, Subject> subjects_;
};

// Who calls Agreement::count: this function, or the Python function that posts.
enum class Counts : uint8_t { now, at_post };

// Call before a collective of `group` over its shards or its replicas. See Agreement::agree.
void agree_on_shards(const ParamGroup& group, Operation operation, size_t segment_bytes, DType type, Counts counts,
                     const std::vector<size_t>& parts = {});
void agree_on_replicas(const ParamGroup& group, size_t segment_bytes, DType type, Counts counts);

}  // namespace fsdp2x
