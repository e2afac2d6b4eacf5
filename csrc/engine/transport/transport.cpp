// What transports say in the same words.
#include "engine/transport/transport.hpp"

#include "core/error.hpp"

namespace fsdp2x {

void throw_unfrozen(const ParamGroup& group, size_t param) {
  throw Error("fsdp2x: '" + group.params()[param].fqn() +
              "' was unfrozen while its unit holds unreduced gradients; change requires_grad between optimizer steps");
}

void throw_frozen_while_partial(const ParamGroup& group) {
  throw Error("fsdp2x: parameters of unit '" + group.name() +
              "' were frozen or unfrozen while gradients wait for their all-reduce; change requires_grad after a "
              "backward with set_requires_all_reduce(True)");
}

}  // namespace fsdp2x
