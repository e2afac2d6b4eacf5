// Autograd accumulates a gradient on the stream where its leaf was first used. Units compute on another stream if the
// model has moved, for example after a warm-up on a side stream or into a capture.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "engine/params/param.hpp"
#include "engine/torch/current_stream.hpp"

namespace fsdp2x {

// While it lives, work goes to `compute`, ordered after the current stream's work on the gradient of `param`. Does
// nothing if both are one stream, as in every steady step.
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
    // The gradient is freed when it is packed, so the stream that made it must know of this use.
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
