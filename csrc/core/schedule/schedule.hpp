// Decides when things happen in a training step: a state machine that turns events (autograd nodes, module hooks, calls
// of the user) into effects. It knows no tensors, no threads, and no clocks. docs/engine/unit.md has the states.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/schedule/effects.hpp"
#include "core/schedule/forward_order.hpp"
#include "core/schedule/gathers.hpp"
#include "core/schedule/reductions.hpp"
#include "core/schedule/states.hpp"

namespace fsdp2x {

// All units below one root module.
class Schedule {
 public:
  // What the user sets on a root, read at each use. It exists before the schedule does, and outlives it.
  struct Settings {
    bool is_last_backward = true;
    bool manual_finalization = false;
  };
  explicit Schedule(Effects& effects, std::shared_ptr<const Settings> settings = std::make_shared<Settings>())
      : effects_(effects), settings_(std::move(settings)), gathers_(effects), reductions_(effects) {}
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  // Adds a unit, in the same order on every rank.
  void add_unit(const std::shared_ptr<ScheduledUnit>& unit) { units_.push_back(unit); }
  // Returns the live units.
  ScheduledUnits units() const;

  // From now on, finishes each reduction immediately, and prefetches by a prediction only units that may overlap.
  void set_synchronous() { is_synchronous_ = true; }

  // --- calls of the user ---
  void begin_unshard(ScheduledUnit& unit) { begin_unshard(unit, shards_now(unit)); }
  void finish_unshard(ScheduledUnit& unit) { gathers_.finish(unit); }
  void unshard(ScheduledUnit& unit);
  void reshard(ScheduledUnit& unit) { gathers_.reshard(unit); }
  // With manual finalization, finishes what end_backward leaves open, once after all backwards.
  void finalize_backward();
  // Does the same without manual finalization, once per backward. FSDP2's pipeline schedules ask for it unit by unit.
  void finish_held_backwards();
  // Reduces the waiting gradients of `units` between backwards, and no others.
  void synchronize_gradients(const ScheduledUnits& units);
  // Abandons a backward that raised before waiting gradients are read.
  void settle_raised_backward();
  Reductions& reductions() { return reductions_; }
  // Makes the unit sharded and idle, and drops its gradients that are not in `.grad`.
  void reset(ScheduledUnit& unit);
  // Resets all units and everything that is on its way.
  void reset();

  // --- forward ---
  bool in_forward() const { return forward_.root != nullptr; }
  bool is_forward_root(const ScheduledUnit* unit) const { return forward_.root == unit; }
  struct Entry {
    bool begins_root = false;    // the forward of the root begins
    bool begins_unit = false;    // the unit's forward begins; otherwise it already runs or is recomputed
    bool is_recomputed = false;  // a checkpoint inside the unit's backward: the hooks of the first forward are still in
                                 // place
  };
  // A module of the unit is called. `was_interrupted`: an exception that skipped all hooks ended the forward that seems
  // to run.
  Entry enter(ScheduledUnit& unit, bool has_grad, bool was_interrupted);
  // Gathers the parameters for a forward whose inputs are ready, and prefetches the next unit.
  void gather_for_forward(ScheduledUnit& unit, const Entry& entry);
  // Notes that the forward of the unit is under grad.
  void await_backward(ScheduledUnit& unit);
  // Returns the number of a forward call under grad. Backwards of units end in the reverse order, also if units are
  // nested. None for a recomputation inside a backward.
  std::optional<uint64_t> number_call();
  // Ends the call of the module, also after an exception.
  void leave(ScheduledUnit& unit);
  // Called after the last module of the unit has run.
  void finish_forward(ScheduledUnit& unit, bool has_grad);
  // Called after the forward of the root has ended.
  void end_forward();
  // Called after the unit's forward raised. Its caller may continue.
  void fail_forward(ScheduledUnit& unit);
  // Undoes the root's forward after it raised or was interrupted. `interrupted`: no module of it runs any more.
  // Otherwise running modules are left alone, because they belong to other threads.
  void abandon_forward(bool interrupted);
  // Ends a recomputation that raised inside a backward, and the backward with it.
  void leave_recomputation() { forward_.root = nullptr; }

  // --- backward ---
  // Returns whether a backward with manual finalization has begun since the last call of finalize_backward().
  bool awaits_finalization() const { return backward_.awaits_finalization; }
  bool in_backward() const { return backward_.has_begun && effects_.backward_is_alive(); }
  // Returns whether the backward's graph is gone without a run of its callback.
  bool backward_has_raised() const { return backward_.has_begun && !effects_.backward_is_alive(); }
  // Called when autograd reaches an output of the unit, or a gradient of it. `reads`: the backward of the module that
  // made the output reads parameters.
  void pre_backward(ScheduledUnit& unit, bool reads = true);
  // Called when the rest of the unit's backward, such as that of an embedding, reads no parameter. Reshards the unit,
  // which still gets gradients.
  void end_reads(ScheduledUnit& unit);
  void begin_backward();
  // Called when a parameter's gradient is complete.
  void gradient_ready(ScheduledUnit& unit, ScheduledGroup& group, size_t param);
  // Called when the gradients of the inputs of a call are known. `number`: see number_call.
  void post_backward(ScheduledUnit& unit, std::optional<uint64_t> number);
  // Called when autograd runs the root's callback.
  void end_backward();
  // Undoes a backward that raised, except for gradients that are in `.grad`.
  void abandon_backward();

  uint64_t num_prefetches() const { return num_prefetches_; }

 private:
  struct ForwardPass {
    const ScheduledUnit* root = nullptr;  // null: none runs
    uint64_t number = 0;                  // counts forwards outside of backwards
    bool has_grad = false;
    bool is_alone = false;  // the last one was under grad, and no graph waited for its backward when it began
    ForwardCounts counts;
  };
  struct BackwardPass {
    bool has_begun = false;
    bool awaits_finalization = false;
    uint64_t num_calls = 0;  // forward calls under grad since the order was cleared
    uint64_t progress = 0;   // the largest position published
    uint64_t finalized = 0;  // number of the next backward when reductions were last finalized
  };
  ShardsNow shards_now(const ScheduledUnit& unit) const {
    const bool stand_still = (in_forward() || in_backward()) && !unit.is_written_in_forward_;
    return stand_still ? ShardsNow::stand_still : ShardsNow::may_change;
  }
  void begin_unshard(ScheduledUnit& unit, ShardsNow shards);
  void begin_forward(ScheduledUnit& unit, bool has_grad);
  void prefetch_forward(ScheduledUnit& unit, bool was_gathered);
  void prefetch_backward(ScheduledUnit& unit);
  void prefetch(ScheduledUnit& unit, Section section);
  // Takes gradients that did not come through gradient_ready.
  void sweep(ScheduledUnit& unit);
  // Returns whether the gradients of this backward are complete when the unit's own backward ends: packed, or none.
  bool is_due(const ScheduledUnit& unit, const ScheduledGroup& group) const;
  void reduce(ScheduledUnit& unit);
  void publish(uint64_t position);
  void flush(const ScheduledUnits& units);

  Effects& effects_;
  std::vector<std::weak_ptr<ScheduledUnit>> units_;
  std::shared_ptr<const Settings> settings_;
  bool is_synchronous_ = false;
  Gathers gathers_;
  ForwardOrder order_;
  Reductions reductions_;
  ForwardPass forward_;
  BackwardPass backward_;
  uint64_t num_prefetches_ = 0;
};

}  // namespace fsdp2x
