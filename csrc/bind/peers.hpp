// Names of collectives over the memory of peers in fsdp2x._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_peers(pybind11::module_& m);

}  // namespace fsdp2x
