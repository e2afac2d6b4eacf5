// A unit: its groups, whether it may still be used, and its move to another root.
#include "engine/schedule/unit.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <set>

#include "core/error.hpp"
#include "engine/schedule/root.hpp"

namespace fsdp2x {

namespace {

std::set<Unit*>& live_units(const Gil& /*gil*/) {
  static std::set<Unit*> units;
  return units;
}

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

Unit::Unit(std::string unit_name, at::Device unit_device, std::vector<std::shared_ptr<ParamGroup>> unit_groups,
           const std::shared_ptr<UnitOptions>& unit_options)
    : UnitFacts(std::move(unit_name), unit_options), device(unit_device) {
  set_groups(std::move(unit_groups));
  live_units(Gil::of_caller()).insert(this);
}

Unit::~Unit() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  live_units(gil).erase(this);
  try {
    if (guard_.is_here()) reset();
  } catch (const std::exception&) {
    // A peer is gone or the interpreter is shutting down. The memory goes with the process.
  }
  groups.clear();
}

void Unit::rename(const std::string& new_name, const std::vector<std::vector<std::string>>& fqns) {
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < groups[i]->params().size(); ++j) groups[i]->params()[j].rename(fqns.at(i).at(j));
  }
  set_name(new_name);
  ranges = RangeNames(new_name);
  name_groups();
}

void Unit::set_groups(std::vector<std::shared_ptr<ParamGroup>> new_groups) {
  std::vector<ScheduledGroup*> scheduled;
  for (const auto& group : new_groups) scheduled.push_back(group.get());
  set_scheduled_groups(std::move(scheduled));
  groups = std::move(new_groups);
  for (const auto& group : groups) group->set_unit(this);
  name_groups();
}

void Unit::name_groups() {
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i]->rename(i == 0 ? name() : name() + " (mesh " + std::to_string(i) + ")");
  }
}

void Unit::begin_unshard() { root->schedule().begin_unshard(*this); }

void Unit::finish_unshard() { root->schedule().finish_unshard(*this); }

void Unit::reshard() {
  if (root) root->schedule().reshard(*this);
}

void Unit::reset() {
  if (root) root->schedule().reset(*this);
}

std::vector<std::shared_ptr<Unit>> Unit::live(const Gil& gil) {
  std::vector<std::shared_ptr<Unit>> all;
  for (Unit* const unit : live_units(gil)) {
    if (auto held = unit->weak_from_this().lock()) all.push_back(std::static_pointer_cast<Unit>(std::move(held)));
  }
  return all;
}

bool Unit::has_replaced_shards(const Gil& gil) const {
  return std::any_of(groups.begin(), groups.end(),
                     [&gil](const auto& group) { return group->has_replaced_shards(gil); });
}

const Param* Unit::take_lost() {
  const Param* lost = nullptr;
  for (const auto& group : groups) {
    if (const Param* const found = group->take_lost()) lost = found;
  }
  return lost;
}

void Unit::retire() {
  reset();
  is_retired_ = true;
}

void Unit::require_params() const {
  if (!is_retired_) return;
  throw Error("fsdp2x: backward reached unit '" + name() +
              "', whose parameters have changed their dtype or device since this forward. Run forward again.");
}

std::vector<std::shared_ptr<ParamGroup>> Unit::live_groups(const Gil& gil) {
  std::vector<std::shared_ptr<ParamGroup>> all;
  for (const Unit* unit : live_units(gil)) all.insert(all.end(), unit->groups.begin(), unit->groups.end());
  return all;
}

void Unit::forbid_all(const Gil& gil) {
  for (const Unit* unit : live_units(gil)) {
    if (unit->param_state() != ParamState::unsharded) continue;
    for (const auto& group : unit->groups) {
      for (Param& param : group->params()) param.forbid();
    }
  }
}

// --- between two roots ---

UnitMove::UnitMove(std::shared_ptr<Unit> unit) : unit_(std::move(unit)), state_(unit_->param_state()) {
  for (const auto& group : unit_->groups) {
    if (!group->holds_unreduced()) continue;
    throw Error("fsdp2x: unit '" + group->name() +
                "' cannot change its transport, because it holds unreduced gradients. End the step with a "
                "synchronized backward, or call reset_iter_state() on the root module.");
  }
  if (state_ == ParamState::unsharded) {
    const at::NoGradGuard no_grad;
    for (const auto& group : unit_->groups) {
      for (const Param& param : group->params()) {
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
