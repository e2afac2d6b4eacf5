// The GIL: the proof that a function needs, and a scope that releases it.
#pragma once

#include <Python.h>
#include <pybind11/gil.h>

#include <cassert>

namespace fsdp2x {

// Proof that the calling thread holds the GIL: an argument of functions that touch Python objects. They may release it
// for a while and hold it again when they return.
class Gil {
 public:
  Gil(const pybind11::gil_scoped_acquire& /*held*/) {}
  // Makes the proof in a call from Python.
  static Gil of_caller() {
    assert(PyGILState_Check() != 0);
    return {};
  }

 private:
  Gil() = default;
};

// Lets other Python threads run during waits and long loops. Does nothing on threads without the GIL (backward).
class ReleaseGil {
 public:
  ReleaseGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace fsdp2x
