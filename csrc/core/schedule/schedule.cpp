// Events and their consequences.
#include "core/schedule/schedule.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace fsdp2x {

namespace {

// Positions of one backward are below those of the next: they only grow over the life of a group.
constexpr int kPositionBits = 24;

}  // namespace

ScheduledUnits Schedule::units() const {
  ScheduledUnits alive;
  alive.reserve(units_.size());
  for (const auto& weak : units_) {
    if (auto unit = weak.lock()) alive.push_back(std::move(unit));
  }
  return alive;
}

// --- calls of the user ---

void Schedule::begin_unshard(ScheduledUnit& unit, ShardsNow shards) {
  if (const auto lost = effects_.take_lost(unit)) {
    // One error covers all units.
    for (const auto& other : units()) {
      reshard(*other);
      effects_.take_lost(*other);
    }
    throw Error(
        "fsdp2x: parameter '" + *lost +
        "' was converted or replaced while its unit was gathered, and the change is lost. Call reshard() on the "
        "unit before such changes, or convert the unit with its .to(dtype).");
  }
  gathers_.begin(unit, shards);
}

void Schedule::unshard(ScheduledUnit& unit) {
  begin_unshard(unit);
  finish_unshard(unit);
}

void Schedule::finalize_backward() {
  settle_raised_backward();
  reductions_.refuse_after_loss();
  const ScheduledUnits alive = units();
  for (const auto& unit : alive) {
    sweep(*unit);  // for schedules that assign weight gradients by themselves (zero bubble)
    if (unit->options_.reshard_after_backward) reshard(*unit);
  }
  flush(alive);
  if (settings_->is_last_backward) order_.clear(alive);
  backward_.finalized = reductions_.backward_number();
  backward_.awaits_finalization = false;
}

void Schedule::finish_held_backwards() {
  if (backward_.finalized != reductions_.backward_number()) finalize_backward();
}

void Schedule::synchronize_gradients(const ScheduledUnits& units) {
  settle_raised_backward();
  reductions_.refuse_after_loss();
  for (const auto& unit : units) sweep(*unit);
  flush(units);
}

void Schedule::settle_raised_backward() {
  if (backward_has_raised()) abandon_backward();
}

void Schedule::reset(ScheduledUnit& unit) {
  effects_.check_process(unit, "reset unit");
  reductions_.drop_all(unit);
  reshard(unit);
  unit.forward_indices_.clear();
  unit.awaits_reduction_ = false;
  unit.num_running_ = 0;
  unit.set_phase(Phase::idle);
}

void Schedule::reset() {
  for (const auto& unit : units()) reset(*unit);
  reductions_.reset();
  order_.forget();
  forward_.root = nullptr;
  backward_.has_begun = false;
  backward_.awaits_finalization = false;
  reductions_.end_backward();
  effects_.end_pass(/*notifies_peers=*/true);
}

// --- forward ---

Schedule::Entry Schedule::enter(ScheduledUnit& unit, bool has_grad, bool was_interrupted) {
  if (unit.phase_ == Phase::backward) return {.is_recomputed = true};
  if (was_interrupted) abandon_forward(/*interrupted=*/true);
  Entry entry{.begins_unit = unit.phase_ != Phase::forward};
  unit.set_phase(Phase::forward);
  ++unit.num_running_;
  entry.begins_root = entry.begins_unit && !in_forward();
  if (entry.begins_root) begin_forward(unit, has_grad);
  return entry;
}

void Schedule::begin_forward(ScheduledUnit& unit, bool has_grad) {
  const bool recomputes = effects_.inside_backward();  // for example, a checkpoint of the complete model
  if (!recomputes && has_grad) reductions_.refuse_after_loss();
  forward_.root = &unit;
  order_.begin_sequence();
  if (recomputes) return;
  ++forward_.number;
  forward_.has_grad = has_grad;
  effects_.begin_pass(has_grad ? PassKind::forward : PassKind::evaluation);
  const ScheduledUnits alive = units();
  if (has_grad) {
    ++forward_.counts.num_begun;
    effects_.warn_of_zeroed(alive);
  }
  const bool outstanding =
      std::any_of(alive.begin(), alive.end(), [this](const auto& one) { return effects_.has_outstanding_calls(*one); });
  order_.begin_forward(!outstanding, alive);
  if (!outstanding) backward_.num_calls = 0;
  forward_.is_alone = has_grad && !outstanding;
  effects_.begin_forward(forward_.number, alive);
}

