// Finds and replaces tensors in nested arguments.
#include "engine/torch/walk.hpp"

namespace fsdp2x {

namespace {

bool is_plain_leaf(PyObject* object) {
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) || PyFloat_CheckExact(object) ||
         PyUnicode_CheckExact(object);
}

py::object python_walk(const char* function, PyObject* tree, const py::object& argument) {
  return py::module_::import("fsdp2x.base.walk").attr(function)(py::reinterpret_borrow<py::object>(tree), argument);
}

py::object wrap(const TensorMap& replace) {
  return py::cpp_function([&replace](const py::object& tensor) -> py::object {
    py::object result = replace(tensor.ptr());
    return result ? result : tensor;
  });
}

}  // namespace

void for_each_tensor(PyObject* tree, const std::function<void(PyObject*)>& visit, uint64_t& python_calls) {
  if (is_plain_leaf(tree)) return;
  // Containers come first, because THPVariable_Check calls Python for objects that are no tensors.
  if (PyTuple_CheckExact(tree)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tree); ++i)
      for_each_tensor(PyTuple_GET_ITEM(tree, i), visit, python_calls);
  } else if (PyList_CheckExact(tree)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tree); ++i)
      for_each_tensor(PyList_GET_ITEM(tree, i), visit, python_calls);
  } else if (PyDict_CheckExact(tree)) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(tree, &position, &key, &value);)
      for_each_tensor(value, visit, python_calls);
  } else if (THPVariable_Check(tree)) {
    visit(tree);
  } else {
    ++python_calls;
    for (const py::handle tensor : python_walk("tensors_in", tree, py::none())) visit(tensor.ptr());
  }
}

py::object map_tensors(PyObject* tree, const TensorMap& replace, uint64_t& python_calls) {
  const py::object same = py::reinterpret_borrow<py::object>(tree);
  if (is_plain_leaf(tree)) return same;
  if (PyTuple_CheckExact(tree)) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tree);
    py::tuple copy(size);
    bool changed = false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyTuple_GET_ITEM(tree, i);
      py::object mapped = map_tensors(item, replace, python_calls);
      changed |= mapped.ptr() != item;
      PyTuple_SET_ITEM(copy.ptr(), i, mapped.release().ptr());
    }
    return changed ? py::object(std::move(copy)) : same;
  }
  if (PyList_CheckExact(tree)) {
    const Py_ssize_t size = PyList_GET_SIZE(tree);
    py::list copy(size);
    bool changed = false;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyList_GET_ITEM(tree, i);
      py::object mapped = map_tensors(item, replace, python_calls);
      changed |= mapped.ptr() != item;
      PyList_SET_ITEM(copy.ptr(), i, mapped.release().ptr());
    }
    return changed ? py::object(std::move(copy)) : same;
  }
  if (PyDict_CheckExact(tree)) {
    py::dict copy;
    bool changed = false;
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(tree, &position, &key, &value);) {
      const py::object mapped = map_tensors(value, replace, python_calls);
      changed |= mapped.ptr() != value;
      if (PyDict_SetItem(copy.ptr(), key, mapped.ptr()) != 0) throw py::error_already_set();
    }
    return changed ? py::object(std::move(copy)) : same;
  }
  if (THPVariable_Check(tree)) {
    py::object result = replace(tree);
    return result ? result : same;
  }
  ++python_calls;
  return python_walk("map_tensors", tree, wrap(replace));
}

}  // namespace fsdp2x
