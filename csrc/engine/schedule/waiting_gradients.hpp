// Access of the user to gradients that wait for a reduction or an all-reduce. With the GIL.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/schedule/reductions.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

// The packed gradients of the group, whole and by parameter. From now on they are outside of the transport. Empty:
// nothing is packed.
std::vector<at::Tensor>& show_packed(ParamGroup& group);
// Adds a gradient to what is shown.
void add_to_shown(ParamGroup& group, size_t param, const at::Tensor& gradient);

class WaitingGradients {
 public:
  // The sum of whole gradients in the reduce dtype, flat for complex ones. From then on it is what is reduced, and
  // later backwards add to it. Undefined: there is none.
  static at::Tensor unreduced(ParamGroup& group, size_t param);
  // Rows that wait for the all-reduce, flat; on an accelerator until the next backward. Undefined: there are none.
  static at::Tensor partial_rows(ParamGroup& group, size_t param);
  // Zeros both for the parameters of the group in `which`. `drops`: there is no gradient instead.
  static void clear(Reductions& reductions, ParamGroup& group, const std::vector<bool>& which, bool drops);
  // An optimizer zeroed `.grad` of some of them, and did not see these. Warned of once, by the next forward or backward
  // before which they are neither reduced nor cleared.
  void note_zeroed(ParamGroup& group);
  void warn_of_zeroed(const ScheduledUnits& units);

 private:
  bool zeroed_ = false;
  bool has_warned_ = false;
};

}  // namespace fsdp2x
