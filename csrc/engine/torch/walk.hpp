// Finds and replaces tensors in the arguments and outputs of a forward. Tuples, lists, and dicts are walked here. Other
// containers (dataclasses, named tuples, ModelOutput) go through the Python helpers of base/walk.py.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <vector>

namespace fsdp2x {

namespace py = pybind11;

// Returns the replacement of a tensor, or a null object to keep it.
using TensorMap = std::function<py::object(PyObject* tensor)>;

// `python_calls` counts the walks that needed the interpreter.

// Calls `visit` for every tensor in `tree`, depth first, in a fixed order.
void for_each_tensor(PyObject* tree, const std::function<void(PyObject*)>& visit, uint64_t& python_calls);

// Returns a copy of `tree` with tensors replaced, or `tree` itself if none were.
py::object map_tensors(PyObject* tree, const TensorMap& replace, uint64_t& python_calls);

}  // namespace fsdp2x
