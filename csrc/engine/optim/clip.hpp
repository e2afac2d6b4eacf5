// Gradient clipping over the local tensors of many parameters, without DTensor dispatch: sums of squares per bucket of
// placements, then one multiplication in place. Nothing but plans for a device is kept between calls. Every function
// needs the GIL and gives it up while kernels of the CPU run.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/memory/local_tensor.hpp"
#include "engine/optim/device_clip.hpp"
#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

struct GradientSums {
  std::vector<double> on_host;    // of squares, per bucket
  at::Tensor on_device;           // likewise, f64 in the device's memory; undefined when no gradient lies there
  std::vector<size_t> left_over;  // indices of parameters whose gradients are in neither
};

// The gradients of parameters, looked up once for a call of clipping.
class LocalGradients {
 public:
  // `on_device`: what sums and scales the gradients that lie where the first one does, if it serves that device; null:
  // left over. It must stay alive.
  LocalGradients(PyObject* params, DeviceClip* on_device);
  // `bucket_of(spec)`: the bucket of a DTensorSpec (None: a plain tensor), or a negative number to leave it over. It is
  // asked for parameters without a gradient too, so that all ranks know the same buckets.
  GradientSums sum_squares(PyObject* bucket_of);
  // Multiplies them in place by a number in a tensor; returns the indices of the parameters whose gradients were left
  // over. A factor on a device is never read by the host: gradients in host memory are left over then.
  std::vector<size_t> multiply(const at::Tensor& factor) const;

  std::optional<at::Device> device() const { return device_; }  // of the first gradient
  bool any_double() const { return any_double_; }

 private:
  enum class Place : uint8_t { nowhere, host, device, elsewhere };  // of a gradient: there is none, ours, ours, torch's
  struct Entry {
    size_t index;
    PyRef grad;         // null: the parameter has none
    LocalTensor local;  // of the gradient, or of the parameter
    Place place;
    long bucket = -1;  // negative: its squares are not ours to sum
  };
  Place place_of(const at::Tensor& local) const;
  std::vector<DeviceGradient> on_device() const;
  void multiply_on_host(double factor) const;

  DeviceClip* on_device_;
  std::vector<Entry> entries_;
  std::optional<at::Device> device_;
  bool any_double_ = false;
};

}  // namespace fsdp2x
