// Gathers, and their cleanup after an exception.
#include "core/schedule/gathers.hpp"

#include <exception>
#include <utility>

namespace fsdp2x {

void Gathers::begin(ScheduledUnit& unit, ShardsNow shards) {
  if (unit.param_state_ != ParamState::sharded || !unit.has_params()) return;
  effects_.check_process(unit, "gather unit");
  const auto section = effects_.open_section(unit, Section::all_gather);
  unit.set_params(ParamState::sharded, ParamState::gathering);
  try {
    for (ScheduledGroup* const group : unit.groups_) {
      group->gather_state_ = GatherState::begun;
      effects_.begin_gather(*group, shards);
    }
  } catch (...) {
    cancel_after_exception(unit);
    throw;
  }
}

void Gathers::finish(ScheduledUnit& unit) {
  if (unit.param_state_ != ParamState::gathering) return;
  const auto section = effects_.open_section(unit, Section::all_gather_copy_out);
  try {
    for (ScheduledGroup* const group : unit.groups_) {
      effects_.finish_gather(unit, *group);
      group->gather_state_ = GatherState::filled;
    }
  } catch (...) {
    cancel_after_exception(unit);
    throw;
  }
  unit.set_params(ParamState::gathering, ParamState::unsharded);
}

void Gathers::release(ScheduledUnit& unit, GatherEnd end) {
  std::exception_ptr error;
  for (ScheduledGroup* const group : unit.groups_) {
    const GatherState state = std::exchange(group->gather_state_, GatherState::none);
    if (state == GatherState::none) continue;
    try {
      if (state == GatherState::begun) {
        effects_.release_gather(*group, GatherEnd::canceled);
      } else {
        group->keeps_rows_ = effects_.release_gather(*group, end);
      }
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  unit.param_state_ = ParamState::sharded;
  if (error) std::rethrow_exception(error);
}

void Gathers::reshard(ScheduledUnit& unit) {
  if (unit.param_state_ == ParamState::gathering) cancel(unit);
  drop_rows(unit);
  if (unit.param_state_ != ParamState::unsharded) return;
  effects_.check_process(unit, "reshard unit");
  release(unit, GatherEnd::released);
}

void Gathers::reshard_after_forward(ScheduledUnit& unit) {
  if (unit.param_state_ != ParamState::unsharded) return reshard(unit);
  release(unit, GatherEnd::keeps_rows);
}

void Gathers::cancel(ScheduledUnit& unit) {
  effects_.check_process(unit, "reshard unit");
  release(unit, GatherEnd::released);
}

void Gathers::cancel_after_exception(ScheduledUnit& unit) noexcept {
  try {
    cancel(unit);
  } catch (...) {
    // The first exception says what went wrong.
  }
}

void Gathers::drop_rows(ScheduledUnit& unit) {
  if (unit.param_state_ != ParamState::sharded) return;
  for (ScheduledGroup* const group : unit.groups_) {
    if (!group->keeps_rows_) continue;
    effects_.drop_rows(*group);
    group->keeps_rows_ = false;
  }
}

}  // namespace fsdp2x
