// Norms and clipping of gradients on a device through the kernels of ring cuda, without the host ever waiting: sums
// stay in the device's memory, and a launch serves many gradients. Plans name sizes and dtypes, not memory, so they
// stay from call to call, wherever the gradients lie.
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

// What clipping keeps between its calls for the same parameters. All gradients of a call lie on one device.
class DeviceClip {
 public:
  explicit DeviceClip(const cuda::Kernels* on_host) : kernels_(on_host) {}

  const DeviceKernels& kernels() const { return kernels_; }
  // The sum of squares of each bucket, [largest bucket + 1], f64.
  at::Tensor sum_squares(const std::vector<DeviceGradient>& gradients);
  // Of the sum of all squares, f64 without dimensions: the norm (f64 or f32), and what to multiply with (f64) so that
  // it is at most `max_norm`.
  ClipNumbers clip_numbers(const at::Tensor& square_sum, double max_norm, bool in_f64) const;
  // In place; `factor`: f64 on the gradients' device.
  void multiply(const std::vector<DeviceGradient>& gradients, const at::Tensor& factor);
  // How many plans were built so far.
  size_t num_plans() const { return plans_.num_built(); }

 private:
  DeviceKernels kernels_;
  KeptPlans<cuda::ReduceSegment> plans_;
};

}  // namespace fsdp2x
