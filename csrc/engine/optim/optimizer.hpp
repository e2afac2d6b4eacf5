// Optimizer steps over the local tensors of many parameters, without DTensor dispatch. Nothing but plans for a device
// is kept between calls. Every function needs the GIL and gives it up while kernels run.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/optim/device_steps.hpp"
#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

struct AdamWGroup {
  PyRef params;  // list of tensors
  double lr = 0.0;
  bool lr_is_single = false;  // a float32 tensor, whose quotients torch rounds to float32
  double beta1 = 0.0;
  double beta2 = 0.0;
  double eps = 0.0;
  double decay = 1.0;  // 1 - lr * weight_decay
  bool amsgrad = false;
  bool maximize = false;
};

// (group, index in it) of parameters with a gradient that were left as they are, because the kernels cannot take them:
// another device, dtype or memory format, or placements that differ between parameter, gradient and state.
using LeftOver = std::vector<std::pair<size_t, size_t>>;

// How a step treats what is stored in bf16, or in 8 bits (kernels/rules/moment_codes.hpp).
struct NarrowRules {
  bool narrow_moments = false;  // whether the kernel takes such moments; if not, their parameters are left over
  PyRef stochastic;             // null: round to nearest even
  uint64_t seed = 0;
};

// `state`: the optimizer's dict from parameter to dict. A moment in 8 bits is there as "exp_avg_codes", cut like its
// parameter, and "exp_avg_scales", a plain tensor with a scale for each block of the local codes.
// `make_state(group, index)`: fills the state of a parameter.
// `rules.stochastic(group, index)`: where the parameter's local elements lie in the whole parameter: (first, run,
// stride), see cpu::Rounding.
// `on_device`: steps what lies on a device; null: left over.
// `grad_scale`: undefined, or one f64 number: the step is that of gradients times it (rounded to float), which stay as
// they are. The host waits for a number on a device only if there is something to step on the host.
LeftOver adamw_step(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                    const NarrowRules& rules, DeviceSteps* on_device, const at::Tensor& grad_scale);

// Zeros, each tensor with a storage of its own, in one block of memory that lives as long as any of them.
std::vector<at::Tensor> pooled_zeros(const std::vector<std::pair<std::vector<int64_t>, at::ScalarType>>& shapes);

}  // namespace fsdp2x