void Schedule::gather_for_forward(ScheduledUnit& unit, const Entry& entry) {
  if (entry.is_recomputed) return unshard(unit);
  // An optimizer may have run since the rows were kept, so gather the shards themselves.
  if (!effects_.inside_backward()) gathers_.drop_rows(unit);
  if (unit.param_state_ == ParamState::unsharded && !effects_.follow_gathered(unit)) reshard(unit);
  if (unit.param_state_ == ParamState::gathering && effects_.were_shards_written(unit)) {
    // A momentum encoder, for example, is updated in the forward of its root. Gather again, and no longer ahead.
    gathers_.cancel(unit);
    unit.is_written_in_forward_ = true;
  }
  const bool gathers = unit.has_params() && unit.param_state_ != ParamState::unsharded;
  unshard(unit);
  if (!entry.begins_unit) return;
  prefetch_forward(unit, gathers);
  effects_.end_prefetch();
}

void Schedule::prefetch_forward(ScheduledUnit& unit, bool was_gathered) {
  const bool recomputes = effects_.inside_backward();
  // Also noted for units that list what to prefetch. Ranks of a process group must predict the same, but may run other
  // forwards of units that are unsharded.
  const auto next = recomputes || !was_gathered ? nullptr : order_.next_after(unit);
  if (!unit.forward_prefetch_.empty()) {
    for (const auto& weak : unit.forward_prefetch_) {
      const auto target = weak.lock();
      if (!target || target->param_state_ != ParamState::sharded || target->is_written_in_forward_) continue;
      // A checkpoint recomputes units one by one, and the backward of the next one is over.
      if (recomputes && target->phase_ == Phase::reduced) continue;
      if (!recomputes) gathers_.drop_rows(*target);
      prefetch(*target, Section::forward_prefetch);
    }
    return;
  }
  if (!next || (is_synchronous_ && !next->may_overlap())) return;
  if (next->param_state_ != ParamState::sharded || !next->has_params() || next->is_written_in_forward_) return;
  gathers_.drop_rows(*next);
  prefetch(*next, Section::forward_prefetch);
}

void Schedule::await_backward(ScheduledUnit& unit) {
  if (!unit.awaits_reduction_) unit.awaits_since_ = forward_.number;
  unit.awaits_reduction_ = true;
}

std::optional<uint64_t> Schedule::number_call() {
  if (effects_.inside_backward()) return std::nullopt;
  return backward_.num_calls++;
}

void Schedule::leave(ScheduledUnit& unit) {
  if (unit.phase_ != Phase::backward && unit.num_running_ > 0) --unit.num_running_;
}

void Schedule::finish_forward(ScheduledUnit& unit, bool has_grad) {
  if (!effects_.inside_backward()) {
    const ScheduleOptions& options = unit.options_;
    const bool frees = options.reshard_after_forward || (options.reshard_without_grad && !has_grad);
    if (frees && unit.num_running_ == 0) gathers_.reshard_after_forward(unit);
    order_.record(unit);
  }
  unit.set_phase(Phase::idle);
}

void Schedule::end_forward() {
  forward_.root = nullptr;
  order_.end_sequence();
  if (effects_.inside_backward()) return;
  for (const auto& unit : units()) {
    if (unit->param_state_ == ParamState::gathering) gathers_.cancel(*unit);
  }
  effects_.end_forward();
  effects_.end_pass(/*notifies_peers=*/true);
}

void Schedule::fail_forward(ScheduledUnit& unit) {
  if (unit.phase_ != Phase::forward || unit.num_running_ > 0) return;
  reshard(unit);
  unit.set_phase(Phase::idle);
}

