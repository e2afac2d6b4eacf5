// What module.cpp binds from other files, each named like its function.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

void bind_accounting(pybind11::module_& m);
void bind_agreement(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_shared_memory(pybind11::module_& m);
void bind_waiting(pybind11::module_& m);

}  // namespace fsdp2x
