// Device transports, device layers and their records in fsdp2x._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_device(pybind11::module_& m);

}  // namespace fsdp2x
