// Compares the modules of a model with a snapshot.
#include "engine/torch/module_tree.hpp"

namespace fsdp2x {

namespace {

constexpr Py_ssize_t kEntriesPerModule = 4;

bool has_values(PyObject* dict, PyObject* expected) {
  if (PyDict_GET_SIZE(dict) != PyTuple_GET_SIZE(expected)) return false;
  PyObject* value = nullptr;
  Py_ssize_t index = 0;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, nullptr, &value); ++index) {
    if (value != PyTuple_GET_ITEM(expected, index)) return false;
  }
  return true;
}

Py_ssize_t count_values(PyObject* dict) {
  PyObject* value = nullptr;
  Py_ssize_t count = 0;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, nullptr, &value);) count += value != Py_None;
  return count;
}

}  // namespace

bool is_same_tree(const Gil& /*gil*/, const pybind11::tuple& snapshot) {
  PyObject* const entries = snapshot.ptr();
  for (Py_ssize_t i = 0; i + kEntriesPerModule <= PyTuple_GET_SIZE(entries); i += kEntriesPerModule) {
    if (!has_values(PyTuple_GET_ITEM(entries, i), PyTuple_GET_ITEM(entries, i + 1))) return false;
    const Py_ssize_t expected = PyLong_AsSsize_t(PyTuple_GET_ITEM(entries, i + 3));
    if (count_values(PyTuple_GET_ITEM(entries, i + 2)) != expected) return false;
  }
  return true;
}

}  // namespace fsdp2x
