// Gradients that wait, as tensors.
#include "engine/schedule/waiting_gradients.hpp"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "engine/memory/device_copy.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

std::vector<at::Tensor>& show_packed(ParamGroup& group) {
  std::vector<at::Tensor>& shown = group.waiting().shown;
  if (group.gradient_state() != GradientState::packed || !shown.empty()) return shown;
  const at::NoGradGuard no_grad;
  shown = group.transport().take_packed(group);
  group.set_shown(!shown.empty());
  for (size_t i = 0; i < shown.size(); ++i) {
    if (shown[i].defined() && !group.params()[i].sharded().is_complex()) {
      shown[i] = shown[i].view(group.params()[i].local().sizes());
    }
  }
  return shown;
}

void add_to_shown(ParamGroup& group, size_t param, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  at::Tensor& sum = group.waiting().shown[param];
  if (sum.defined()) {
    sum.add_(gradient.reshape(sum.sizes()));
  } else {
    sum = gradient.to(torch_dtype(group.reduce_type()), /*non_blocking=*/false, /*copy=*/true);
  }
}

at::Tensor WaitingGradients::unreduced(ParamGroup& group, size_t param) {
  const std::vector<at::Tensor>& shown = show_packed(group);
  return shown.empty() ? at::Tensor() : shown[param];
}

at::Tensor WaitingGradients::partial_rows(ParamGroup& group, size_t param) {
  const std::unique_ptr<SegmentRows> held = group.transport().partial(group);
  SegmentRows* const rows = held ? held.get() : group.waiting().partial.get();
  return rows != nullptr && rows->has_gradient()[param] != 0 ? rows->rows(param) : at::Tensor();
}

void WaitingGradients::clear(Reductions& reductions, ParamGroup& group, const std::vector<bool>& which, bool drops) {
  const at::NoGradGuard no_grad;
  const bool is_whole = std::find(which.begin(), which.end(), false) == which.end();
  if (group.gradient_state() == GradientState::packed && drops && is_whole) reductions.drop_packed(group);
  std::vector<at::Tensor>& shown = show_packed(group);
  const std::unique_ptr<SegmentRows> held = group.transport().partial(group);
  SegmentRows* const rows = held ? held.get() : group.waiting().partial.get();
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
  if (!shown.empty() && std::none_of(shown.begin(), shown.end(), is_defined)) reductions.drop_packed(group);
  if (rows == nullptr) return;
  const std::vector<uint8_t> left = rows->has_gradient();
  if (std::none_of(left.begin(), left.end(), [](uint8_t one) { return one != 0; })) reductions.drop_partial(group);
}

void WaitingGradients::note_zeroed(ParamGroup& group) {
  group.note_zeroed();
  zeroed_ = true;
}

void WaitingGradients::warn_of_zeroed(const ScheduledUnits& units) {
  if (!std::exchange(zeroed_, false) || has_warned_) return;
  for (const auto& unit : units) {
    for (ScheduledGroup* const group : unit->scheduled_groups()) {
      if (!group->take_zeroed() || !group->holds_unreduced()) continue;
      has_warned_ = true;
      const std::string text =
          "fsdp2x: optimizer.zero_grad() did not clear gradients of unit '" + group->name() +
          "' that wait for their reduction, and the next reduction adds them. To drop them, call model.zero_grad(), or "
          "reset_iter_state() on the root module.";
      const pybind11::gil_scoped_acquire gil;
      if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw_python_error();
      return;
    }
  }
}

}  // namespace fsdp2x
