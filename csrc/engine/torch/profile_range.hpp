// Named ranges in profiles, under FSDP2's names. Without a profiler they cost one read of a thread-local.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace fsdp2x {

// While it lives, a range of that name is open in torch.profiler and in NVTX (torch.autograd.profiler.emit_nvtx).
class ProfileRange {
 public:
  static bool is_profiling() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }
  explicit ProfileRange(const std::string& name) {
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      function_.emplace(std::move(*callbacks));
      function_->before(std::string_view(name));
    }
  }

 private:
  std::optional<at::RecordFunction> function_;
};

// The ranges of one unit. Made once, so that opening a range copies nothing.
struct RangeNames {
  explicit RangeNames(const std::string& unit)
      : all_gather(with("FSDP::all_gather", unit)),
        all_gather_copy_out(with("FSDP::all_gather_copy_out", unit)),
        pre_forward(with("FSDP::pre_forward", unit)),
        post_forward(with("FSDP::post_forward", unit)),
        pre_backward(with("FSDP::pre_backward", unit)),
        post_backward_reshard(with("FSDP::post_backward_reshard", unit)),
        post_backward_reduce(with("FSDP::post_backward_reduce", unit)),
        post_backward_rs_wait(with("FSDP::post_backward_rs_wait", unit)),
        reduce_scatter(with("FSDP::reduce_scatter", unit)),
        all_reduce(with("FSDP::all_reduce", unit)),
        forward_prefetch("FSDP::forward_prefetch for " + unit),
        backward_prefetch("FSDP::backward_prefetch for " + unit) {}

  std::string all_gather, all_gather_copy_out, pre_forward, post_forward, pre_backward, post_backward_reshard,
      post_backward_reduce, post_backward_rs_wait, reduce_scatter, all_reduce, forward_prefetch, backward_prefetch;

 private:
  static std::string with(const char* range, const std::string& unit) {
    return unit == "<root>" ? range : std::string(range) + " (" + unit + ")";
  }
};

}  // namespace fsdp2x
