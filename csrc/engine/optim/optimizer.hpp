// AdamW over the local tensors of many parameters, without DTensor dispatch. Only device plans are kept between calls.
// The function needs the GIL and releases it while kernels run.
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

// (group, index in it) of parameters that were not stepped because the kernels cannot take their gradients. They have
// another device, dtype, or memory format, or different placements of parameter, gradient, and state.
using LeftOver = std::vector<std::pair<size_t, size_t>>;

// Rules for values stored in bf16 or in 8 bits (kernels/rules/moment_codes.hpp).
struct NarrowRules {
  bool narrow_moments = false;  // false: parameters with such moments are left over
  PyRef stochastic;             // null: round to nearest even
  uint64_t seed = 0;
};

// `state`: the optimizer's dict from parameter to dict. An 8-bit moment is stored as "exp_avg_codes" and
// "exp_avg_scales". The codes are sharded like their parameter. The scales are a plain tensor, with a scale for each
// block of the local codes.
// `make_state(group, index)`: fills the state of a parameter.
// `rules.stochastic(group, index)`: the position of the local elements in the full parameter as (first, run, stride),
// see cpu::Rounding.
// `on_device`: steps parameters on a device. Null: they are left over.
// `grad_scale`: undefined, or one f64 number. The step then uses gradients times this number (rounded to float) and
// does not change them. The host waits for a number on a device only if it has parameters to step itself.
LeftOver adamw_step(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                    const NarrowRules& rules, DeviceSteps* on_device, const at::Tensor& grad_scale);

}  // namespace fsdp2x
