// What the units below one root module share.
#include "engine/schedule/root.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "engine/params/gradient_stream.hpp"
#include "engine/torch/profile_range.hpp"
#include "engine/torch/transforms.hpp"
#include "engine/transport/agreement.hpp"

namespace fsdp2x {

namespace {

// Positions of one backward lie below those of the next: they only grow over the life of a group.
constexpr int kPositionBits = 24;

}  // namespace

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

Backward::~Backward() {
  const auto root = root_.lock();
  if (root && root->backward_has_raised()) root->leave_backward();
}

void Root::add_transport(const std::shared_ptr<Transport>& transport) {
  if (std::find(transports_.begin(), transports_.end(), transport) != transports_.end()) return;
  transports_.push_back(transport);
  if (auto shared = transport->shared_group()) shared_groups_.push_back(std::move(shared));
}

void Root::add_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<Transport>>& transports) {
  unit->root = shared_from_this();
  units_.push_back(unit);
  for (size_t i = 0; i < unit->groups.size(); ++i) {
    if (unit->groups[i]->has_joined()) unit->groups[i]->transport().give_back_shards(*unit->groups[i]);
    unit->groups[i]->join(transports.at(i), reductions_.commons());
    add_transport(transports[i]);
    transports[i]->register_group(unit->groups[i]);
    if (transports[i]->is_frugal()) {
      is_frugal_ = true;
      blocks().keep_nothing();
    }
  }
}

void Root::add_post_forward(const ParamGroup& group, const std::shared_ptr<Transport>& transport) {
  group.post_forward()->join(transport, reductions_.commons());
  add_transport(transport);
  transport->register_group(group.post_forward());
}

void Root::add_replicas(const std::shared_ptr<cpu::ShmGroup>& group) {
  if (std::find(shared_groups_.begin(), shared_groups_.end(), group) == shared_groups_.end()) {
    shared_groups_.push_back(group);
  }
}

void Root::add_agreement(const std::shared_ptr<Agreement>& agreement) {
  if (std::find(agreements_.begin(), agreements_.end(), agreement) == agreements_.end()) {
    agreements_.push_back(agreement);
  }
}

void Root::begin_pass(PassKind kind) {
  Commons& commons = *reductions_.commons();
  if (commons.has_stepped.exchange(false)) odd_steps_ = !odd_steps_;
  commons.pass = {kind, this, ++num_passes_, odd_steps_};
}

void Root::end_pass() {
  reductions_.commons()->pass = Pass();
  for (const auto& shared : shared_groups_) shared->end_pass();
}

void Root::leave_pass(const std::string& why) noexcept {
  for (const auto& shared : shared_groups_) shared->leave(why);
  for (const auto& agreement : agreements_) agreement->leave(reductions_.commons()->pass, why);
}

std::vector<std::shared_ptr<Unit>> Root::units() const {
  std::vector<std::shared_ptr<Unit>> alive;
  alive.reserve(units_.size());
  for (const auto& weak : units_) {
    if (auto unit = weak.lock()) alive.push_back(std::move(unit));
  }
  return alive;
}

bool Root::has_replaced_shards() const {
  const auto alive = units();
  return std::any_of(alive.begin(), alive.end(), [](const auto& unit) { return unit->has_replaced_shards(); });
}

// --- parameters ---

void Root::begin_unshard(Unit& unit) {
  if (const Param* const lost = unit.take_lost()) Unit::refuse_lost(*lost, units());
  unit.begin_unshard(/*pools_stand_still=*/in_forward() || in_backward());
}

void Root::finish_unshard(Unit& unit) {
  if (unit.param_state() != ParamState::gathering) return;
  unit.finish_unshard();
  for (const auto& group : unit.groups) listen(unit, *group);
}

void Root::unshard(Unit& unit) {
  begin_unshard(unit);
  finish_unshard(unit);
}

void Root::listen(Unit& unit, ParamGroup& group) {
  const std::optional<c10::Stream> current = current_stream(group.device());
  for (size_t i = 0; i < group.params().size(); ++i) {
    Param& param = group.params()[i];
    if (!param.unsharded().requires_grad()) continue;
    // An accumulator belongs to the stream it was made on. A model that has moved to another one gets a new one, unless
    // a graph that lives has this one, and with it our hook.
    if (param.accumulator) {
      if (!current || param.accumulator->input_metadata(0).stream() == *current) continue;
      if (param.accumulator.use_count() > 1) continue;
    }
    const OutsideTransforms outside;
    const pybind11::gil_scoped_acquire gil;
    param.accumulator = nullptr;
    param.accumulator = torch::autograd::impl::grad_accumulator(param.unsharded());
    auto hook = [weak = unit.weak_from_this(), &group, i](const torch::autograd::variable_list& outputs,
                                                          const torch::autograd::variable_list&) {
      if (const auto owner = weak.lock()) owner->root->take_gradient(*owner, group, i);
      return outputs;
    };
    param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook)));
  }
}

