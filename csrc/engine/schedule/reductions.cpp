// Gradients on their way from autograd to `.grad`.
#include "engine/schedule/reductions.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/torch/profile_range.hpp"
#include "engine/torch/transforms.hpp"
#include "engine/transport/agreement.hpp"

namespace fsdp2x {

// --- in ---

void Reductions::make_room(ParamGroup& group, std::optional<size_t> param) {
  Transport& transport = group.transport();
  if (!transport.needs_room(group, param)) return;
  finish_pending();
  transport.make_room(group);
}

void Reductions::pack(Unit& unit, ParamGroup& group, size_t param, const at::Tensor& gradient) {
  if (group.is_posted()) finish(unit.shared_from_this(), group, /*flush=*/true);  // peers read what is packed
  group.record().parts.add(backward_number(), /*is_first=*/!group.is_open());
  if (!group.record().shown.empty()) return add_to_shown(group, param, gradient);
  make_room(group, param);
  if (!group.is_open()) group.set_gradient_state(GradientState::packed);
  group.transport().pack(group, param, gradient);
}

void Reductions::settle(Unit& unit) {
  for (const auto& group : unit.groups) {
    if (group->gradient_state() != GradientState::packed || !group->record().shown.empty()) continue;
    make_room(*group, std::nullopt);
    group->transport().settle(*group);
  }
}

bool Reductions::is_awaited(const Unit& unit, const ParamGroup& group) const {
  if (!reaches_all_ || !unit.armed || unit.has_outstanding_calls() || group.record().reduced_this_backward)
    return false;
  // Over shared memory a rank sees what the others have posted.
  return group.layout().world() > 1 && !group.transport().shared_group() && group.has_trainable();
}

void Reductions::post(const std::shared_ptr<Unit>& unit, ParamGroup& group, cpu::Forwards forwards) {
  const OutsideTransforms outside;
  ++commons_->counters.reductions;
  GradientRecord& record = group.record();
  record.parts.add(backward_number(), /*is_first=*/!group.is_open());
  pack_shown(group);
  make_room(group, std::nullopt);
  group.set_gradient_state(GradientState::posted);
  record.pending_flush = false;
  group.transport().begin_reduce(group, forwards);
  make_room(group, std::nullopt);  // beside it
  pending_.push_back({unit, &group});
}

// --- out ---

void Reductions::finish_pending() {
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (it->group->record().pending_flush || !finish(it->unit, *it->group, /*flush=*/false)) {
      ++it;
    } else {
      it = pending_.erase(it);
    }
  }
}

bool Reductions::finish(const std::shared_ptr<Unit>& unit, ParamGroup& group, bool flush) {
  if (!group.is_posted()) return true;
  const OutsideTransforms outside;
  GradientRecord& record = group.record();
  const bool holds_earlier = record.parts.backward != backward_number() || record.parts.holds_earlier;
  try {
    Transport::Finished finished = group.transport().finish_reduce(group, flush);
    record.pending_flush = finished.is_later;
    if (finished.is_later) return false;
    group.set_gradient_state(GradientState::none);
    record.reduced_this_backward = true;
    if (!finished.rows) return true;
    if (group.has_replicas() && !group.transport().has_streams()) {
      keep_partial(group, std::move(finished.rows));
    } else {
      attach(unit, group, std::move(finished.rows));
    }
    return true;
  } catch (...) {
    // The user's hooks run when the rows have left the transport: what they leave undone is nowhere any more.
    if (holds_earlier) lose(group);
    throw;
  }
}

void Reductions::attach(const std::shared_ptr<Unit>& unit, ParamGroup& group, std::unique_ptr<ReducedRows> rows) {
  pybind11::gil_scoped_acquire gil;
  if (group.calls().all_reduce_hook) rows->run_hook(group.calls().all_reduce_hook);
  if (group.offloads()) {
    land(group);  // of gradients that came in two parts
    land_oldest(group.transport());
    arriving_.push_back({unit, &group, rows->to_host()});
    return;
  }
  write(group, std::move(rows));
}

void Reductions::write(ParamGroup& group, std::unique_ptr<ReducedRows> rows) {
  Gradients& gradients = group.gradients();
  const std::vector<uint8_t> wanted = rows->wanted();
  GradientTargets targets(wanted.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (wanted[i]) targets[i] = gradients.prepare(i);
  }
  rows->write(targets);
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    gradients.attach(i, *targets[i]);
    run_hooks(group.params()[i]);
  }
  if (gradients.release_if_unused()) rows->note_block_given_back();
}

void Reductions::run_hooks(const Param& param) {
  const at::Tensor& sharded = param.sharded();
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded);
  if (!hook) return;
  try {
    (*hook)(sharded);
  } catch (python_error& error) {
    error.persist();  // out of the thread state: Python goes on
    if (!error_of_hook_) error_of_hook_ = std::current_exception();
  } catch (...) {
    if (!error_of_hook_) error_of_hook_ = std::current_exception();
  }
}

void Reductions::raise_error_of_hook() {
  if (error_of_hook_) std::rethrow_exception(std::exchange(error_of_hook_, nullptr));
}

