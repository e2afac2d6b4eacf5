// The GIL: the proof that a function needs, and a scope that gives it up.
#pragma once

#include <Python.h>
#include <pybind11/gil.h>

#include <cassert>

namespace fsdp2x {

// Proof that the calling thread holds the GIL: an argument of functions that touch Python objects. They may give it up
// for a while and have it again when they return.
class Gil {
 public:
  Gil(const pybind11::gil_scoped_acquire& /*held*/) {}
  // In a call from Python.
  static Gil of_caller() {
    assert(PyGILState_Check() != 0);
    return {};
  }

 private:
  Gil() = default;
};

// Waits and long loops let other Python threads run. No-op on threads that do not hold the GIL (backward).
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