// --- forward ---

void Root::begin_forward(Unit* unit) {
  const bool recomputes = inside_backward();  // a checkpoint, the whole model
  if (!recomputes && at::GradMode::is_enabled()) reductions_.refuse_after_loss();
  forward_root_ = unit;
  forward_thread_ = std::this_thread::get_id();
  this_sequence_.clear();
  sequence_cursor_ = 0;
  if (recomputes) return;
  ++num_forwards_;
  forward_has_grad_ = at::GradMode::is_enabled();
  begin_pass(forward_has_grad_ ? PassKind::forward : PassKind::evaluation);
  if (forward_has_grad_) ++forwards_.num_begun;
  const auto alive = units();
  if (forward_has_grad_) reductions_.warn_of_zeroed(alive);
  const bool outstanding =
      std::any_of(alive.begin(), alive.end(), [](const auto& other) { return other->has_outstanding_calls(); });
  if (!outstanding) {
    forward_order_.clear();
    num_entries_ = 0;
    for (const auto& other : alive) other->forward_indices.clear();
  }
  forward_begin_ = forward_order_.size();
  forward_is_alone_ = forward_has_grad_ && !outstanding;
  for (const auto& shared : shared_groups_) shared->enter_forward(num_forwards_);
  release_unused_gradients();
  const PyRef after = std::exchange(post_optimizer_event, PyRef());
  for (const auto& transport : transports_) transport->begin_forward(after);
  // An optimizer on a stream of its own may still read gradients: then their memory serves this step's reductions,
  // which come behind it, and nobody else.
  if (!after) blocks().end_loans();
}

void Root::end_forward() {
  forward_root_ = nullptr;
  last_sequence_.swap(this_sequence_);
  if (inside_backward()) return;
  for (const auto& unit : units()) {
    if (unit->param_state() == ParamState::gathering) unit->cancel_unshard();
  }
  for (const auto& transport : transports_) transport->end_forward();
  end_pass();
}

bool Root::is_forward_thread() const { return forward_thread_ == std::this_thread::get_id(); }

void Root::abandon_forward(bool interrupted, const std::string& why) {
  if (!why.empty()) leave_pass(why);
  end_pass();
  // A backward that comes all the same waits for ranks that left this forward, too.
  forward_is_alone_ = false;
  if (forward_has_grad_) ++forwards_.num_raised;
  forward_root_ = nullptr;
  this_sequence_.clear();
  forward_order_.resize(std::min(forward_order_.size(), forward_begin_));
  for (const auto& unit : units()) unit->abandon_forward(num_forwards_, forward_begin_, interrupted);
  for (const auto& transport : transports_) transport->end_forward();
}

void Root::prefetch_forward(Unit& unit) {
  if (!unit.forward_prefetch.empty()) {
    for (const auto& weak : unit.forward_prefetch) {
      if (auto target = weak.lock(); target && target->param_state() == ParamState::sharded) {
        // A checkpoint recomputes units one by one, and the backward of the next one is over.
        if (inside_backward() && target->phase() == Phase::reduced) continue;
        if (!inside_backward()) target->drop_post_forward();
        const ProfileRange range(target->ranges.forward_prefetch);
        prefetch(*target);
      }
    }
    return;
  }
  if (inside_backward() || is_frugal_) return;
  this_sequence_.push_back(unit.weak_from_this());
  const auto is_unit = [&unit](const std::weak_ptr<Unit>& weak) { return weak.lock().get() == &unit; };
  const auto found = std::find_if(last_sequence_.begin() + static_cast<std::ptrdiff_t>(sequence_cursor_),
                                  last_sequence_.end(), is_unit);
  if (found == last_sequence_.end()) {
    sequence_cursor_ = last_sequence_.size();  // another order than last time: no guess is better than a wrong one
    return;
  }
  sequence_cursor_ = static_cast<size_t>(found - last_sequence_.begin()) + 1;
  if (sequence_cursor_ == last_sequence_.size()) return;
  const auto next = last_sequence_[sequence_cursor_].lock();
  if (next && next->param_state() == ParamState::sharded && next->has_params()) {
    next->drop_post_forward();
    const ProfileRange range(next->ranges.forward_prefetch);
    prefetch(*next);
  }
}

void Root::record_forward(Unit& unit) {
  unit.forward_indices.push_back(forward_order_.size());
  forward_order_.push_back(unit.weak_from_this());
}