// --- rows that the host has asked for ---

void Reductions::land(const ParamGroup& group) {
  const auto found = std::find_if(arriving_.begin(), arriving_.end(),
                                  [&group](const Arriving& arriving) { return arriving.group == &group; });
  if (found != arriving_.end()) land(found);
}

void Reductions::land_oldest(const Transport& transport) {
  const auto is_of = [&transport](const Arriving& arriving) { return &arriving.group->transport() == &transport; };
  const auto num = static_cast<size_t>(std::count_if(arriving_.begin(), arriving_.end(), is_of));
  if (num >= transport.max_reduce_buffers()) land(std::find_if(arriving_.begin(), arriving_.end(), is_of));
}

void Reductions::land(std::deque<Arriving>::iterator found) {
  Arriving arriving = std::move(*found);
  arriving_.erase(found);
  pybind11::gil_scoped_acquire gil;
  write(*arriving.group, std::move(arriving.rows));
}

// --- replicas, where the transport leaves them to the root ---

void Reductions::keep_partial(ParamGroup& group, std::unique_ptr<ReducedRows> rows) {
  GradientRecord& record = group.record();
  std::unique_ptr<SegmentRows> segment(rows.release()->segment());
  if (record.partial && !record.partial->add(*segment)) throw_frozen_while_partial(group);
  record.partial_parts.add(backward_number(), /*is_first=*/!record.partial);
  if (record.parts.holds_earlier) record.partial_parts.holds_earlier = true;
  if (!record.partial) record.partial = std::move(segment);  // the user may hold what there was
}

void Reductions::all_reduce(const std::shared_ptr<Unit>& unit, ParamGroup& group) {
  const OutsideTransforms outside;
  GradientRecord& record = group.record();
  std::unique_ptr<SegmentRows> rows = std::move(record.partial);
  if (!rows) {  // no gradient here, but other replicas may have some
    const double divisor = group.averages() ? 1.0 : group.divisor() / group.pre_divisor();
    rows = SegmentRows::zeros(group.transport().segment_layout(group), group.reduce_type(), divisor);
  }
  const Parts parts = std::exchange(record.partial_parts, Parts());
  record.was_zeroed = false;
  try {
    agree_on_replicas(group, rows->values().nbytes(), group.reduce_type());
    {
      pybind11::gil_scoped_acquire gil;
      const PyRef values = PyRef::steal(THPVariable_Wrap(rows->values()));
      const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(group.calls().all_reduce.get(), values.get(),
                                                                   group.averages() ? Py_True : Py_False, nullptr));
      if (!done) throw_collective_error(group, group.calls().explain_all_reduce, "all-reduce");
      ++commons_->counters.python_calls;
    }
    attach(unit, group, std::move(rows));
  } catch (...) {
    if (parts.backward != backward_number() || parts.holds_earlier) lose(group);
    throw;
  }
}

// --- what the user looks at while it waits ---

std::vector<at::Tensor>& Reductions::show(ParamGroup& group) {
  std::vector<at::Tensor>& shown = group.record().shown;
  if (group.gradient_state() != GradientState::packed || !shown.empty()) return shown;
  const at::NoGradGuard no_grad;
  shown = group.transport().take_packed(group);
  for (size_t i = 0; i < shown.size(); ++i) {
    if (shown[i].defined() && !group.params()[i].sharded().is_complex()) {
      shown[i] = shown[i].view(group.params()[i].local().sizes());
    }
  }
  return shown;
}

void Reductions::add_to_shown(ParamGroup& group, size_t param, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  at::Tensor& sum = group.record().shown[param];
  if (sum.defined()) {
    sum.add_(gradient.reshape(sum.sizes()));
  } else {
    sum = gradient.to(torch_dtype(group.reduce_type()), /*non_blocking=*/false, /*copy=*/true);
  }
}

void Reductions::pack_shown(ParamGroup& group) {
  const std::vector<at::Tensor> shown = std::exchange(group.record().shown, {});
  for (size_t i = 0; i < shown.size(); ++i) {
    if (!shown[i].defined()) continue;
    make_room(group, i);
    group.transport().pack(group, i, shown[i]);
  }
}

at::Tensor Reductions::unreduced(ParamGroup& group, size_t param) {
  const std::vector<at::Tensor>& shown = show(group);
  return shown.empty() ? at::Tensor() : shown[param];
}

at::Tensor Reductions::partial_rows(ParamGroup& group, size_t param) {
  const std::unique_ptr<SegmentRows> held = group.transport().partial(group);
  SegmentRows* const rows = held ? held.get() : group.record().partial.get();
  return rows != nullptr && rows->wanted()[param] != 0 ? rows->rows(param) : at::Tensor();
}