void Schedule::abandon_forward(bool interrupted) {
  effects_.end_pass(/*notifies_peers=*/true);
  // If a backward follows anyway, it also waits for ranks that left this forward.
  forward_.is_alone = false;
  if (forward_.has_grad) ++forward_.counts.num_raised;
  forward_.root = nullptr;
  const ScheduledUnits alive = units();
  order_.abandon_forward(alive, forward_.has_grad);
  for (const auto& unit : alive) {
    if (unit->awaits_reduction_ && unit->awaits_since_ == forward_.number) unit->awaits_reduction_ = false;
    if (interrupted) unit->num_running_ = 0;
    if (unit->num_running_ > 0) continue;
    reshard(*unit);
    unit->set_phase(Phase::idle);
  }
  effects_.end_forward();
}

// --- backward ---

void Schedule::pre_backward(ScheduledUnit& unit, bool reads) {
  begin_backward();
  if (unit.phase_ == Phase::backward) {
    if (reads && std::exchange(unit.has_ended_reads_, false)) unshard(unit);
    return;
  }
  unit.has_ended_reads_ = false;
  effects_.check_process(unit, "run backward of unit");
  const auto section = effects_.open_section(unit, Section::pre_backward);
  unit.set_phase(Phase::backward);
  unit.awaits_reduction_ = true;
  effects_.begin_unit_backward(unit);
  if (unit.options_.unshard_in_backward) unshard(unit);
  prefetch_backward(unit);
  effects_.end_prefetch();
}

void Schedule::prefetch_backward(ScheduledUnit& unit) {
  const auto before = order_.before(unit);
  if (!unit.backward_prefetch_.empty()) {
    for (const auto& weak : unit.backward_prefetch_) {
      const auto target = weak.lock();
      if (target && target->param_state_ == ParamState::sharded) prefetch(*target, Section::backward_prefetch);
    }
    return;
  }
  if (before && before->has_params() && before->options_.unshard_in_backward && before->phase_ != Phase::reduced &&
      before->param_state_ == ParamState::sharded) {
    prefetch(*before, Section::backward_prefetch);
  }
}

void Schedule::prefetch(ScheduledUnit& unit, Section section) {
  const auto open = effects_.open_section(unit, section);
  ++num_prefetches_;
  begin_unshard(unit, section == Section::forward_prefetch ? ShardsNow::are_watched : shards_now(unit));
}

void Schedule::begin_backward() {
  if (in_backward() || !effects_.inside_backward()) return;
  if (backward_.has_begun) abandon_backward();
  reductions_.refuse_after_loss();
  effects_.warn_of_zeroed(units());
  backward_.has_begun = true;
  if (settings_->manual_finalization) backward_.awaits_finalization = true;
  effects_.begin_pass(PassKind::backward);
  reductions_.begin_backward(effects_.begin_backward(reductions_.backward_number(), forward_.is_alone));
}

void Schedule::gradient_ready(ScheduledUnit& unit, ScheduledGroup& group, size_t param) {
  if (!effects_.has_gradient(group, param)) return;
  begin_backward();
  reductions_.add_gradient(unit, group, param);
}

void Schedule::end_reads(ScheduledUnit& unit) {
  if (unit.phase_ != Phase::backward || !unit.has_params() || !unit.options_.reshard_after_backward) return;
  const auto section = effects_.open_section(unit, Section::post_backward_reshard);
  reshard(unit);
  unit.has_ended_reads_ = true;
}

void Schedule::sweep(ScheduledUnit& unit) {
  for (ScheduledGroup* const group : unit.groups_) {
    for (size_t i = 0; i < group->facts().num_params; ++i) gradient_ready(unit, *group, i);
  }
}

