// Finds the plain memory of a Python tensor.
#include "engine/memory/local_tensor.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include "core/error.hpp"

namespace fsdp2x {
namespace {

PyRef attribute(PyObject* object, PyObject* name) {
  PyRef value = PyRef::steal(PyObject_GetAttr(object, name));
  if (!value) throw_python_error();
  return value;
}

bool is_wrapper(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int result = PyObject_RichCompareBool(a, b, Py_EQ);
  if (result < 0) throw_python_error();
  return result == 1;
}

}  // namespace

PyObject* interned(const char* name) {
  PyObject* string = PyUnicode_InternFromString(name);
  if (string == nullptr) throw_python_error();
  return string;
}

size_t list_size(PyObject* list) {
  if (!PyList_Check(list)) throw Error("optim: the parameters are not a list");
  return static_cast<size_t>(PyList_GET_SIZE(list));
}

PyObject* list_item(PyObject* list, size_t index) { return PyList_GET_ITEM(list, static_cast<Py_ssize_t>(index)); }

const at::Tensor& grad_of(PyObject* param) {
  if (!THPVariable_Check(param)) throw Error("optim: a parameter is not a tensor");
  return THPVariable_Unpack(param).grad();
}

LocalTensor local_tensor(PyObject* object) {
  static PyObject* const local_name = interned("_local_tensor");
  static PyObject* const spec_name = interned("_spec");
  if (!THPVariable_Check(object)) return {};
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!is_wrapper(tensor)) return {tensor, PyRef()};
  const PyRef local = PyRef::steal(PyObject_GetAttr(object, local_name));
  PyRef spec = local ? PyRef::steal(PyObject_GetAttr(object, spec_name)) : PyRef();
  if (!local || !spec) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw_python_error();
    PyErr_Clear();  // a foreign tensor subclass
    return {};
  }
  if (!THPVariable_Check(local.get()) || is_wrapper(THPVariable_Unpack(local.get()))) return {};
  return {THPVariable_Unpack(local.get()), std::move(spec)};
}

bool is_plain_memory(const at::Tensor& tensor, at::Device device) {
  return tensor.defined() && tensor.device() == device && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.is_conj() && !tensor.is_neg() && (tensor.is_contiguous() || tensor.is_non_overlapping_and_dense());
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && ((a.is_contiguous() && b.is_contiguous()) || a.strides() == b.strides());
}

Cut cut_of(PyObject* spec) {
  static PyObject* const mesh_name = interned("mesh");
  static PyObject* const placements_name = interned("placements");
  if (spec == nullptr) return {};
  return {attribute(spec, mesh_name), attribute(spec, placements_name)};
}

bool same_cut(const Cut& a, const Cut& b) {
  if (!a.mesh || !b.mesh) return !a.mesh && !b.mesh;
  return equal(a.mesh.get(), b.mesh.get()) && equal(a.placements.get(), b.placements.get());
}

bool same_placements(PyObject* spec, PyObject* other) { return spec == other || same_cut(cut_of(spec), cut_of(other)); }

}  // namespace fsdp2x
