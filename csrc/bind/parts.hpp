// Shared by the files of the binding: functions that module.cpp calls, and references that outlive a call.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

void bind_accounting(pybind11::module_& m);
void bind_agreement(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_shared_memory(pybind11::module_& m);
void bind_waiting(pybind11::module_& m);

inline PyRef own(const pybind11::handle& object) { return PyRef::borrow(object.ptr()); }
inline PyRef own_unless_none(const pybind11::handle& object) { return object.is_none() ? PyRef() : own(object); }

}  // namespace fsdp2x