void Schedule::post_backward(ScheduledUnit& unit, std::optional<uint64_t> number) {
  constexpr uint64_t kMaxCalls = (uint64_t{1} << kPositionBits) - 1;
  unit.backward_position_ =
      number ? ((reductions_.backward_number() - 1) << kPositionBits) + kMaxCalls - std::min(*number, kMaxCalls)
             : backward_.progress + 1;
  unit.set_phase(Phase::reduced);
  if (!unit.has_params()) return;
  {
    const auto section = effects_.open_section(unit, Section::post_backward_reshard);
    sweep(unit);
    if (unit.options_.reshard_after_backward) reshard(unit);
  }
  if (!unit.options_.requires_gradient_sync || effects_.has_outstanding_calls(unit))
    return reductions_.pack_pending(unit);
  const auto& groups = unit.groups_;
  if (std::none_of(groups.begin(), groups.end(), [&](const auto* group) { return is_due(unit, *group); })) return;
  const auto section = effects_.open_section(unit, Section::post_backward_reduce);
  reduce(unit);
}

bool Schedule::is_due(const ScheduledUnit& unit, const ScheduledGroup& group) const {
  if (group.is_open()) return true;
  if (settings_->manual_finalization || !reductions_.is_awaited(unit, group)) return false;
  return !effects_.expects_gradients(group);
}

void Schedule::reduce(ScheduledUnit& unit) {
  // The previous unit's reduction had a complete backward to reach all ranks. Finish it now, so that its gradients are
  // attached (and an optimizer in its hooks runs) before the next ones start.
  reductions_.finish_pending();
  publish(unit.backward_position_);
  for (ScheduledGroup* const group : unit.groups_) {
    if (is_due(unit, *group)) reductions_.post(unit, *group, forward_.counts);
  }
  if (is_synchronous_) reductions_.finish_pending();
}

void Schedule::publish(uint64_t position) {
  if (position <= backward_.progress) return;
  backward_.progress = position;
  effects_.publish_progress(position);
}

void Schedule::end_backward() {
  // A backward inside a forward (meta-learning, forces of energy models): the forward still needs its parameters.
  const bool is_inside = in_forward() && effects_.forward_runs();
  const auto runs = [is_inside](const ScheduledUnit& unit) { return is_inside && unit.num_running_ > 0; };
  const ScheduledUnits alive = units();
  publish(reductions_.backward_number() << kPositionBits);
  for (auto it = alive.rbegin(); it != alive.rend(); ++it) {
    ScheduledUnit& unit = **it;
    // If a unit's inputs need no gradient, autograd does not announce the end of its backward.
    std::unique_ptr<OpenSection> section;
    if (unit.phase_ == Phase::backward && unit.has_params()) {
      section = effects_.open_section(unit, Section::post_backward_reshard);
    }
    sweep(unit);
    if (!unit.options_.requires_gradient_sync || settings_->manual_finalization) reductions_.pack_pending(unit);
    if (unit.options_.reshard_after_backward && !runs(unit)) reshard(unit);
  }
  if (!settings_->manual_finalization) {
    flush(alive);
  } else if (!is_inside) {
    effects_.end_forward();  // the gathers of this backward have read the shards, too
  }
  for (const auto& unit : alive) {
    if (unit->param_state_ == ParamState::gathering) gathers_.cancel(*unit);
    unit->set_phase(Phase::idle);
    if (runs(*unit)) unit->set_phase(Phase::forward);
  }
  backward_.has_begun = false;
  reductions_.end_backward();
  effects_.end_pass(/*notifies_peers=*/true);
  if (settings_->is_last_backward) order_.clear(alive);
}

void Schedule::abandon_backward() {
  if (backward_has_raised()) reductions_.forget_pending();
  const ScheduledUnits alive = units();
  bool root_runs = false;
  for (const auto& unit : alive) {
    reductions_.abandon(*unit);
    if (unit->num_running_ == 0) {
      reshard(*unit);
      unit->set_phase(Phase::idle);
    } else if (unit.get() == forward_.root) {
      root_runs = true;
    }
  }
  if (!root_runs) forward_.root = nullptr;
  // Some ranks may have ended the forward, and others not: then their predictions would differ.
  order_.clear(alive);
  order_.forget();
  effects_.end_pass(/*notifies_peers=*/false);
  backward_.has_begun = false;
  reductions_.end_backward();
}

void Schedule::flush(const ScheduledUnits& units) {
  reductions_.flush(units, forward_.counts);
  effects_.end_backward();
}

}  // namespace fsdp2x
