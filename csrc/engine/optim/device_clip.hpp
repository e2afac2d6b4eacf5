// Norms and clipping of gradients on a device with the kernels of csrc/kernels/cuda. The host never waits: sums stay in
// device memory, and a launch serves many gradients. Plans contain sizes and dtypes, not addresses, so they stay valid
// when gradients move.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <vector>

#include "engine/memory/device_kernels.hpp"

namespace fsdp2x {

struct DeviceGradient {
  at::Tensor values;  // dense
  long bucket = -1;   // negative: not summed
};

struct ClipNumbers {
  at::Tensor norm, factor;  // no dimensions
};

// State that clipping keeps between its calls for the same parameters. All gradients of a call lie on one device.
class DeviceClip {
 public:
  explicit DeviceClip(const cuda::Kernels* on_host) : kernels_(on_host) {}

  const DeviceKernels& kernels() const { return kernels_; }
  // Returns the sum of squares of each bucket, [largest bucket + 1], f64.
  at::Tensor sum_squares(const std::vector<DeviceGradient>& gradients);
  // Returns the norm (f64 or f32) and the factor (f64) that limits it to `max_norm`. `square_sum`: the sum of all
  // squares, f64 without dimensions.
  ClipNumbers clip_numbers(const at::Tensor& square_sum, double max_norm, bool in_f64) const;
  // Multiplies in place. `factor`: f64 on the gradients' device.
  void multiply(const std::vector<DeviceGradient>& gradients, const at::Tensor& factor);
  // Returns the number of plans built so far.
  size_t num_plans() const { return plans_.num_built(); }

 private:
  DeviceKernels kernels_;
  KeptPlans<cuda::ReduceSegment> plans_;
};

}  // namespace fsdp2x
