// Finds the plain memory of a Python tensor (a DTensor's local tensor, or the tensor itself), and reads lists of
// parameters.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <cstddef>

#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

// Returns the string object for an attribute or key. Objects are made once and live as long as the interpreter.
PyObject* interned(const char* name);

// Access a list of parameters. Items are borrowed.
size_t list_size(PyObject* list);
PyObject* list_item(PyObject* list, size_t index);

// Returns the gradient of a parameter, undefined if it has none.
const at::Tensor& grad_of(PyObject* param);

struct LocalTensor {
  at::Tensor tensor;  // undefined: the object is neither a plain tensor nor a DTensor over one
  PyRef spec;         // DTensorSpec, null for a plain tensor
};

LocalTensor local_tensor(PyObject* object);

// Returns whether kernels may read the memory from its first to its last element: on that device, strided, and dense.
bool is_plain_memory(const at::Tensor& tensor, at::Device device = at::kCPU);

// Returns whether element i has the same place in both tensors.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

// Returns whether two DTensors (or two plain tensors) have the same mesh and placements.
bool same_placements(PyObject* spec, PyObject* other);

// The mesh and placements of a spec, looked up once for many comparisons. Both are null for a plain tensor.
struct Cut {
  PyRef mesh, placements;
};
Cut cut_of(PyObject* spec);
bool same_cut(const Cut& a, const Cut& b);

}  // namespace fsdp2x
