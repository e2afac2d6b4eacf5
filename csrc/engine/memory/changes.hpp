// Which elements of a tensor differ from those of another one that was held before: what a delta sends.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/cuda/kernels.hpp"

namespace fsdp2x {

// (positions int64, ascending, and values of held's dtype) of what differs in `now`, cast to the dtype of `held`; both
// are flat, dense and on one device. `held` takes these values. nullopt: more than `max` do; then `held` may have taken
// some of them. By `kernels`, those of the tensors' device or the reference kernels; null: on the CPU, on torch's
// threads, with one result whatever their number. Does not need the GIL.
std::optional<std::pair<at::Tensor, at::Tensor>> take_changes(const at::Tensor& now, const at::Tensor& held,
                                                              int64_t max, const cuda::Kernels* kernels);

}  // namespace fsdp2x
