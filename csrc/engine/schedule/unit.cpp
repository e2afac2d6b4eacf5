// A unit: state machines, unshard and reshard of its groups.
#include "engine/schedule/unit.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <set>

#include "core/error.hpp"
#include "engine/schedule/root.hpp"
#include "engine/torch/current_stream.hpp"

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
    : name(std::move(unit_name)),
      ranges(name),
      options(std::move(unit_options)),
      device(unit_device),
      groups(std::move(unit_groups)) {
  for (const auto& group : groups) group->unit = this;
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
    for (size_t j = 0; j < groups[i]->params.size(); ++j) groups[i]->params[j].rename(fqns.at(i).at(j));
  }
  name = new_name;
  ranges = RangeNames(name);
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

void Unit::begin_unshard() {
  if (param_state_ != ParamState::sharded || !has_params()) return;
  guard_.require("gather unit", name);
  const ProfileRange range(ranges.all_gather);
  set_params(ParamState::sharded, ParamState::gathering);
  size_t num_begun = 0;
  try {
    for (; num_begun < groups.size(); ++num_begun) groups[num_begun]->begin_gather();
  } catch (...) {
    for (size_t i = 0; i < num_begun; ++i) groups[i]->cancel_gather();
    param_state_ = ParamState::sharded;
    throw;
  }
}

void Unit::finish_unshard() {
  if (param_state_ != ParamState::gathering) return;
  const ProfileRange range(ranges.all_gather_copy_out);
  try {
    for (const auto& group : groups) group->finish_gather();
  } catch (...) {
    cancel_unshard();
    throw;
  }
  set_params(ParamState::gathering, ParamState::unsharded);
}

void Unit::unshard() {
  begin_unshard();
  finish_unshard();
}

void Unit::reshard() {
  if (param_state_ == ParamState::gathering) cancel_unshard();
  drop_post_forward();
  if (param_state_ != ParamState::unsharded) return;
  guard_.require("reshard unit", name);
  for (const auto& group : groups) group->free();
  set_params(ParamState::unsharded, ParamState::sharded);
}

void Unit::reshard_after_forward() {
  if (param_state_ != ParamState::unsharded) return reshard();
  for (const auto& group : groups) group->free_after_forward();
  set_params(ParamState::unsharded, ParamState::sharded);
}

void Unit::drop_post_forward() {
  if (param_state_ != ParamState::sharded) return;
  for (const auto& group : groups) group->drop_post_forward();
}

void Unit::cancel_unshard() {
  guard_.require("reshard unit", name);
  for (const auto& group : groups) group->cancel_gather();
  set_params(ParamState::gathering, ParamState::sharded);
}

void Unit::sweep_gradients() {
  for (const auto& group : groups) group->sweep_gradients();
}

void Unit::settle() {
  for (const auto& group : groups) group->transport->settle(*group);
}

size_t Unit::slot_bytes() const {
  size_t bytes = 0;
  for (const auto& group : groups) bytes += group->layout.slot_bytes();
  return bytes;
}

bool Unit::has_open_scratch() const {
  return std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group->scratch.open; });
}

void Unit::pre_backward() {
  root->begin_backward();
  if (phase_ == Phase::backward) return;
  guard_.require("run backward of unit", name);
  const ProfileRange range(ranges.pre_backward);
  phase_ = Phase::backward;
  backward_stream = current_stream(device);
  armed = true;
  if (options.unshard_in_backward) unshard();
  root->prefetch_backward(*this);
}

void Unit::post_backward() {
  phase_ = Phase::reduced;
  if (!has_params()) return;
  {
    const ProfileRange range(ranges.post_backward_reshard);
    sweep_gradients();
    if (options.reshard_after_backward) reshard();
  }
  if (!options.requires_gradient_sync || has_outstanding_calls()) return settle();
  if (!has_open_scratch()) return;
  const ProfileRange range(ranges.post_backward_reduce);
  root->reduce(*this);
}

void Unit::end_backward() {
  if (param_state_ == ParamState::gathering) cancel_unshard();
  phase_ = Phase::idle;
}

void Unit::abandon_forward(uint64_t number, size_t begin, bool interrupted) {
  if (armed && armed_in == number) armed = false;
  std::erase_if(forward_indices, [begin](size_t index) { return index >= begin; });
  if (interrupted) num_running = 0;
  if (num_running > 0) return;
  reshard();
  phase_ = Phase::idle;
}

void Unit::leave_forward() {
  if (phase_ != Phase::forward || num_running > 0) return;
  reshard();
  phase_ = Phase::idle;
}

void Unit::abandon_backward() {
  for (const auto& group : groups) group->abandon_backward();
  if (num_running > 0) return;
  reshard();
  phase_ = Phase::idle;
}

void Unit::reset() {
  guard_.require("reset unit", name);
  if (root) {
    for (const auto& group : groups) group->drop_gradients();
    reshard();
  }
  forward_indices.clear();
  armed = false;
  num_running = 0;
  phase_ = Phase::idle;
}

void Unit::forbid_all() {
  for (Unit* unit : live_units()) {
    if (unit->param_state_ != ParamState::unsharded) continue;
    for (const auto& group : unit->groups) {
      for (Param& param : group->params) param.forbid();
    }
  }
}

UnitMove::UnitMove(std::shared_ptr<Unit> unit) : unit_(std::move(unit)), state_(unit_->param_state()) {
  for (const auto& group : unit_->groups) {
    if (!group->holds_unreduced()) continue;
    throw Error("fsdp2x: unit '" + group->name +
                "' cannot change its transport: it holds gradients that are not reduced yet. End the step with a "
                "synchronised backward, or call reset_iter_state() on the root module.");
  }
  if (state_ == ParamState::unsharded) {
    const at::NoGradGuard no_grad;
    for (const auto& group : unit_->groups) {
      for (const Param& param : group->params) {
        if (param.has_storage()) before_.emplace_back(param.local(), param.local().detach().clone());
      }
    }
  }
  unit_->reshard();
}

void UnitMove::finish() {
  if (state_ == ParamState::sharded) return;
  unit_->begin_unshard();
  if (state_ == ParamState::gathering) return;
  unit_->finish_unshard();
  const at::NoGradGuard no_grad;
  for (const auto& [param, value] : before_) {
    if (!param.detach().equal(value)) param.detach().copy_(value);
  }
}

}  // namespace fsdp2x
