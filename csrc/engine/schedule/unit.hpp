// A unit as the engine holds it: modules whose parameters are gathered together, and their groups. The schedule keeps
// its state (core/schedule/states.hpp).
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/params/unit_facts.hpp"
#include "shm/process_guard.hpp"

namespace fsdp2x {

class Root;

// Returns whether this thread runs nodes of a backward. A recomputed forward inside of one counts.
bool inside_backward();

class Unit final : public UnitFacts {
 public:
  // `groups` have at least one parameter each; a unit without parameters has no group.
  Unit(std::string name, at::Device device, std::vector<std::shared_ptr<ParamGroup>> groups,
       const std::shared_ptr<UnitOptions>& options);
  ~Unit() override;
  // Renames the unit and its parameters, while it is sharded and before it joins a root. `fqns` has one list for each
  // group.
  void rename(const std::string& name, const std::vector<std::vector<std::string>>& fqns);
  // Replaces the groups, while the unit is sharded and before it joins a root.
  void set_groups(std::vector<std::shared_ptr<ParamGroup>> new_groups);

  void begin_unshard();
  void finish_unshard();
  void reshard();
  // Returns to sharded and idle, and drops the gradients of the iteration.
  void reset();
  // Marks the unit as replaced: another unit has its parameters now, so a graph that still holds this one cannot run
  // backward.
  void retire();
  // Throws if the unit is retired.
  void require_params() const;
  // Throws in a forked child. `action`: for example "gather unit".
  void check_process(const char* action) const { guard_.require(action, name()); }

  // See ParamGroup::has_replaced_shards.
  bool has_replaced_shards(const Gil& gil) const;
  // See ParamGroup::take_lost.
  const Param* take_lost();

  // Tracks a forward call under grad until its backward has run or its graph is freed.
  std::shared_ptr<int> take_call_token() { return call_token_; }
  bool has_outstanding_calls() const { return call_token_.use_count() > 1; }

  // Return all live units and their groups.
  static std::vector<std::shared_ptr<Unit>> live(const Gil& gil);
  static std::vector<std::shared_ptr<ParamGroup>> live_groups(const Gil& gil);
  // Takes the memory of all unsharded parameters away in a forked child, because it is the parent's. A later access
  // throws.
  static void forbid_all(const Gil& gil);

  std::shared_ptr<Root> root;  // kept alive for the hooks
  at::Device device;
  std::vector<std::shared_ptr<ParamGroup>> groups;
  bool packs_late = false;  // gradients stay with the unsharded parameters until the unit's backward ends
  std::optional<c10::Stream> backward_stream;  // where its last backward began, null on the CPU

 private:
  void name_groups();

  cpu::ProcessGuard guard_;
  bool is_retired_ = false;
  std::shared_ptr<int> call_token_ = std::make_shared<int>(0);
};

// Moves a unit to another root. The unit is sharded meanwhile. finish() gathers it there if it was gathered before, and
// restores what this rank had written to its parameters.
class UnitMove {
 public:
  explicit UnitMove(std::shared_ptr<Unit> unit);
  void finish();

 private:
  std::shared_ptr<Unit> unit_;
  ParamState state_;
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;  // unsharded parameters and their values
};

}  // namespace fsdp2x
