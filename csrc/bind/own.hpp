// References that outlive the call that bound them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

inline PyRef own(const py::handle& object) { return PyRef::borrow(object.ptr()); }

inline PyRef own_unless_none(const py::handle& object) { return object.is_none() ? PyRef() : own(object); }

}  // namespace fsdp2x
