// The step of the optimizers of FloatRules (kernels/rules/optimizer_rules.hpp), which only differ in their rule.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "engine/optim/optimizer.hpp"
#include "engine/optim/step_jobs.hpp"
#include "kernels/cpu/optimizers.hpp"
#include "kernels/rules/optimizer_rules.hpp"

namespace fsdp2x {

template <class Rule>
struct FloatGroup {
  PyRef params;  // list of tensors
  Rule rule;
};

template <class Rule>
struct FloatJob {
  using Args = cuda::FloatArgs<Rule>;
  Pair pair;
  at::Tensor state;  // undefined: the rule keeps none
  Rule step;

  static void launch(const cuda::Kernels& kernels, const cuda::FloatList& list, const Args& args, cuda::Stream stream) {
    cuda::step_floats(kernels, list, args, stream);
  }
};

inline float* floats_at(const at::Tensor& tensor, int64_t index) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() + index : nullptr;
}

template <class Rule>
void run(const FloatJob<Rule>& job, int64_t begin, int64_t end) {
  cpu::step_floats(job.step, floats_at(job.pair.param.tensor, begin),
                   job.pair.grad.tensor.template const_data_ptr<float>() + begin, floats_at(job.state, begin),
                   end - begin);
}

template <class Rule>
cuda::FloatSegment segment_of(const FloatJob<Rule>& job) {
  cuda::FloatSegment segment;
  segment.param = floats_at(job.pair.param.tensor, 0);
  segment.state = floats_at(job.state, 0);
  return segment;
}

template <class Rule>
bool stores_alike(const FloatJob<Rule>&, const cuda::FloatArgs<Rule>&) {
  return true;
}

template <class Rule>
void set_storing(const FloatJob<Rule>&, cuda::FloatArgs<Rule>&) {}

// Works as adamw_step. `make_state(group, index)` sets Rule::kState to a tensor like the parameter.
template <class Rule>
LeftOver float_step(const std::vector<FloatGroup<Rule>>& groups, PyObject* state, PyObject* make_state,
                    DeviceSteps* on_device, const at::Tensor& grad_scale) {
  static PyObject* const name = interned(Rule::kState);
  std::vector<FloatJob<Rule>> jobs;
  LeftOver left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    FloatJob<Rule> job{pair_of(param, grad, on_device), at::Tensor(), groups[g].rule};
    if (!job.pair.fits() || job.pair.param.tensor.scalar_type() != at::kFloat) return false;
    if (job.step.keeps_state()) {
      PyObject* own = state_of(state, param);
      PyObject* held = own == nullptr ? nullptr : look_up(own, name);
      const bool is_first = held == nullptr || held == Py_None;
      if (is_first) {
        call_maker(make_state, g, i);
        job.step.begin();
        own = state_of(state, param);
      }
      LocalTensor local = own == nullptr ? LocalTensor() : local_item(own, name);
      const bool fits = job.pair.fits(local);
      if (is_first && !fits) {
        throw Error(
            std::string(Rule::kName) +
            "_step: make_state made a state that differs from its parameter in shape, dtype, device, or layout");
      }
      if (!fits) return false;
      job.state = std::move(local.tensor);
    }
    jobs.push_back(std::move(job));
    return true;
  });
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

}  // namespace fsdp2x
