// Gradient clipping over the local tensors of many parameters, without DTensor dispatch: sums of squares for each
// bucket of placements, then one multiplication in place. Only device plans are kept between calls. Every function
// needs the GIL and releases it while CPU kernels run.
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
  std::vector<double> on_host;    // sums of squares, per bucket
  at::Tensor on_device;           // the same in device memory (f64), undefined if no gradient lies there
  std::vector<size_t> left_over;  // indices of parameters whose gradients are in neither
};

// The gradients of parameters, looked up once for a call of clipping.
class LocalGradients {
 public:
  // `on_device`: sums and scales gradients on the first gradient's device, if it serves that device. If null, these
  // gradients are left over. It must stay alive.
  LocalGradients(PyObject* params, DeviceClip* on_device);
  // `bucket_of(spec)` returns the bucket of a DTensorSpec (None: a plain tensor), or a negative number to leave it
  // over. It is also called for parameters without a gradient, so that all ranks know the same buckets.
  GradientSums sum_squares(PyObject* bucket_of);
  // Multiplies gradients in place by a number in a tensor. Returns the indices of parameters whose gradients were left
  // over. The host never reads a factor on a device: gradients in CPU memory are then left over.
  std::vector<size_t> multiply(const at::Tensor& factor) const;

  std::optional<at::Device> device() const { return device_; }  // of the first gradient
  bool any_double() const { return any_double_; }

 private:
  enum class Place : uint8_t {
    nowhere,
    host,
    device,
    elsewhere
  };  // of a gradient: absent, summed on the host, on the
      // device, or left to torch
  struct Entry {
    size_t index;
    PyRef grad;         // null: the parameter has none
    LocalTensor local;  // of the gradient, or of the parameter
    Place place;
    long bucket = -1;  // negative: torch sums its squares
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
