// A unit: modules whose parameters are gathered together. Owns its groups and the two state machines of
// docs/engine/unit.md. It tells its groups' transports what to do; its root tells it.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/process_guard.hpp"
#include "engine/params/param_group.hpp"
#include "engine/params/unit_facts.hpp"

namespace fsdp2x {

class Root;

enum class ParamState { sharded, gathering, unsharded };
enum class Phase { idle, forward, backward, reduced };

const char* to_string(ParamState state);
const char* to_string(Phase phase);

class Unit : public UnitFacts, public std::enable_shared_from_this<Unit> {
 public:
  // `groups` have at least one parameter each; a unit without parameters has no group.
  Unit(std::string name, at::Device device, std::vector<std::shared_ptr<ParamGroup>> groups, UnitOptions options);
  ~Unit();
  // `fqns`: of the parameters of each group. While it is sharded, before it joins a root.
  void rename(const std::string& name, const std::vector<std::vector<std::string>>& fqns);
  // Replaces the groups. While it is sharded, before it joins a root.
  void set_groups(std::vector<std::shared_ptr<ParamGroup>> new_groups);

  // --- parameters ---
  // `pools_stand_still`: see Transport::begin_gather.
  void begin_unshard(bool pools_stand_still);
  void finish_unshard();
  void reshard();
  // After a forward: may keep the rows in a smaller world, see ParamGroup::set_post_forward.
  void reshard_after_forward();
  void drop_post_forward();
  // A prefetched gather that nobody used.
  void cancel_unshard();
  ParamState param_state() const { return param_state_; }

  // --- phases ---
  Phase phase() const { return phase_; }
  // Throws where there is no way from the phase before.
  void set_phase(Phase to);
  void end_backward();
  // See Root::abandon_forward; `number` and `begin` are its forward's number and beginning in the root's order.
  void abandon_forward(uint64_t number, size_t begin, bool interrupted);
  // Behind what its gradients have lost.
  void abandon_backward();
  // Its own forward raised, and who called it may go on.
  void leave_forward();
  // Back to sharded and idle; gradients of the iteration are dropped.
  void reset();
  // The parameters belong to another unit from now on: a graph that still holds this one cannot run backward.
  void retire();
  // Throws where it is retired.
  void require_params() const;

  // Gradients that are packed or posted are dropped. Returns whether there were any.
  bool drop_packed(ParamGroup& group);
  // Reduced rows that wait for an all-reduce are dropped.
  void drop_partial(ParamGroup& group);
  bool has_open_gradients() const;
  // See ParamGroup::has_replaced_shards.
  bool has_replaced_shards() const;
  // See ParamGroup::take_lost.
  const Param* take_lost();
  // Throws. Changes of other parameters of `units` that are lost with this one are forgotten: one error tells of all.
  [[noreturn]] static void refuse_lost(const Param& lost, const std::vector<std::shared_ptr<Unit>>& units);

  // Tracks a forward call under grad until its backward has run or its graph is freed.
  std::shared_ptr<int> take_call_token() { return call_token_; }
  bool has_outstanding_calls() const { return call_token_.use_count() > 1; }

  bool has_params() const { return !groups.empty(); }

  // All units that live, and their groups. Need the GIL.
  static std::vector<std::shared_ptr<Unit>> live();
  static std::vector<std::shared_ptr<ParamGroup>> live_groups();
  // In a forked child: takes the memory of all unsharded parameters of all units away, because it is the parent's. A
  // later access throws. Needs the GIL.
  static void forbid_all();

  std::shared_ptr<Root> root;  // kept alive for the hooks, never called from here
  at::Device device;
  std::vector<std::shared_ptr<ParamGroup>> groups;
  uint64_t armed_in = 0;                // number of the forward that armed it
  size_t num_running = 0;               // calls of its modules: recursion, threads
  bool packs_late = false;              // gradients stay with the unsharded parameters until the unit's backward ends
  std::vector<size_t> forward_indices;  // positions in the root's forward order, last call last
  std::optional<c10::Stream> backward_stream;  // where its last backward began; null on the CPU
  std::vector<std::weak_ptr<Unit>> forward_prefetch, backward_prefetch;

 private:
  void set_params(ParamState from, ParamState to);
  void name_groups();
  // Its slot goes; the rows may stay in the smaller world.
  static void free(ParamGroup& group, bool keeps_rows);
  static void cancel_gather(ParamGroup& group);

  cpu::ProcessGuard guard_;
  ParamState param_state_ = ParamState::sharded;
  Phase phase_ = Phase::idle;
  bool is_retired_ = false;
  std::shared_ptr<int> call_token_ = std::make_shared<int>(0);
};

}  // namespace fsdp2x
