// A unit: modules whose parameters are gathered together. Owns its groups and the two state machines of
// docs/engine/unit.md.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/process_guard.hpp"
#include "engine/params/param_group.hpp"
#include "engine/torch/profile_range.hpp"

namespace fsdp2x {

class Root;

enum class ParamState { sharded, gathering, unsharded };
enum class Phase { idle, forward, backward, reduced };

const char* to_string(ParamState state);
const char* to_string(Phase phase);

// What the user's setters change; read at each use.
struct UnitOptions {
  bool reshard_after_forward = true;
  bool reshard_without_grad = false;  // after a forward without grad, though the line above says no
  bool reshard_after_backward = true;
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reduce_unused_params = false;
  bool unshard_in_backward = true;
  bool keep_unsharded_storage = false;  // the same memory at every unshard
  bool cast_forward_inputs = true;
  std::optional<at::ScalarType> param_dtype;   // inputs are cast to it
  std::optional<at::ScalarType> output_dtype;  // outputs are cast to it
  std::optional<double> divide_factor;         // null: the number of ranks
  bool force_sum_reduction = false;            // sum on the wire, divide afterwards
};

class Unit : public std::enable_shared_from_this<Unit> {
 public:
  // `groups` have at least one parameter each; a unit without parameters has no group.
  Unit(std::string name, at::Device device, std::vector<std::shared_ptr<ParamGroup>> groups, UnitOptions options);
  ~Unit();
  // `fqns`: of the parameters of each group. While it is sharded, before it joins a root.
  void rename(const std::string& name, const std::vector<std::vector<std::string>>& fqns);

  // --- parameters ---
  void begin_unshard();
  void finish_unshard();
  void unshard();
  void reshard();
  // After a forward: may keep the rows in a smaller world, see ParamGroup::set_post_forward.
  void reshard_after_forward();
  void drop_post_forward();
  // A prefetched gather that nobody used.
  void cancel_unshard();
  ParamState param_state() const { return param_state_; }

  // --- phases ---
  Phase phase() const { return phase_; }
  void set_phase(Phase phase) { phase_ = phase; }
  void pre_backward();
  void post_backward();
  void sweep_gradients();
  // See Transport::settle.
  void settle();
  void end_backward();
  // See Root::abandon_forward; `number` and `begin` are its forward's number and beginning in the root's order.
  void abandon_forward(uint64_t number, size_t begin, bool interrupted);
  void abandon_backward();
  // Its own forward raised, and who called it may go on.
  void leave_forward();
  // Back to sharded and idle; gradients of the iteration are dropped.
  void reset();

  // Tracks a forward call under grad until its backward has run or its graph is freed.
  std::shared_ptr<int> take_call_token() { return call_token_; }
  bool has_outstanding_calls() const { return call_token_.use_count() > 1; }

  bool has_params() const { return !groups.empty(); }
  bool has_open_scratch() const;
  // What the unit takes while it is gathered.
  size_t slot_bytes() const;

  // In a forked child: takes the memory of all unsharded parameters of all units away, because it is the parent's. A
  // later access throws. Needs the GIL.
  static void forbid_all();

  std::string name;
  RangeNames ranges;
  std::shared_ptr<Root> root;
  UnitOptions options;
  at::Device device;
  std::vector<std::shared_ptr<ParamGroup>> groups;
  bool armed = false;                   // took part in a forward under grad since its last synchronised backward
  uint64_t armed_in = 0;                // number of that forward
  size_t num_running = 0;               // calls of its modules: recursion, threads
  bool packs_late = false;              // gradients stay with the unsharded parameters until the unit's backward ends
  std::vector<size_t> forward_indices;  // positions in the root's forward order, last call last
  uint64_t backward_position = 0;
  std::optional<c10::Stream> backward_stream;  // where its last backward began; null on the CPU
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;

 private:
  void set_params(ParamState from, ParamState to);
  void name_groups();

  cpu::ProcessGuard guard_;
  ParamState param_state_ = ParamState::sharded;
  Phase phase_ = Phase::idle;
  std::shared_ptr<int> call_token_ = std::make_shared<int>(0);
};

// A unit on its way to another root. It is sharded meanwhile; finish() gathers it there, as far as it was, with what
// this rank had written to its parameters.
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
