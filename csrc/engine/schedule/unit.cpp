// A unit: state machines, gathers and what becomes of them.
#include "engine/schedule/unit.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <set>

#include "core/error.hpp"
#include "engine/torch/transforms.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

namespace {

// Guarded by the GIL.
std::set<Unit*>& live_units() {
  static std::set<Unit*> units;
  return units;
}

}  // namespace

const char* to_string(ParamState state) {
  switch (state) {
    case ParamState::sharded:
      return "SHARDED";
    case ParamState::gathering:
      return "GATHERING";
    case ParamState::unsharded:
      return "UNSHARDED";
  }
  return "?";
}

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::idle:
      return "IDLE";
    case Phase::forward:
      return "FORWARD";
    case Phase::backward:
      return "BACKWARD";
    case Phase::reduced:
      return "REDUCED";
  }
  return "?";
}

Unit::Unit(std::string unit_name, at::Device unit_device, std::vector<std::shared_ptr<ParamGroup>> unit_groups,
           UnitOptions unit_options)
    : UnitFacts(std::move(unit_name), std::move(unit_options)), device(unit_device), groups(std::move(unit_groups)) {
  for (const auto& group : groups) group->set_unit(this);
  name_groups();
  live_units().insert(this);
}

Unit::~Unit() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  live_units().erase(this);
  try {
    if (guard_.is_here()) reset();
  } catch (const std::exception&) {
    // A peer is gone or the interpreter is shutting down: the memory goes with the process.
  }
  groups.clear();
}

void Unit::rename(const std::string& new_name, const std::vector<std::vector<std::string>>& fqns) {
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < groups[i]->params().size(); ++j) groups[i]->params()[j].rename(fqns.at(i).at(j));
  }
  name = new_name;
  ranges = RangeNames(name);
  name_groups();
}

void Unit::set_groups(std::vector<std::shared_ptr<ParamGroup>> new_groups) {
  if (param_state_ != ParamState::sharded) {
    throw Error("fsdp2x: the groups of unit '" + name + "' cannot change: it is " + to_string(param_state_));
  }
  groups = std::move(new_groups);
  for (const auto& group : groups) group->set_unit(this);
  name_groups();
}

void Unit::name_groups() {
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i]->rename(i == 0 ? name : name + " (mesh " + std::to_string(i) + ")");
  }
}

void Unit::set_params(ParamState from, ParamState to) {
  if (param_state_ != from) {
    throw Error("fsdp2x: unit '" + name + "' cannot become " + to_string(to) + ": it is " + to_string(param_state_) +
                ", expected " + to_string(from));
  }
  param_state_ = to;
}

void Unit::begin_unshard(bool pools_stand_still) {
  if (param_state_ != ParamState::sharded || !has_params()) return;
  guard_.require("gather unit", name);
  const ProfileRange range(ranges.all_gather);
  set_params(ParamState::sharded, ParamState::gathering);
  size_t num_begun = 0;
  try {
    for (; num_begun < groups.size(); ++num_begun) {
      const OutsideTransforms outside;
      ParamGroup& source = groups[num_begun]->begin_gather();
      source.transport().begin_gather(source, pools_stand_still);
    }
  } catch (...) {
    for (size_t i = 0; i < num_begun; ++i) cancel_gather(*groups[i]);
    param_state_ = ParamState::sharded;
    throw;
  }
}

void Unit::finish_unshard() {
  if (param_state_ != ParamState::gathering) return;
  const ProfileRange range(ranges.all_gather_copy_out);
  try {
    for (const auto& group : groups) {
      const OutsideTransforms outside;
      ParamGroup& source = group->gathered_from();
      source.transport().finish_gather(source);
      group->fill();
    }
  } catch (...) {
    cancel_unshard();
    throw;
  }
  set_params(ParamState::gathering, ParamState::unsharded);
}

void Unit::free(ParamGroup& group, bool keeps_rows) {
  const OutsideTransforms outside;
  ParamGroup& source = group.gathered_from();
  if (keeps_rows) {
    ParamGroup& smaller = *group.post_forward();
    smaller.transport().write_pool(smaller, group.rows_to_keep(), source.gather().read);
  }
  group.empty(keeps_rows);
  group.free_extensions();
  source.transport().release_gather(source);
}

void Unit::cancel_gather(ParamGroup& group) {
  if (group.is_filled()) return free(group, /*keeps_rows=*/false);  // another group of the unit failed
  const OutsideTransforms outside;
  group.free_extensions();
  ParamGroup& source = group.gathered_from();
  source.transport().release_gather(source);
}

