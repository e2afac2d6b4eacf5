// The transport on an accelerator: passes the root's calls to its parts.
#include "engine/transport/device/device_transport.hpp"

#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace fsdp2x {

DeviceTransport::DeviceTransport(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer,
                                 size_t pack_below_bytes, PieceSizes pieces)
    : context_(std::move(collectives), std::move(layer)),
      memory_(context_),
      host_shards_(context_),
      gathers_(context_, host_shards_, pack_below_bytes),
      packing_(context_, memory_, pieces),
      reductions_(context_, memory_, host_shards_) {}

DeviceTransport::~DeviceTransport() {
  // Shard and gradient pools are freed after the transport. Before their memory is reused, the lanes must be done with
  // it.
  try {
    for (const Lane lane : {Lane::copy_in, Lane::gather, Lane::reduce, Lane::all_reduce, Lane::copy_out}) {
      context_.join(lane);
    }
  } catch (const std::exception&) {
    // The device is gone, and its memory with it.
  }
}

void DeviceTransport::register_group(const std::shared_ptr<ParamGroup>& group) {
  group->set_index(static_cast<uint32_t>(groups_.size()));
  groups_.push_back(group);
  host_shards_.register_group(*group);
  gathers_.register_group(*group);
  packing_.register_group(*group);
  reductions_.register_group();
  group->gradients().set_blocks_stay(group->offloads());
  group->gradients().set_reduces_in_place(!group->offloads());
}

void DeviceTransport::begin_forward(const PyRef& after) {
  if (memory_.are_on_their_way()) reductions_.end();  // left by a backward that raised
  host_shards_.may_change();
  gathers_.set_keeps(context_.keeps() || after);
  host_shards_.set_keeps(context_.keeps() || after);
  if (!after) {
    context_.follow_compute(Lane::copy_in);
    return;
  }
  {
    const LaneScope scope(context_.layer(), Lane::copy_in);
    pybind11::gil_scoped_acquire gil;
    const PyRef done = PyRef::steal(PyObject_CallMethod(after.get(), "wait", nullptr));
    if (!done) throw_python_error();
  }
  if (gathers_.has_views()) context_.join(Lane::copy_in);
}

void DeviceTransport::end_forward() {
  if (host_shards_.exist()) context_.host_waits_for(Lane::copy_in);
}

void DeviceTransport::end_backward() {
  end_forward();  // gathers of this backward have read the shards too
  host_shards_.may_change();
  reductions_.end();
}

bool DeviceTransport::needs_room(const ParamGroup& group, std::optional<size_t> param) {
  return group.is_posted() ? memory_.needs_room_beside() : packing_.needs_room(group, param);
}

void DeviceTransport::make_room(ParamGroup& group) {
  const ProfileRange range(group.unit().ranges.post_backward_rs_wait);
  if (group.is_posted()) {  // while its reduction runs, the compute lane waits for the one before
    memory_.make_room_beside();
  } else {
    packing_.make_room(group);
  }
}

bool DeviceTransport::needs_empty_reduction(const ParamGroup& group) const {
  // Rows that wait for the all-reduce, and parameters that are reduced as zeros, do not need a gradient of this
  // backward.
  const bool has_partial = reductions_.has_partial(group) && group.options().requires_all_reduce;
  return has_partial || group.reduces_unused();
}

Transport::Finished DeviceTransport::finish_reduce(ParamGroup& group, bool /*flush*/) {
  Finished finished;
  finished.rows = reductions_.finish(group);
  return finished;
}

bool DeviceTransport::abandon_reduce(ParamGroup& group) {
  const bool was_packed = packing_.drop(group);
  reductions_.drop(group);
  if (group.offloads()) context_.host_waits_for(Lane::copy_in);  // the user may write to the shards next
  return was_packed || group.is_posted();
}

void DeviceTransport::release_idle() {
  reductions_.end();
  reductions_.release_idle();
  host_shards_.release_idle();
  for (DeviceBuffers* buffers : context_.all_buffers()) buffers->drop_idle();
  context_.tally().forget_peak();
  gathers_.slots().forget_peak();
}

bool DeviceTransport::frees_gradients(const ParamGroup& group) {
  return !group.offloads() && !context_.layer().in_capture();  // a graph remembers addresses
}

TransportStats DeviceTransport::stats() const {
  TransportStats stats;
  const DeviceBuffers& slots = gathers_.slots();
  stats.gather_slots_owned = slots.ledger().num_owned();
  stats.gather_slot_bytes = slots.ledger().standing_bytes();
  stats.peak_gather_bytes = slots.ledger().peak_owned_bytes();
  stats.scratch_slots_owned = packing_.num_open();
  stats.scratch_bytes = context_.tally().peak_bytes();
  stats.wire_bytes = reductions_.wire_bytes();
  stats.resident_shard_bytes = host_shards_.residents().ledger().bytes();
  for (const DeviceBuffers* buffers : context_.all_buffers()) {
    stats.num_allocations += buffers->ledger().num_allocations();
  }
  stats.owners = slots.owners();
  return stats;
}

std::vector<Transport::Loan> DeviceTransport::loans() const {
  std::vector<Loan> found;
  for (const DeviceBuffers* buffers : context_.all_buffers()) {
    for (const auto& buffer : buffers->all()) {
      if (buffer->memory.defined()) {
        found.push_back({buffers->name(), buffer->owner, buffer->memory.const_data_ptr(), buffer->memory.nbytes()});
      }
    }
  }
  return found;
}

}  // namespace fsdp2x
