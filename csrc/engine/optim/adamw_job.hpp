// One parameter of an AdamW step.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <cstdint>

#include "engine/memory/local_tensor.hpp"
#include "kernels/cpu/optimizers.hpp"
#include "kernels/rules/moment_codes.hpp"
#include "kernels/rules/optimizer_rules.hpp"

namespace fsdp2x {

struct AdamWGroup;

// A parameter with its gradient, and the memory of both. All tensors of a step are dense and have one memory format,
// and the gradient has the parameter's dtype.
struct Pair {
  PyObject* object;
  LocalTensor param;
  LocalTensor grad;
  at::Device device = at::kCPU;  // where the kernels run

  bool fits() const;
  bool fits(const LocalTensor& state, at::ScalarType type = at::kFloat) const;
  // Bumps version counters, so that autograd detects that saved tensors have changed. Needs the GIL.
  void bump_versions() const;
};

// A moment of a state. Undefined memory: there is none, or the kernels cannot take it.
struct MomentMemory {
  at::Tensor memory;
  at::Tensor scales;  // undefined unless the memory holds codes

  float* scales_at(int64_t begin) const {
    return scales.defined() ? scales.mutable_data_ptr<float>() + begin / kMomentBlock : nullptr;
  }
};

struct AdamWJob {
  Pair pair;
  MomentMemory exp_avg, exp_avg_sq, max_exp_avg_sq;  // the last one undefined without amsgrad
  at::Tensor count;
  const AdamWGroup* group;  // until the numbers are there
  AdamWStep step = {};      // its `sign` is the factor by which kernels multiply gradients
  bool is_stochastic = false;
  cpu::Rounding rounding = {};

  bool is_coded() const { return exp_avg.scales.defined(); }
};

}  // namespace fsdp2x
