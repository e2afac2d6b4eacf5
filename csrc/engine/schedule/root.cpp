// Entry points for autograd, hooks, and users.
#include "engine/schedule/root.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "engine/params/gradient_stream.hpp"
#include "engine/torch/profile_range.hpp"

namespace fsdp2x {

void Root::add_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<Transport>>& transports) {
  unit->root = shared_from_this();
  schedule_.add_unit(unit);
  for (size_t i = 0; i < unit->groups.size(); ++i) {
    if (unit->groups[i]->has_joined()) unit->groups[i]->transport().give_back_shards(*unit->groups[i]);
    unit->groups[i]->join(transports.at(i), effects_.commons());
    effects_.add_transport(transports[i]);
    transports[i]->register_group(unit->groups[i]);
    TensorEffects::set_facts(*unit->groups[i], /*may_overlap=*/false);  // asked when a forward begins
    if (transports[i]->is_synchronous()) {
      schedule_.set_synchronous();
      blocks().keep_nothing();
    }
  }
}

void Root::add_post_forward(const ParamGroup& group, const std::shared_ptr<Transport>& transport) {
  group.post_forward()->join(transport, effects_.commons());
  effects_.add_transport(transport);
  transport->register_group(group.post_forward());
}

TransportStats Root::transport_stats() const {
  TransportStats sums;
  for (const auto& transport : transports()) sums += transport->stats();
  return sums;
}

std::vector<std::shared_ptr<Unit>> Root::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  for (auto& unit : schedule_.units()) alive.push_back(std::static_pointer_cast<Unit>(std::move(unit)));
  return alive;
}

bool Root::has_replaced_shards(const Gil& gil) const {
  const auto alive = schedule_.units();
  return std::any_of(alive.begin(), alive.end(),
                     [&gil](const auto& unit) { return static_cast<const Unit&>(*unit).has_replaced_shards(gil); });
}

void Root::note_thread() {
  if (!schedule_.in_forward()) forward_thread_ = std::this_thread::get_id();
}

void Root::fail_forward(const std::string& why) {
  effects_.leave_pass(why);
  schedule_.abandon_forward(/*interrupted=*/false);
}

void Root::pre_backward(Unit& unit, bool reads) {
  unit.require_params();
  schedule_.pre_backward(unit, reads);
}

void Root::take_gradient(Unit& unit, ParamGroup& group, size_t param) {
  if (unit.packs_late) return schedule_.begin_backward();
  const GradientStream scope(unit.backward_stream, group.params()[param]);
  schedule_.gradient_ready(unit, group, param);
}

void Root::end_backward() {
  static const std::string name = "FSDP::root_post_backward_callback";
  const ProfileRange callback(name);
  schedule_.end_backward();
  if (!settings_->manual_finalization) effects_.raise_error_of_hook();
}

void Root::leave_pass(const std::string& why) noexcept { effects_.leave_pass(why); }

void Root::finalize_backward() {
  schedule_.finalize_backward();
  effects_.raise_error_of_hook();
}

void Root::finish_held_backwards() {
  schedule_.finish_held_backwards();
  effects_.raise_error_of_hook();
}

void Root::synchronize_gradients(const std::vector<std::shared_ptr<Unit>>& units) {
  schedule_.synchronize_gradients({units.begin(), units.end()});
  effects_.raise_error_of_hook();
}

WaitingGradients& Root::waiting() {
  schedule_.settle_raised_backward();
  return effects_.waiting();
}

void Root::reset() {
  schedule_.reset();
  effects_.forget_error_of_hook();
}

void Root::release_idle() {
  TensorEffects::release_unused_gradients(schedule_.units());
  for (const auto& transport : transports()) transport->release_idle();
  blocks().clear();
}

void Root::release_gradients(const Gil& gil) {
  // An optimizer on another stream may still read the gradients.
  if (schedule_.in_forward() || schedule_.in_backward() || settings_->post_optimizer_event) return;
  bool has_released = false;
  for (const auto& unit : units()) {
    if (unit->backward_stream != current_stream(unit->device)) continue;
    for (const auto& group : unit->groups) {
      if (!group->transport().frees_gradients(*group)) continue;
      has_released = group->gradients().release_if_unused(gil) || has_released;
    }
  }
  if (has_released) blocks().end_loans();
}

}  // namespace fsdp2x
