// torch.func's transforms (grad, vjp, jvp, vmap ...) wrap every tensor that is made while they run. These functions
// detect that and keep the engine's own tensors unwrapped.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp2x {

// While it lives, tensors are made and written as without a transform.
class OutsideTransforms {
 public:
  OutsideTransforms()
      : guard_(c10::DispatchKeySet(
            {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode})) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

inline bool inside_transforms() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

}  // namespace fsdp2x
