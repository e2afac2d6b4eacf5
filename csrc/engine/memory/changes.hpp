// Which elements of a tensor differ from those of another one that was held before: what a delta sends.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace fsdp2x {

// (positions int64, values of held's dtype) of what differs in `now`, cast to the dtype of `held`; both are flat, dense
// and on the CPU. nullopt: more than `max` do. On torch's threads, with one result whatever their number.
std::optional<std::pair<at::Tensor, at::Tensor>> find_changes(const at::Tensor& now, const at::Tensor& held,
                                                              int64_t max);

}  // namespace fsdp2x
