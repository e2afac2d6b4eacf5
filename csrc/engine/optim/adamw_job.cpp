// Checks which tensors the kernels can take.
#include "engine/optim/adamw_job.hpp"

#include <torch/csrc/autograd/python_variable.h>

namespace fsdp2x {

bool Pair::fits() const {
  return is_plain_memory(param.tensor, device) && is_plain_memory(grad.tensor, device) &&
         same_layout(param.tensor, grad.tensor) && param.tensor.scalar_type() == grad.tensor.scalar_type() &&
         same_placements(param.spec.get(), grad.spec.get());
}

bool Pair::fits(const LocalTensor& state, at::ScalarType type) const {
  return is_plain_memory(state.tensor, device) && state.tensor.scalar_type() == type &&
         same_layout(param.tensor, state.tensor) && same_placements(param.spec.get(), state.spec.get());
}

void Pair::bump_versions() const {
  THPVariable_Unpack(object).unsafeGetTensorImpl()->bump_version();
  if (param.spec) param.tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace fsdp2x
