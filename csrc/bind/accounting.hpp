// Names of the accounting of transient memory in fsdp2x._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_accounting(pybind11::module_& m);

}  // namespace fsdp2x
