// Autograd adds up a gradient on the stream where its leaf was first used, and units compute on another one when a
// model has moved: after a warm-up on a side stream, or into a capture.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "engine/params/param.hpp"
#include "engine/torch/current_stream.hpp"

namespace fsdp2x {

// While it lives, work goes to `compute`, behind what the current stream has done to the gradient of `param`. Does
// nothing where that is one stream, as in every steady step.
class GradientStream {
 public:
  GradientStream(const std::optional<c10::Stream>& compute, const Param& param) {
    if (!compute) return;
    const c10::impl::VirtualGuardImpl impl(compute->device_type());
    const c10::Stream made_on = impl.getStream(compute->device());
    if (made_on == *compute || param.unsharded_object() == nullptr) return;
    c10::Event made(compute->device_type());
    made.record(made_on);
    made.block(*compute);
    // It is freed when it is packed, in the order of the stream it was made on.
    const at::Tensor& gradient = param.unsharded().grad();
    if (gradient.defined() && gradient.has_storage()) {
      impl.recordDataPtrOnStream(gradient.storage().data_ptr(), *compute);
    }
    guard_.reset_stream(*compute);
  }

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace fsdp2x
