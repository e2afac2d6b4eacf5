// A unit between two roots.
#include "engine/schedule/unit_move.hpp"

#include "core/error.hpp"
#include "engine/schedule/root.hpp"

namespace fsdp2x {

UnitMove::UnitMove(std::shared_ptr<Unit> unit) : unit_(std::move(unit)), state_(unit_->param_state()) {
  for (const auto& group : unit_->groups) {
    if (!group->holds_unreduced()) continue;
    throw Error("fsdp2x: unit '" + group->name() +
                "' cannot change its transport: it holds gradients that are not reduced yet. End the step with a "
                "synchronised backward, or call reset_iter_state() on the root module.");
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
