// Optimizer steps on a device through the kernels of ring cuda. Plans name the memory of parameters and their state,
// which stays where it is from step to step: they are built and uploaded when something moved, and one launch per plan
// otherwise.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "core/optimizer_step.hpp"
#include "core/philox.hpp"
#include "engine/memory/device_kernels.hpp"

namespace fsdp2x {

// One parameter of a step. All tensors of a job are dense and of one memory format, the gradient is of the parameter's
// type.
struct DeviceAdamWJob {
  using Segment = cuda::AdamWSegment;
  using Args = cuda::AdamWArgs;
  at::Tensor param, grad;
  bool is_stochastic = false;
  RoundingKey key;                                                      // where rounding is stochastic
  cuda::Numbers numbers;                                                // likewise
  at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;                       // the last one undefined without amsgrad
  at::Tensor exp_avg_scales, exp_avg_sq_scales, max_exp_avg_sq_scales;  // undefined but for codes
  AdamWStep step;
};

// Likewise, all float32.
struct DeviceSgdJob {
  using Segment = cuda::SgdSegment;
  using Args = cuda::SgdArgs;
  at::Tensor param, grad;
  at::Tensor buffer;  // undefined without momentum
  SgdStep step;
  SgdMomentum momentum = SgdMomentum::none;
};

// Likewise.
struct DeviceLionJob {
  using Segment = cuda::LionSegment;
  using Args = cuda::LionArgs;
  at::Tensor param, grad;
  at::Tensor average;
  LionStep step;
};

// What an optimizer keeps between its steps.
class DeviceSteps {
 public:
  explicit DeviceSteps(bool with_twins) : kernels_(with_twins) {}

  const DeviceKernels& kernels() const { return kernels_; }
  // Enqueue one step on the current streams. `grad_scale`: undefined, or one number that all gradients count times of.
  void run(const std::vector<DeviceAdamWJob>& jobs, const at::Tensor& grad_scale);
  void run(const std::vector<DeviceSgdJob>& jobs, const at::Tensor& grad_scale);
  void run(const std::vector<DeviceLionJob>& jobs, const at::Tensor& grad_scale);
  // How many plans were built so far.
  size_t num_plans() const { return adamw_plans_.num_built() + sgd_plans_.num_built() + lion_plans_.num_built(); }

 private:
  DeviceKernels kernels_;
  KeptPlans<cuda::AdamWSegment> adamw_plans_;
  KeptPlans<cuda::SgdSegment> sgd_plans_;
  KeptPlans<cuda::LionSegment> lion_plans_;
};

}  // namespace fsdp2x
