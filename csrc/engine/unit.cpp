// A unit: state machines, unshard and reshard, packing and reducing.
#include "engine/unit.hpp"

#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/utils/pybind.h>

#include "core/error.hpp"
#include "engine/root.hpp"

namespace fsdp2x {

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

Unit::Unit(std::string unit_name, Layout unit_layout, at::Tensor shard_pool, std::vector<Param> unit_params,
           PyRef make_gradient, PyRef add_to_foreign, UnitOptions unit_options)
    : name(std::move(unit_name)),
      options(std::move(unit_options)),
      layout(std::move(unit_layout)),
      pool(std::move(shard_pool)),
      device(pool.device()),
      params(std::move(unit_params)),
      gradients(layout, params, device, std::move(make_gradient), std::move(add_to_foreign)) {
  scratch.filled.assign(params.size(), 0);
}

Unit::~Unit() {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  try {
    reset();
  } catch (const std::exception&) {
    // A peer is gone or the interpreter is shutting down: the memory goes with the process.
  }
  params.clear();
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
  set_params(ParamState::sharded, ParamState::gathering);
  ++root->counters.gathers;
  try {
    root->transport->begin_gather(*this);
  } catch (...) {
    param_state_ = ParamState::sharded;
    throw;
  }
}

void Unit::finish_unshard() {
  if (param_state_ != ParamState::gathering) return;
  root->transport->finish_gather(*this);
  pybind11::gil_scoped_acquire gil;
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].fill(gather.read + layout.params()[i].slot_offset);
    params[i].register_unsharded();
  }
  root->counters.parameter_stores += params.size();
  attach_accumulator_hooks();
  set_params(ParamState::gathering, ParamState::unsharded);
}

void Unit::unshard() {
  begin_unshard();
  finish_unshard();
}

void Unit::reshard() {
  if (param_state_ == ParamState::gathering) return cancel_unshard();
  if (param_state_ != ParamState::unsharded) return;
  {
    pybind11::gil_scoped_acquire gil;
    for (size_t i = 0; i < params.size(); ++i) {
      Param& param = params[i];
      if (param.was_written()) {
        const ParamPlace& place = layout.params()[i];
        root->transport->discard_writes(gather.read + place.slot_offset,
                                        static_cast<size_t>(place.shape.numel()) * dtype_bytes(place.shape.compute));
      }
      param.empty();
      param.register_sharded();
    }
  }
  root->counters.parameter_stores += params.size();
  root->transport->release_gather(*this);
  set_params(ParamState::unsharded, ParamState::sharded);
}

void Unit::cancel_unshard() {
  root->transport->release_gather(*this);
  set_params(ParamState::gathering, ParamState::sharded);
}

void Unit::attach_accumulator_hooks() {
  for (size_t i = 0; i < params.size(); ++i) {
    Param& param = params[i];
    if (param.accumulator || !param.unsharded().requires_grad()) continue;
    param.accumulator = torch::autograd::impl::grad_accumulator(param.unsharded());
    auto hook = [weak = weak_from_this(), i](const torch::autograd::variable_list& outputs,
                                             const torch::autograd::variable_list&) {
      if (auto unit = weak.lock()) unit->pack_gradient(i);
      return outputs;
    };
    param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook)));
  }
}

void Unit::pack_gradient(size_t i) {
  const at::Tensor& parameter = params[i].unsharded();
  if (!parameter.grad().defined()) return;
  const at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
  root->begin_backward();
  if (gradient.layout() != at::kStrided) {
    throw Error("fsdp2x: the gradient of '" + params[i].fqn() +
                "' is sparse; only dense gradients can be sharded (use sparse=False in the embedding)");
  }
  root->transport->pack(*this, i, gradient);
}

void Unit::sweep_gradients() {
  for (size_t i = 0; i < params.size(); ++i) pack_gradient(i);
}

void Unit::pre_backward() {
  if (phase_ == Phase::backward) return;
  phase_ = Phase::backward;
  armed = true;
  root->begin_backward();
  if (options.unshard_in_backward) unshard();
  root->prefetch_backward(*this);
}

void Unit::post_backward() {
  phase_ = Phase::reduced;
  if (!has_params()) return;
  sweep_gradients();
  if (options.reshard_after_backward) reshard();
  if (!options.requires_gradient_sync) return;
  if (!has_outstanding_calls() && scratch.open) root->reduce(*this);
}

void Unit::begin_reduce() {
  ++root->counters.reductions;
  root->transport->begin_reduce(*this);
}

bool Unit::finish_reduce(bool flush) { return root->transport->finish_reduce(*this, flush); }

void Unit::end_backward() {
  if (param_state_ == ParamState::gathering) cancel_unshard();
  phase_ = Phase::idle;
}

void Unit::reset() {
  if (root) {
    root->transport->abandon_reduce(*this);
    reshard();
  }
  for (Param& param : params) {
    if (param.unsharded_object() != nullptr) param.unsharded().mutable_grad() = at::Tensor();
  }
  forward_indices.clear();
  armed = false;
  phase_ = Phase::idle;
}

double Unit::divisor() const { return options.divide_factor.value_or(static_cast<double>(layout.world())); }

}  // namespace fsdp2x
