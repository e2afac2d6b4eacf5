// Finds which elements of a tensor differ from those of an earlier copy: the contents of a delta.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/cuda/kernels.hpp"

namespace fsdp2x {

// Returns (positions int64, ascending, and values of held's dtype) where `now`, cast to the dtype of `held`, differs.
// Both are flat, dense, and on one device. `held` takes these values. Returns nullopt if more than `max` differ; then
// `held` may have taken some of them. `kernels`: those of the tensors' device or the reference kernels. Null: torch's
// CPU threads, whose number does not change the result. Does not need the GIL.
std::optional<std::pair<at::Tensor, at::Tensor>> take_changes(const at::Tensor& now, const at::Tensor& held,
                                                              int64_t max, const cuda::Kernels* kernels);

}  // namespace fsdp2x
