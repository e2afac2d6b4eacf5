// The GIL, given up for the time of a scope.
#pragma once

#include <Python.h>

namespace fsdp2x {

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
