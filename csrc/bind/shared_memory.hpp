// Names of what lets ranks share memory in fsdp2x._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_shared_memory(pybind11::module_& m);

}  // namespace fsdp2x