void Unit::reshard() {
  if (param_state_ == ParamState::gathering) cancel_unshard();
  drop_post_forward();
  if (param_state_ != ParamState::unsharded) return;
  guard_.require("reshard unit", name);
  for (const auto& group : groups) free(*group, /*keeps_rows=*/false);
  set_params(ParamState::unsharded, ParamState::sharded);
}

void Unit::reshard_after_forward() {
  if (param_state_ != ParamState::unsharded) return reshard();
  for (const auto& group : groups) free(*group, /*keeps_rows=*/group->post_forward() != nullptr);
  set_params(ParamState::unsharded, ParamState::sharded);
}

void Unit::drop_post_forward() {
  if (param_state_ != ParamState::sharded) return;
  for (const auto& group : groups) group->drop_post_forward();
}

void Unit::cancel_unshard() {
  guard_.require("reshard unit", name);
  for (const auto& group : groups) cancel_gather(*group);
  set_params(ParamState::gathering, ParamState::sharded);
}

bool Unit::has_open_gradients() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->is_open(); });
}

void Unit::set_phase(Phase to) {
  // Recomputations inside a backward leave its phase alone.
  if (phase_ == Phase::backward && to == Phase::forward) {
    throw Error("fsdp2x: unit '" + name + "' cannot become " + to_string(to) + ": it is " + to_string(phase_));
  }
  phase_ = to;
}

bool Unit::drop_packed(ParamGroup& group) {
  const bool was_shown = !std::exchange(group.record().shown, {}).empty();
  const bool was_there = group.transport().abandon_reduce(group) || was_shown;
  group.set_gradient_state(GradientState::none);
  group.record().pending_flush = false;
  return was_there;
}

void Unit::drop_partial(ParamGroup& group) {
  group.record().partial = nullptr;
  group.record().partial_parts = Parts();
  group.record().was_zeroed = false;
  group.transport().drop_partial(group);
}

void Unit::end_backward() {
  if (param_state_ == ParamState::gathering) cancel_unshard();
  set_phase(Phase::idle);
}

void Unit::abandon_forward(uint64_t number, size_t begin, bool interrupted) {
  if (armed && armed_in == number) armed = false;
  std::erase_if(forward_indices, [begin](size_t index) { return index >= begin; });
  if (interrupted) num_running = 0;
  if (num_running > 0) return;
  reshard();
  set_phase(Phase::idle);
}

void Unit::leave_forward() {
  if (phase_ != Phase::forward || num_running > 0) return;
  reshard();
  set_phase(Phase::idle);
}

void Unit::abandon_backward() {
  if (num_running > 0) return;
  reshard();
  set_phase(Phase::idle);
}

void Unit::reset() {
  guard_.require("reset unit", name);
  if (root) {
    const OutsideTransforms outside;
    for (const auto& group : groups) {
      drop_packed(*group);
      drop_partial(*group);
      group->record().reduced_this_backward = false;
      group->drop_unpacked();
    }
    reshard();
  }
  forward_indices.clear();
  armed = false;
  num_running = 0;
  set_phase(Phase::idle);
}

std::vector<std::shared_ptr<Unit>> Unit::live() {
  std::vector<std::shared_ptr<Unit>> all;
  for (Unit* const unit : live_units()) {
    if (auto held = unit->weak_from_this().lock()) all.push_back(std::move(held));
  }
  return all;
}

bool Unit::has_replaced_shards() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->has_replaced_shards(); });
}

const Param* Unit::take_lost() {
  const Param* lost = nullptr;
  for (const auto& group : groups) {
    if (const Param* const found = group->take_lost()) lost = found;
  }
  return lost;
}

void Unit::refuse_lost(const Param& lost, const std::vector<std::shared_ptr<Unit>>& units) {
  for (const auto& unit : units) {
    unit->reshard();
    unit->take_lost();
  }
  throw Error("fsdp2x: parameter '" + lost.fqn() +
              "' was converted or replaced while its unit was gathered, and the change is lost. Call reshard() on the "
              "unit before such changes, or convert the unit by its .to(dtype).");
}

void Unit::retire() {
  reset();
  is_retired_ = true;
}

void Unit::require_params() const {
  if (!is_retired_) return;
  throw Error("fsdp2x: backward came to unit '" + name +
              "', whose parameters have changed their dtype or device since this forward. Run forward again.");
}

std::vector<std::shared_ptr<ParamGroup>> Unit::live_groups() {
  std::vector<std::shared_ptr<ParamGroup>> all;
  for (const Unit* unit : live_units()) all.insert(all.end(), unit->groups.begin(), unit->groups.end());
  return all;
}

void Unit::forbid_all() {
  for (Unit* unit : live_units()) {
    if (unit->param_state_ != ParamState::unsharded) continue;
    for (const auto& group : unit->groups) {
      for (Param& param : group->params()) param.forbid();
    }
  }
}

}  // namespace fsdp2x
