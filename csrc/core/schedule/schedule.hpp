// When things happen in a training step: a state machine that turns events (autograd nodes, module hooks, calls of the
// user) into effects. It knows no tensors, no threads and no clocks. docs/engine/unit.md has the states.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
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
  explicit Schedule(Effects& effects) : effects_(effects), gathers_(effects), reductions_(effects) {}
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  // In the same order on every rank.
  void add_unit(const std::shared_ptr<ScheduledUnit>& unit) { units_.push_back(unit); }
  // Those that live.
  ScheduledUnits units() const;

  struct Settings {
    bool is_synchronous = false;  // a reduction is finished at once, and no gather runs ahead by a prediction
    bool is_last_backward = true;
    bool manual_finalization = false;
  };
  Settings& settings() { return settings_; }
  const Settings& settings() const { return settings_; }

  // --- calls of the user ---
  void begin_unshard(ScheduledUnit& unit);
  void finish_unshard(ScheduledUnit& unit) { gathers_.finish(unit); }
  void unshard(ScheduledUnit& unit);
  void reshard(ScheduledUnit& unit) { gathers_.reshard(unit); }
  // With manual finalization, once after all backwards: what end_backward leaves undone then.
  void finalize_backward();
  // The same without manual finalization, once a backward: upstream's schedules ask for it unit by unit.
  void finish_held_backwards();
  // Between backwards: reduces what waits in `units`, and no other gradients.
  void synchronize_gradients(const ScheduledUnits& units);
  // A backward that raised is abandoned before anybody looks at gradients that wait.
  void settle_raised_backward();
  Reductions& reductions() { return reductions_; }
  // The unit is sharded and idle; its gradients that are not in `.grad` are gone.
  void reset(ScheduledUnit& unit);
  // All units, and everything that is on its way.
  void reset();

  // --- forward ---
  bool in_forward() const { return forward_.root != nullptr; }
  bool is_forward_root(const ScheduledUnit* unit) const { return forward_.root == unit; }
  struct Entry {
    bool begins_root = false;    // the forward of the root begins
    bool begins_unit = false;    // the unit's forward begins; otherwise it runs already, or is recomputed
    bool is_recomputed = false;  // a checkpoint inside the unit's backward: the hooks of the first forward still stand
  };
  // A module of the unit is called. `was_interrupted`: the forward that seems to run was left by an exception that no
  // hook has seen.
  Entry enter(ScheduledUnit& unit, bool has_grad, bool was_interrupted);
  // Its inputs are ready: gathers the parameters, and what comes next.
  void gather_for_forward(ScheduledUnit& unit, const Entry& entry);
  // The forward of the unit is under grad.
  void await_backward(ScheduledUnit& unit);
  // Number of a forward call under grad: backwards of units end in the reverse order, also when units are nested. None
  // for a recomputation inside a backward.
  std::optional<uint64_t> number_call();
  // The call of the module ends, also by an exception.
  void leave(ScheduledUnit& unit);
  // The last module of the unit has run.
  void finish_forward(ScheduledUnit& unit, bool has_grad);
  // The forward of the root has ended.
  void end_forward();
  // The unit's forward raised; its caller may go on.
  void fail_forward(ScheduledUnit& unit);
  // The forward of the root raised or was interrupted: as if it had not begun. `interrupted`: no module of it runs any
  // more. Otherwise those that do are left alone: they are other threads'.
  void abandon_forward(bool interrupted);
  // A recomputation inside a backward raised, and the backward with it.
  void leave_recomputation() { forward_.root = nullptr; }

  // --- backward ---
  bool in_backward() const { return backward_.has_begun && effects_.backward_is_alive(); }
  // Its graph is gone, and its callback never ran.
  bool backward_has_raised() const { return backward_.has_begun && !effects_.backward_is_alive(); }
  // Autograd reaches an output of the unit, or a gradient of it.
  void pre_backward(ScheduledUnit& unit);
  void begin_backward();
  // A parameter's gradient is complete.
  void gradient_ready(ScheduledUnit& unit, ScheduledGroup& group, size_t param);
  // The gradients of the inputs of a call are known. `number`: see number_call.
  void post_backward(ScheduledUnit& unit, std::optional<uint64_t> number);
  // Autograd runs the root's callback.
  void end_backward();
  // After a backward that raised: as if it had not begun, but for gradients that are in `.grad`.
  void abandon_backward();

  uint64_t num_prefetches() const { return num_prefetches_; }

 private:
  struct ForwardPass {
    const ScheduledUnit* root = nullptr;  // null: none runs
    uint64_t number = 0;                  // of forwards that are not inside a backward
    bool has_grad = false;
    bool is_alone = false;  // the last one was under grad, and no graph waited for its backward when it began
    ForwardCounts counts;
  };
  struct BackwardPass {
    bool has_begun = false;
    uint64_t num_calls = 0;  // forward calls under grad since the order was cleared
    uint64_t progress = 0;   // the largest position published
    uint64_t finalized = 0;  // number of the next backward when reductions were last finalized
  };
  bool shards_stand_still() const { return in_forward() || in_backward(); }
  void begin_forward(ScheduledUnit& unit, bool has_grad);
  void prefetch_forward(ScheduledUnit& unit);
  void prefetch_backward(ScheduledUnit& unit);
  void prefetch(ScheduledUnit& unit, Section section);
  // Gradients that came by another way than gradient_ready.
  void sweep(ScheduledUnit& unit);
  // Whether the gradients of this backward are complete where the unit's own ends: packed, or none.
  bool is_due(const ScheduledUnit& unit, const ScheduledGroup& group) const;
  void reduce(ScheduledUnit& unit);
  void publish(uint64_t position);
  void flush(const ScheduledUnits& units);

  Effects& effects_;
  std::vector<std::weak_ptr<ScheduledUnit>> units_;
  Settings settings_;
  Gathers gathers_;
  ForwardOrder order_;
  Reductions reductions_;
  ForwardPass forward_;
  BackwardPass backward_;
  uint64_t num_prefetches_ = 0;
};

}  // namespace fsdp2x
