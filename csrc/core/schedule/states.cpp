// Transitions of units and groups.
#include "core/schedule/states.hpp"

#include <algorithm>
#include <array>

#include "core/error.hpp"

namespace fsdp2x {

const char* to_string(ParamState state) {
  static constexpr std::array kNames = {"SHARDED", "GATHERING", "UNSHARDED"};
  return kNames.at(static_cast<size_t>(state));
}

const char* to_string(Phase phase) {
  static constexpr std::array kNames = {"IDLE", "FORWARD", "BACKWARD", "REDUCED"};
  return kNames.at(static_cast<size_t>(phase));
}

const char* to_string(GradientState state) {
  static constexpr std::array kNames = {"NONE", "PACKED", "POSTED"};
  return kNames.at(static_cast<size_t>(state));
}

void ScheduledGroup::set_gradients(GradientState to) {
  const GradientState from = gradient_state_;
  if (from == to ? to != GradientState::none : from == GradientState::posted && to == GradientState::packed) {
    throw Error("fsdp2x: the gradients of unit '" + name() + "' cannot become " + to_string(to) +
                ", because they are " + to_string(from));
  }
  gradient_state_ = to;
  if (to == GradientState::none) was_zeroed_ = false;
}

void ScheduledUnit::set_scheduled_groups(std::vector<ScheduledGroup*> groups) {
  if (param_state_ != ParamState::sharded) {
    throw Error("fsdp2x: the groups of unit '" + name_ + "' cannot change, because the unit is " +
                to_string(param_state_));
  }
  groups_ = std::move(groups);
}

bool ScheduledUnit::may_overlap() const {
  return std::ranges::all_of(groups_, [](const ScheduledGroup* group) { return group->facts().may_overlap; });
}

void ScheduledUnit::set_params(ParamState from, ParamState to) {
  if (param_state_ != from) {
    throw Error("fsdp2x: unit '" + name_ + "' cannot become " + to_string(to) + ". Expected " + to_string(from) +
                ", got " + to_string(param_state_));
  }
  param_state_ = to;
}

void ScheduledUnit::set_phase(Phase to) {
  if (phase_ == Phase::backward && to == Phase::forward) {
    throw Error("fsdp2x: unit '" + name_ + "' cannot become " + to_string(to) + ", because it is " + to_string(phase_));
  }
  phase_ = to;
}

}  // namespace fsdp2x