// --- backward ---

void Root::pre_backward(Unit& unit) {
  unit.require_params();
  begin_backward();
  if (unit.phase() == Phase::backward) return;
  guard_.require("run backward of unit", unit.name);
  const ProfileRange range(unit.ranges.pre_backward);
  unit.set_phase(Phase::backward);
  unit.backward_stream = current_stream(unit.device);
  unit.armed = true;
  if (unit.options.unshard_in_backward) unshard(unit);
  prefetch_backward(unit);
}

void Root::take_gradient(Unit& unit, ParamGroup& group, size_t param) {
  if (unit.packs_late) return begin_backward();
  const GradientStream scope(unit.backward_stream, group.params()[param]);
  pack_gradient(unit, group, param);
}

void Root::pack_gradient(Unit& unit, ParamGroup& group, size_t param) {
  at::Tensor gradient = group.take_gradient(param);
  if (!gradient.defined()) return;
  const OutsideTransforms outside;
  begin_backward();
  reductions_.pack(unit, group, param, group.packable(std::move(gradient), param));
}

void Root::sweep_gradients(Unit& unit) {
  for (const auto& group : unit.groups) {
    for (size_t i = 0; i < group->params().size(); ++i) pack_gradient(unit, *group, i);
  }
}

void Root::post_backward(Unit& unit) {
  unit.set_phase(Phase::reduced);
  if (!unit.has_params()) return;
  {
    const ProfileRange range(unit.ranges.post_backward_reshard);
    sweep_gradients(unit);
    if (unit.options.reshard_after_backward) unit.reshard();
  }
  if (!unit.options.requires_gradient_sync || unit.has_outstanding_calls()) return reductions_.settle(unit);
  if (std::none_of(unit.groups.begin(), unit.groups.end(), [&](auto& group) { return is_due(unit, *group); })) return;
  const ProfileRange range(unit.ranges.post_backward_reduce);
  reduce(unit);
}

bool Root::is_due(const Unit& unit, const ParamGroup& group) const {
  if (group.is_open()) return true;
  if (manual_finalization || !reductions_.is_awaited(unit, group)) return false;
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return std::none_of(group.params().begin(), group.params().end(), [nodes](const Param& param) {
    return param.accumulator && nodes->contains(param.accumulator.get());  // its gradient is still to come
  });
}

void Root::reduce(Unit& unit) {
  // The unit before had a whole unit's backward to reach all ranks: finish it now, so that its gradients are attached
  // (and an optimizer in its hooks runs) before the next ones are on their way.
  reductions_.finish_pending();
  publish(unit.backward_position);
  for (const auto& group : unit.groups) {
    if (is_due(unit, *group)) reductions_.post(unit.shared_from_this(), *group, forwards_);
  }
  if (is_frugal_) reductions_.finish_pending();
}

void Root::begin_backward() {
  if (in_backward() || !inside_backward()) return;
  if (callback_queued_) abandon_backward();
  reductions_.refuse_after_loss();
  reductions_.warn_of_zeroed(units());
  callback_queued_ = true;
  // torch.autograd.grad names what it computes, and so does backward(inputs=...).
  reductions_.begin_backward(/*reaches_all=*/torch::autograd::get_current_graph_task_exec_info()->empty());
  begin_pass(PassKind::backward);
  const auto task = std::make_shared<const Backward>(weak_from_this());
  callback_ = task;
  for (const auto& shared : shared_groups_) shared->enter_backward(reductions_.backward_number(), forward_is_alone_);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = weak_from_this(), task] {
    if (auto root = weak.lock()) root->end_backward();
  });
}

void Root::drop_raised_reductions() {
  if (backward_has_raised()) reductions_.forget_pending();
}

void Root::leave_backward() noexcept { leave_pass("left its backward, which raised: its own output says why"); }

void Root::abandon_backward() {
  drop_raised_reductions();
  reductions_.forget_error_of_hook();
  for (const auto& unit : units()) {
    reductions_.abandon(*unit);
    unit->abandon_backward();
  }
  const auto root_unit = std::find_if(units_.begin(), units_.end(), [this](const std::weak_ptr<Unit>& weak) {
    const auto unit = weak.lock();
    return unit && unit.get() == forward_root_ && unit->num_running > 0;
  });
  if (root_unit == units_.end()) forward_root_ = nullptr;
  reductions_.commons()->pass = Pass();
  callback_queued_ = false;
  reductions_.end_backward();
}

void Root::prefetch(Unit& target) {
  ++counters().prefetched_gathers;
  begin_unshard(target);
}

