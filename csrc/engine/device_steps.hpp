// AdamW steps on a device through the kernels of ring cuda. Plans name the memory of parameters and moments, which
// stays where it is from step to step: they are built and uploaded when something moved, and one launch per plan
// otherwise.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "core/optimizer_step.hpp"
#include "core/philox.hpp"
#include "cuda/kernels.hpp"
#include "engine/uploaded_plan.hpp"

namespace fsdp2x {

// One parameter of a step. All tensors are dense and of one memory format.
struct DeviceAdamWJob {
  at::Tensor param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;  // the last one undefined without amsgrad
  AdamWStep step;
  bool is_stochastic = false;
  RoundingKey key;        // where rounding is stochastic
  cuda::Numbers numbers;  // likewise
};

// What an optimizer keeps between its steps.
class DeviceSteps {
 public:
  // With the twins of the kernels the "device" is the CPU, for tests.
  explicit DeviceSteps(bool with_twins);

  bool has_kernels() const { return kernels_ != nullptr; }
  // Whether there are kernels for memory of this device.
  bool serves(at::Device device) const;
  // Enqueues one step on the current streams.
  void adamw(const std::vector<DeviceAdamWJob>& jobs);
  // How many plans were built so far.
  size_t num_plans() const { return num_plans_; }

 private:
  using Segments = std::vector<cuda::AdamWSegment>;
  // Consecutive jobs that one launch can step.
  struct Launch {
    at::Device device = at::kCPU;
    Segments segments;
    cuda::AdamWArgs args;
    int num_groups = 0;
  };
  struct Kept {
    Segments segments;
    UploadedPlan<cuda::AdamWSegment> plan;
  };
  std::vector<Launch> launches_of(const std::vector<DeviceAdamWJob>& jobs) const;

  const cuda::Kernels* kernels_;  // null: built without nvcc
  bool with_twins_;
  std::vector<std::unique_ptr<Kept>> kept_;  // by number of the launch
  size_t num_plans_ = 0;
};

}  // namespace fsdp2x
