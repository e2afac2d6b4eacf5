// Names of optimizer steps and gradient clipping in fsdp2x._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_optim(pybind11::module_& m);

}  // namespace fsdp2x
