// The step of SGD: a momentum buffer that its first step makes.
#include "engine/optim/optimizer.hpp"

#include <utility>

#include "core/error.hpp"
#include "cpu/optimizers.hpp"
#include "engine/optim/step_jobs.hpp"

namespace fsdp2x {
namespace {

struct SgdJob {
  Pair pair;
  at::Tensor buffer;  // undefined without momentum
  SgdStep step;
  SgdMomentum momentum;
};

SgdStep sgd_numbers(const SgdGroup& group) {
  SgdStep step;
  step.weight_decay = static_cast<float>(group.weight_decay);
  step.momentum = static_cast<float>(group.momentum);
  step.rest = static_cast<float>(1.0 - group.dampening);
  step.minus_lr = static_cast<float>(-group.lr);
  step.sign = group.maximize ? -1.0f : 1.0f;
  return step;
}

SgdMomentum momentum_of(const SgdGroup& group, bool is_first) {
  if (is_first) return group.nesterov ? SgdMomentum::first_nesterov : SgdMomentum::first;
  return group.nesterov ? SgdMomentum::later_nesterov : SgdMomentum::later;
}

void run(const SgdJob& job, int64_t begin, int64_t end) {
  cpu::SgdPiece piece;
  piece.param = reinterpret_cast<float*>(bytes_at(job.pair.param.tensor, begin));
  piece.grad = reinterpret_cast<const float*>(const_bytes_at(job.pair.grad.tensor, begin));
  piece.numel = end - begin;
  if (job.buffer.defined()) piece.buffer = reinterpret_cast<float*>(bytes_at(job.buffer, begin));
  piece.momentum = job.momentum;
  cpu::sgd(piece, job.step);
}

DeviceSgdJob device_job(const SgdJob& job) {
  return {job.pair.param.tensor, job.pair.grad.tensor, job.buffer, job.step, job.momentum};
}

}  // namespace

LeftOver sgd_step(const std::vector<SgdGroup>& groups, PyObject* state, PyObject* make_buffer, DeviceSteps* on_device,
                  const at::Tensor& grad_scale) {
  static PyObject* const buffer_name = interned("momentum_buffer");
  std::vector<SgdJob> jobs;
  LeftOver left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    SgdJob job{pair_of(param, grad, on_device), at::Tensor(), sgd_numbers(groups[g]), SgdMomentum::none};
    if (!job.pair.fits() || job.pair.param.tensor.scalar_type() != at::kFloat) return false;
    if (groups[g].momentum != 0.0) {
      PyObject* own = state_of(state, param);
      PyObject* buffer = own == nullptr ? nullptr : look_up(own, buffer_name);
      const bool is_first = buffer == nullptr || buffer == Py_None;
      if (is_first) {
        call_maker(make_buffer, g, i);
        own = state_of(state, param);
      }
      if (own == nullptr) throw Error("sgd_step: make_buffer did not make the buffer");
      LocalTensor local = local_item(own, buffer_name);
      const bool fits = job.pair.fits(local);
      if (is_first && !fits) throw Error("sgd_step: the buffer that was made is not like its parameter");
      if (!fits) return false;
      job.buffer = std::move(local.tensor);
      job.momentum = momentum_of(groups[g], is_first);
    }
    jobs.push_back(std::move(job));
    return true;
  });
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

}  // namespace fsdp2x
