// Messages that transports share.
#include "engine/transport/transport.hpp"

#include "core/error.hpp"

namespace fsdp2x {

TransportStats& TransportStats::operator+=(const TransportStats& other) {
  gather_slots_owned += other.gather_slots_owned;
  gather_slot_bytes += other.gather_slot_bytes;
  peak_gather_bytes += other.peak_gather_bytes;
  scratch_slots_owned += other.scratch_slots_owned;
  scratch_bytes += other.scratch_bytes;
  resident_shard_bytes += other.resident_shard_bytes;
  wire_bytes += other.wire_bytes;
  num_allocations += other.num_allocations;
  owners.insert(owners.end(), other.owners.begin(), other.owners.end());
  return *this;
}

void throw_unfrozen(const ParamGroup& group, size_t param) {
  throw Error("fsdp2x: parameter '" + group.params()[param].fqn() +
              "' was unfrozen while its unit holds unreduced gradients. Change requires_grad between optimizer steps.");
}

void throw_frozen_while_partial(const ParamGroup& group) {
  throw Error("fsdp2x: parameters of unit '" + group.name() +
              "' were frozen or unfrozen while gradients wait for their all-reduce. Change requires_grad after a "
              "backward with set_requires_all_reduce(True).");
}

void check_wire_type(const ParamGroup& group) {
  if (group.reduce_type() == DType::f32) return;
  throw Error("fsdp2x: gradients of unit '" + group.name() + "' are reduced in " +
              std::string(dtype_name(group.reduce_type())) +
              ", but wire formats need float32. Use MixedPrecisionPolicy(reduce_dtype=torch.float32).");
}

}  // namespace fsdp2x
