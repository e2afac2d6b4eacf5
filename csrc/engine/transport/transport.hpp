// How a root moves bytes between ranks: one interface, three implementations (shared memory or one rank; a process
// group of the CPU; an accelerator). A transport is told what to do and answers what has become of it: it knows groups
// of parameters, and neither units nor roots.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/forward_counts.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

namespace cpu {
class ShmGroup;
}

struct TransportStats {
  size_t gather_slots_owned = 0, gather_slot_bytes = 0, peak_gather_bytes = 0;
  size_t scratch_slots_owned = 0, scratch_bytes = 0;
  size_t resident_shard_bytes = 0;  // on a device, of shards that are the host's
  size_t wire_bytes = 0;            // kept for wire formats: encoded weights, and what gradients have lost
  size_t num_allocations = 0;       // blocks of memory taken and windows mapped, ever
  std::string owners;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  // Waits for a reduction where it is posted, gathers nothing ahead by a guess, keeps no memory for the next step.
  virtual bool is_synchronous() const { return false; }
  // Gives the group its index; in the same order on every rank.
  virtual void register_group(const std::shared_ptr<ParamGroup>& group) = 0;

  // A forward of the root begins: parameters may have changed since the last one, up to the event `after` (a
  // torch.Event; null: up to now).
  virtual void begin_forward(const PyRef& /*after*/) {}
  // It ends: shards in host memory may be written again.
  virtual void end_forward() {}

  // The memory by which ranks tell each other which forward or backward they have left; null where they cannot.
  virtual std::shared_ptr<cpu::ShmGroup> shared_group() const { return nullptr; }

  // --- a gather ---
  // Own rows into the slot, told to the peers; may return before the peers have written theirs. `pools_stand_still`:
  // nobody writes to shards now; otherwise the user may just have.
  virtual void begin_gather(ParamGroup& group, bool pools_stand_still) = 0;
  // All rows are there.
  virtual void finish_gather(ParamGroup& group) = 0;
  // The group no longer looks at the slot.
  virtual void release_gather(ParamGroup& group) = 0;
  // Rows from another group's slot -> the group's pool.
  virtual void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) = 0;

  // --- shards that rest where they are gathered ---
  // While nothing is gathered, for an optimizer's step: they may be written where peers read them, until the next
  // gather or ParamGroup::shards().close(). False: they rest elsewhere, or somebody still reads them.
  virtual bool open_shards(ParamGroup& /*group*/) { return false; }
  // They lie in a pool of the group's own again.
  virtual void give_back_shards(ParamGroup& /*group*/) {}

  // --- a reduction, in the order of the calls ---
  // Whether reductions that are on their way hold memory that the group needs next: to pack a gradient of `param`, or
  // (null) whatever is held of its gradients, or beside its reduction, if that is posted. The root finishes them then,
  // and calls make_room.
  virtual bool needs_room(const ParamGroup& group, std::optional<size_t> param) = 0;
  virtual void make_room(ParamGroup& group) = 0;
  // Adds a whole unsharded gradient to what is packed of the group; the first one of a parameter overwrites.
  virtual void pack(ParamGroup& group, size_t param, const at::Tensor& gradient) = 0;
  // This backward may have no more gradients for the group: what is held may be packed and freed.
  virtual void pack_pending(ParamGroup& /*group*/) {}
  // Hands over what is packed, in the reduce dtype, and holds nothing of the group from then on. Flat, by parameter;
  // undefined: nothing was packed of it.
  virtual std::vector<at::Tensor> take_packed(ParamGroup& group) = 0;
  // Tells the peers that the group's gradients are complete, or that there are none. `forwards`: that this rank has
  // run.
  virtual void begin_reduce(ParamGroup& group, ForwardCounts forwards) = 0;
  // In the root callback: the group has packed nothing, but peers may have, and they wait for this rank's word.
  virtual bool needs_empty_reduction(const ParamGroup& group) const = 0;
  // What has become of a posted reduction.
  struct Finished {
    bool is_later = false;              // a peer posts later: call again with flush
    std::unique_ptr<ReducedRows> rows;  // null: the transport keeps them for an all-reduce
  };
  virtual Finished finish_reduce(ParamGroup& group, bool flush) = 0;
  // How a reduction that began now would lay out a rank's segment.
  virtual std::shared_ptr<const Layout> segment_layout(ParamGroup& group) = 0;
  // Drops what the group has packed or posted. Returns whether there was any.
  virtual bool abandon_reduce(ParamGroup& group) = 0;
  // Where the transport reduces over replicas: what waits for that, in the order of the current stream; null: nothing.
  virtual std::unique_ptr<SegmentRows> partial(ParamGroup& /*group*/) { return nullptr; }
  // Drops it.
  virtual void drop_partial(ParamGroup& /*group*/) {}

  // In the root callback, after all reductions: the gradients may be read.
  virtual void end_backward() {}
  // Whether work is only enqueued, on streams of a device. The transport reduces over the replicas, too, then;
  // otherwise the root does.
  virtual bool has_streams() const { return false; }

  // How many packed groups may be on their way to their reduction, and how many reduced ones to the host.
  virtual void set_max_reduce_buffers(size_t /*num*/) {}
  virtual size_t max_reduce_buffers() const { return 1; }
  // Gives memory that nobody uses back to its allocator.
  virtual void release_idle() {}
  virtual void publish_progress(uint64_t position) = 0;
  // The backward ends without a reduction of `group`.
  virtual void skip_reduce(ParamGroup& /*group*/) {}
  virtual TransportStats stats() const = 0;

  // Memory that is lent to units, for memory profiles.
  struct Loan {
    std::string kind, owner;  // the last owner; empty: nobody yet
    const void* data = nullptr;
    size_t bytes = 0;
  };
  virtual std::vector<Loan> loans() const { return {}; }
};

// Why a gradient cannot be packed behind those that its group holds.
[[noreturn]] void throw_unfrozen(const ParamGroup& group, size_t param);
[[noreturn]] void throw_frozen_while_partial(const ParamGroup& group);
// Throws unless gradients are reduced in fp32, as what travels in a wire format is.
void check_wire_type(const ParamGroup& group);

}  // namespace fsdp2x
