// The plain memory behind a tensor of Python's: a DTensor's local tensor, or the tensor itself; lists of parameters.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <cstddef>

#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

// Names of attributes and keys: made once, they live as long as the interpreter.
PyObject* interned(const char* name);

// A list of parameters; its items are borrowed.
size_t list_size(PyObject* list);
PyObject* list_item(PyObject* list, size_t index);

// The gradient of a parameter, undefined when it has none.
const at::Tensor& grad_of(PyObject* param);

struct LocalTensor {
  at::Tensor tensor;  // undefined: the object is neither a plain tensor nor a DTensor over one
  PyRef spec;         // DTensorSpec, null for a plain tensor
};

LocalTensor local_tensor(PyObject* object);

// Whether kernels may walk the memory from its first to its last element: on that device, strided, dense.
bool is_plain_memory(const at::Tensor& tensor, at::Device device = at::kCPU);

// Whether element i of one lies where element i of the other does.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// Whether two DTensors (or two plain tensors) are cut alike: the same mesh and placements.
bool same_placements(PyObject* spec, PyObject* other);

// The same for one spec that is compared with many: what is compared, looked up once. Both null for a plain tensor.
struct Cut {
  PyRef mesh, placements;
};
Cut cut_of(PyObject* spec);
bool same_cut(const Cut& a, const Cut& b);

}  // namespace fsdp2x
