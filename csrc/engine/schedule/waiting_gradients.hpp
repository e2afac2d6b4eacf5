// Gives users access to gradients that wait for a reduction or an all-reduce. Needs the GIL.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/schedule/reductions.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

// Takes the packed gradients of the group out of the transport and returns them, full and by parameter. Empty: nothing
// is packed.
std::vector<at::Tensor>& show_packed(ParamGroup& group);
// Adds a gradient to the shown ones.
void add_to_shown(ParamGroup& group, size_t param, const at::Tensor& gradient);

class WaitingGradients {
 public:
  // Returns the sum of full gradients in the reduce dtype, flat for complex ones. From then on this tensor is reduced,
  // and later backwards add to it. Undefined: there is none.
  static at::Tensor unreduced(ParamGroup& group, size_t param);
  // Returns rows that wait for the all-reduce, flat. On an accelerator they are valid until the next backward.
  // Undefined: there are none.
  static at::Tensor partial_rows(ParamGroup& group, size_t param);
  // Zeros both for the group's parameters in `which`. `drops`: removes the gradients instead.
  static void clear(Reductions& reductions, ParamGroup& group, const std::vector<bool>& which, bool drops);
  // Notes that an optimizer zeroed `.grad` of some parameters and missed these gradients. If they are neither reduced
  // nor cleared, the next forward or backward warns once.
  void note_zeroed(ParamGroup& group);
  void warn_of_zeroed(const ScheduledUnits& units);

 private:
  bool zeroed_ = false;
  bool has_warned_ = false;
};

}  // namespace fsdp2x
