// AdamW on a device with the kernels of csrc/kernels/cuda. Plans contain the addresses of parameters and state, which
// usually stay the same. A plan is rebuilt and uploaded after something moved. Otherwise a step is one launch per plan.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <span>

#include "engine/memory/device_kernels.hpp"

namespace fsdp2x {

struct AdamWJob;

// State that an optimizer keeps between its steps.
class DeviceSteps {
 public:
  explicit DeviceSteps(const cuda::Kernels* on_host) : kernels_(on_host) {}

  const DeviceKernels& kernels() const { return kernels_; }
  // Enqueues one step on the current streams. `grad_scale`: undefined, or one number that multiplies all gradients.
  void run(std::span<const AdamWJob> jobs, const at::Tensor& grad_scale);
  // Returns the number of plans built so far.
  size_t num_plans() const { return plans_.num_built(); }

 private:
  DeviceKernels kernels_;
  KeptPlans<cuda::AdamWSegment> plans_;
};

}  // namespace fsdp2x
