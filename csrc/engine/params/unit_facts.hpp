// Facts about a unit that its groups and their transports read.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/schedule/states.hpp"
#include "core/unit_settings.hpp"
#include "core/wire_format.hpp"
#include "engine/torch/profile_range.hpp"

namespace fsdp2x {

// Options that the user's setters change, read at each use. They exist before the unit does, and outlive it.
struct UnitOptions : ScheduleOptions {
  bool reduce_unused_params = false;
  bool keep_unsharded_storage = false;  // keep the same memory at every unshard
  bool cast_forward_inputs = true;
  std::optional<at::ScalarType> param_dtype;    // inputs are cast to it
  std::optional<at::ScalarType> output_dtype;   // outputs are cast to it
  std::optional<double> divide_factor;          // null: the number of ranks
  bool force_sum_reduction = false;             // sum in the collective, divide afterwards
  WireFormat wire_weights = WireFormat::plain;  // format of gathers, only over a CPU process group
  WireFormat wire_gradients = WireFormat::plain;
};

// See UnitSettings::flags. `odd_steps`: optimizers have stepped an odd number of times between passes.
inline uint32_t flags_of(const UnitOptions& options, bool odd_steps) {
  constexpr std::array<bool UnitOptions::*, 8> kFlags{
      &UnitOptions::reshard_after_forward,  &UnitOptions::reshard_without_grad, &UnitOptions::reshard_after_backward,
      &UnitOptions::requires_gradient_sync, &UnitOptions::requires_all_reduce,  &UnitOptions::reduce_unused_params,
      &UnitOptions::unshard_in_backward,    &UnitOptions::force_sum_reduction,
  };
  static_assert(kFlags.size() + 1 == kUnitFlagNames.size());
  uint32_t flags = static_cast<uint32_t>(odd_steps) << kFlags.size();
  for (size_t i = 0; i < kFlags.size(); ++i) {
    if (options.*kFlags[i]) flags |= uint32_t{1} << i;
  }
  return flags;
}

class UnitFacts : public ScheduledUnit {
 public:
  RangeNames ranges;
  UnitOptions& options;

 protected:
  UnitFacts(std::string unit_name, const std::shared_ptr<UnitOptions>& unit_options)
      : ScheduledUnit(unit_name, *unit_options), ranges(unit_name), options(*unit_options), options_(unit_options) {}

 private:
  std::shared_ptr<UnitOptions> options_;  // the user's object, which setters change
};

}  // namespace fsdp2x
