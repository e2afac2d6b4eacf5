// Gradients that wait for a reduction, by the parameters that torch's zero_grad was called for.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_waiting(pybind11::module_& m);

}  // namespace fsdp2x
