// The step of Lion: one average of gradients.
#include "engine/optim/optimizer.hpp"

#include <utility>

#include "core/error.hpp"
#include "cpu/optimizers.hpp"
#include "engine/optim/step_jobs.hpp"

namespace fsdp2x {
namespace {

struct LionJob {
  Pair pair;
  at::Tensor average;
  LionStep step;
};

LionStep lion_numbers(const LionGroup& group) {
  LionStep step;
  step.decay = static_cast<float>(group.decay);
  step.beta1 = static_cast<float>(group.beta1);
  step.rest1 = static_cast<float>(1.0 - group.beta1);
  step.beta2 = static_cast<float>(group.beta2);
  step.rest2 = static_cast<float>(1.0 - group.beta2);
  step.minus_lr = static_cast<float>(-group.lr);
  step.sign = group.maximize ? -1.0f : 1.0f;
  return step;
}

void run(const LionJob& job, int64_t begin, int64_t end) {
  cpu::lion(reinterpret_cast<float*>(bytes_at(job.pair.param.tensor, begin)),
            reinterpret_cast<const float*>(const_bytes_at(job.pair.grad.tensor, begin)),
            reinterpret_cast<float*>(bytes_at(job.average, begin)), end - begin, job.step);
}

DeviceLionJob device_job(const LionJob& job) {
  return {job.pair.param.tensor, job.pair.grad.tensor, job.average, job.step};
}

}  // namespace

LeftOver lion_step(const std::vector<LionGroup>& groups, PyObject* state, PyObject* make_state, DeviceSteps* on_device,
                   const at::Tensor& grad_scale) {
  static PyObject* const average_name = interned("exp_avg");
  std::vector<LionJob> jobs;
  LeftOver left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    LionJob job{pair_of(param, grad, on_device), at::Tensor(), lion_numbers(groups[g])};
    if (!job.pair.fits() || job.pair.param.tensor.scalar_type() != at::kFloat) return false;
    PyObject* own = state_of(state, param);
    if (own == nullptr || look_up(own, average_name) == nullptr) {
      call_maker(make_state, g, i);
      own = state_of(state, param);
    }
    if (own == nullptr) throw Error("lion_step: make_state did not make the average");
    LocalTensor local = local_item(own, average_name);
    if (!job.pair.fits(local)) return false;
    job.average = std::move(local.tensor);
    jobs.push_back(std::move(job));
    return true;
  });
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

}  // namespace fsdp2x