void Reductions::clear(Unit& unit, ParamGroup& group, const std::vector<bool>& which, bool drops) {
  const at::NoGradGuard no_grad;
  const bool is_whole = std::find(which.begin(), which.end(), false) == which.end();
  if (group.gradient_state() == GradientState::packed && drops && is_whole) unit.drop_packed(group);
  std::vector<at::Tensor>& shown = show(group);
  const std::unique_ptr<SegmentRows> held = group.transport().partial(group);
  SegmentRows* const rows = held ? held.get() : group.record().partial.get();
  for (size_t i = 0; i < which.size(); ++i) {
    if (!which[i]) continue;
    if (rows != nullptr) rows->clear(i, drops);
    if (shown.empty() || !shown[i].defined()) continue;
    if (drops) {
      shown[i] = at::Tensor();
    } else {
      shown[i].zero_();
    }
  }
  const auto is_defined = [](const at::Tensor& one) { return one.defined(); };
  if (!shown.empty() && std::none_of(shown.begin(), shown.end(), is_defined)) unit.drop_packed(group);
  if (rows == nullptr) return;
  const std::vector<uint8_t> left = rows->wanted();
  if (std::none_of(left.begin(), left.end(), [](uint8_t one) { return one != 0; })) unit.drop_partial(group);
}

void Reductions::note_zeroed(ParamGroup& group) {
  group.record().was_zeroed = true;
  zeroed_ = true;
}

void Reductions::warn_of_zeroed(const std::vector<std::shared_ptr<Unit>>& units) {
  if (!std::exchange(zeroed_, false) || has_warned_) return;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      if (!std::exchange(group->record().was_zeroed, false) || !group->holds_unreduced()) continue;
      has_warned_ = true;
      const std::string text =
          "fsdp2x: optimizer.zero_grad() has left gradients of unit '" + group->name() +
          "' that wait for their reduction, and the next one adds them. To drop them, call model.zero_grad(), or "
          "reset_iter_state() on the root module.";
      const pybind11::gil_scoped_acquire gil;
      if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw_python_error();
      return;
    }
  }
}

// --- the end of a backward ---

void Reductions::flush(const std::vector<std::shared_ptr<Unit>>& units, cpu::Forwards forwards) {
  // Units whose post-backward node never ran (inputs without gradient), whose calls are still outstanding, or that got
  // gradients after their reduction.
  for (auto it = units.rbegin(); it != units.rend(); ++it) {
    if (!(*it)->options.requires_gradient_sync) continue;
    for (const auto& group : (*it)->groups) {
      if (group->is_posted()) continue;
      const bool is_asked_for = is_awaited(**it, *group) || (!group->record().reduced_this_backward &&
                                                             group->transport().needs_empty_reduction(*group));
      if (!group->is_open() && !is_asked_for) {
        if (!group->record().reduced_this_backward) group->transport().skip_reduce(*group);
        continue;
      }
      const ProfileRange range((*it)->ranges.post_backward_reduce);
      post(*it, *group, forwards);
    }
  }
  while (!pending_.empty()) {
    finish(pending_.front().unit, *pending_.front().group, /*flush=*/true);
    pending_.pop_front();
  }
  for (auto it = units.rbegin(); it != units.rend(); ++it) {
    const UnitOptions& options = (*it)->options;
    if (!options.requires_gradient_sync || !options.requires_all_reduce) continue;
    for (const auto& group : (*it)->groups) {
      if (group->transport().has_streams() || !group->has_replicas()) continue;
      if ((*it)->armed || group->record().partial) all_reduce(*it, *group);
    }
  }
  for (const auto& unit : units) {
    if (unit->options.requires_gradient_sync) unit->armed = false;
    for (const auto& group : unit->groups) group->record().reduced_this_backward = false;
  }
  while (!arriving_.empty()) land(arriving_.begin());
}

// --- what an exception leaves ---

void Reductions::forget_pending() {
  // Of a manual finalization, reductions of earlier backwards go on.
  std::erase_if(pending_,
                [this](const Pending& pending) { return pending.group->record().parts.backward == backward_number(); });
}

void Reductions::abandon(Unit& unit) {
  const OutsideTransforms outside;
  for (const auto& group : unit.groups) {
    GradientRecord& record = group->record();
    if (record.parts.backward == backward_number()) {
      const bool was_there = unit.drop_packed(*group);
      const size_t num_arriving =
          std::erase_if(arriving_, [&group](const Arriving& arriving) { return arriving.group == group.get(); });
      if ((was_there || num_arriving > 0) && record.parts.holds_earlier) lose(*group);
    }
    if (record.partial_parts.backward == backward_number()) {
      if (record.partial_parts.holds_earlier) lose(*group);
      unit.drop_partial(*group);
    }
    record.reduced_this_backward = false;
    group->drop_unpacked();
  }
}

void Reductions::reset() {
  lost_.clear();
  error_of_hook_ = nullptr;
  pending_.clear();
  arriving_.clear();
}

void Reductions::lose(const ParamGroup& group) { lost_ += (lost_.empty() ? "'" : ", '") + group.name() + "'"; }

void Reductions::refuse_after_loss() const {
  if (lost_.empty()) return;
  throw Error(
      "fsdp2x: a backward raised while unit " + lost_ +
      " held gradients of earlier backwards (accumulated without gradient sync or all-reduce): they were in one "
      "sum with gradients of the backward that failed, and are gone. Call reset_iter_state() on the root "
      "module and begin the step again.");
}

}  // namespace fsdp2x
