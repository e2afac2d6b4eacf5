// The agreement of ranks over a process group, for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_agreement(pybind11::module_& m);

}  // namespace fsdp2x