void Root::prefetch_backward(Unit& unit) {
  size_t index = 0;
  if (!unit.forward_indices.empty()) {
    index = unit.forward_indices.back();
    unit.forward_indices.pop_back();
    if (index > forward_order_.size()) index = 0;
  }
  if (!unit.backward_prefetch.empty()) {
    for (const auto& weak : unit.backward_prefetch) {
      if (auto target = weak.lock(); target && target->param_state() == ParamState::sharded) {
        const ProfileRange range(target->ranges.backward_prefetch);
        prefetch(*target);
      }
    }
    return;
  }
  if (index == 0) return;
  const std::shared_ptr<Unit> before = forward_order_[index - 1].lock();
  if (before && before.get() != &unit && before->has_params() && before->options.unshard_in_backward &&
      before->phase() != Phase::reduced && before->param_state() == ParamState::sharded) {
    const ProfileRange range(before->ranges.backward_prefetch);
    prefetch(*before);
  }
}

std::optional<uint64_t> Root::enter() {
  if (inside_backward()) return std::nullopt;
  return num_entries_++;
}

uint64_t Root::backward_position(std::optional<uint64_t> entry) const {
  if (!entry) return progress_ + 1;
  constexpr uint64_t kMaxEntries = (uint64_t{1} << kPositionBits) - 1;
  return ((reductions_.backward_number() - 1) << kPositionBits) + kMaxEntries - std::min(*entry, kMaxEntries);
}

void Root::publish(uint64_t position) {
  if (position <= progress_) return;
  progress_ = position;
  for (const auto& transport : transports_) transport->publish_progress(position);
}

void Root::end_backward() {
  static const std::string name = "FSDP::root_post_backward_callback";
  const ProfileRange callback(name);
  const auto alive = units();
  publish(reductions_.backward_number() << kPositionBits);
  for (auto it = alive.rbegin(); it != alive.rend(); ++it) {
    // Of a unit whose inputs need no gradient: its post-backward node never ran.
    std::optional<ProfileRange> range;
    if ((*it)->phase() == Phase::backward && (*it)->has_params()) range.emplace((*it)->ranges.post_backward_reshard);
    sweep_gradients(**it);
    if (!(*it)->options.requires_gradient_sync || manual_finalization) reductions_.settle(**it);
    if ((*it)->options.reshard_after_backward) (*it)->reshard();
  }
  if (!manual_finalization) flush(alive);
  for (const auto& unit : alive) unit->end_backward();
  callback_queued_ = false;
  reductions_.end_backward();
  end_pass();
  if (is_last_backward) forget_forward_order();
  if (!manual_finalization) reductions_.raise_error_of_hook();
}

void Root::forget_forward_order() {
  forward_order_.clear();
  for (const auto& unit : units()) unit->forward_indices.clear();
}

void Root::finalize_backward() {
  if (backward_has_raised()) abandon_backward();
  reductions_.refuse_after_loss();
  for (const auto& unit : units()) {
    sweep_gradients(*unit);  // of schedules that assign weight gradients by themselves (zero bubble)
    if (unit->options.reshard_after_backward) unit->reshard();
  }
  flush(units());
  if (is_last_backward) forget_forward_order();
  finalized_ = reductions_.backward_number();
  reductions_.raise_error_of_hook();
}

void Root::finish_held_backwards() {
  if (finalized_ != reductions_.backward_number()) finalize_backward();
}

void Root::synchronize_gradients(const std::vector<std::shared_ptr<Unit>>& units) {
  waiting().refuse_after_loss();
  for (const auto& unit : units) sweep_gradients(*unit);
  flush(units);
  reductions_.raise_error_of_hook();
}

Reductions& Root::waiting() {
  if (backward_has_raised()) abandon_backward();
  return reductions_;
}

void Root::flush(const std::vector<std::shared_ptr<Unit>>& units) {
  reductions_.flush(units, forwards_);
  for (const auto& transport : transports_) transport->end_backward();
  blocks().end_loans();
}

void Root::reset() {
  for (const auto& unit : units()) unit->reset();
  reductions_.reset();
  forward_order_.clear();
  this_sequence_.clear();
  last_sequence_.clear();
  forward_root_ = nullptr;
  callback_queued_ = false;
  reductions_.end_backward();
  end_pass();
}

void Root::release_idle() {
  release_unused_gradients();
  for (const auto& transport : transports_) transport->release_idle();
  blocks().clear();
}

void Root::release_unused_gradients() {
  pybind11::gil_scoped_acquire gil;
  for (const auto& unit : units()) {
    for (const auto& group : unit->groups) group->gradients().release_if_unused();
  }
}

}  // namespace fsdp2x
