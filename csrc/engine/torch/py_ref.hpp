// An owned Python reference that any thread may drop. The destructor takes the GIL, and leaks on purpose if the
// interpreter is already gone.
#pragma once

#include <Python.h>
#include <torch/csrc/Exceptions.h>

#include <utility>

#include "engine/torch/gil.hpp"

namespace fsdp2x {

class PyRef {
 public:
  PyRef() = default;
  static PyRef borrow(PyObject* object) {
    Py_XINCREF(object);
    return PyRef(object);
  }
  static PyRef steal(PyObject* object) { return PyRef(object); }

  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;

  ~PyRef() {
    if (object_ == nullptr || !Py_IsInitialized()) return;
    if (PyGILState_Check()) {  // the usual case, many times cheaper
      Py_DECREF(object_);
      return;
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(object_);
    PyGILState_Release(gil);
  }

  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Throws the interpreter's current exception. It first takes the exception out of the thread state: the GIL is released
// before the handler restores it, and other Python code may run meanwhile.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

// Calls a Python function, and throws what it raises. A null argument ends the list.
template <class... Arguments>
PyRef call(const Gil& /*gil*/, PyObject* function, Arguments*... arguments) {
  PyRef result = PyRef::steal(PyObject_CallFunctionObjArgs(function, arguments..., nullptr));
  if (!result) throw_python_error();
  return result;
}

}  // namespace fsdp2x
