// Unit settings that must be the same on every rank.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace fsdp2x {

// The flags of UnitSettings from the lowest bit on, as users know them.
inline constexpr std::array kUnitFlagNames{
    "reshard_after_forward",  "reshard_after_forward=None",    "reshard_after_backward",
    "requires_gradient_sync", "requires_all_reduce",           "reduce_scatter_unused_params",
    "unshard_in_backward",    "force_sum_reduction_for_comms", "odd number of optimizer steps",
};

struct UnitSettings {
  uint32_t flags = 0;
  double divide_factor = 0.0;  // 0: the number of ranks

  // Packs the settings into one word, without the factor's last bits.
  uint64_t packed() const;
  static UnitSettings unpacked(uint64_t word);
};

// Returns, for example, "reshard_after_forward (True and False)".
std::string difference(const UnitSettings& own, const UnitSettings& theirs);

}  // namespace fsdp2x
