// Moves bytes between ranks for a root: one interface, four implementations (a single rank, shared memory, a CPU
// process group, an accelerator). A transport executes calls and returns results. It knows groups of parameters, but no
// units or roots.
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
  size_t resident_shard_bytes = 0;  // copies of offloaded shards on a device
  size_t wire_bytes = 0;            // kept for wire formats: encoded weights and rounding errors of gradients
  size_t num_allocations = 0;       // total blocks of memory taken and windows mapped
  std::vector<std::string> owners;  // of slots, in words

  TransportStats& operator+=(const TransportStats& other);
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  // Returns whether it waits for a reduction where it is posted, never prefetches by a guess, and keeps no memory for
  // the next step.
  virtual bool is_synchronous() const { return false; }
  // Returns whether a prediction may prefetch the group in forward although the transport is synchronous.
  virtual bool may_overlap(const ParamGroup& /*group*/) { return false; }
  // Gives the group its index, in the same order on every rank.
  virtual void register_group(const std::shared_ptr<ParamGroup>& group) = 0;

  // Begins a forward of the root. Parameters may have changed since the last one, up to the event `after` (a
  // torch.Event; null: up to now).
  virtual void begin_forward(const PyRef& /*after*/) {}
  // Ends it, or a backward that another call will finalize: shards in CPU memory may be written again.
  virtual void end_forward() {}

  // Returns the memory by which ranks report which forward or backward they have left. Null if there is none.
  virtual std::shared_ptr<cpu::ShmGroup> shared_group() const { return nullptr; }

  // --- a gather ---
  // Writes own rows into the slot and notifies the peers. May return before the peers have written theirs.
  // `pools_stand_still`: shards are not written now. Otherwise the user may have just written them.
  virtual void begin_gather(ParamGroup& group, bool pools_stand_still) = 0;
  // Waits until all rows are there.
  virtual void finish_gather(ParamGroup& group) = 0;
  // Lets the memory that a canceled gather's extensions have go: the compute stream then is past its last use.
  virtual void settle_gather(ParamGroup& /*group*/) {}
  // Ends the group's use of the slot.
  virtual void release_gather(ParamGroup& group) = 0;
  // A unit's parameters are about to be used. The gathers that run ahead have begun, if there are any.
  virtual void end_prefetch() {}
  // Copies rows from another group's slot to the group's pool.
  virtual void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) = 0;

  // --- shards that are stored where they are gathered ---
  // Opens shards for an optimizer's step while nothing is gathered: they may be written where peers read them, until
  // the next gather or ParamGroup::shards().close(). Returns false if they are stored elsewhere or still read.
  virtual bool open_shards(ParamGroup& /*group*/) { return false; }
  // Moves them back to a separate pool of the group.
  virtual void give_back_shards(ParamGroup& /*group*/) {}

  // --- a reduction, in the order of the calls ---
  // Returns whether running reductions hold memory that the group needs next: to pack a gradient of `param`, or (null)
  // all its held gradients, or next to its posted reduction. The root then finishes them and calls make_room.
  virtual bool needs_room(const ParamGroup& group, std::optional<size_t> param) = 0;
  virtual void make_room(ParamGroup& group) = 0;
  // Adds a full unsharded gradient to the group's packed gradients. The first one of a parameter overwrites.
  virtual void pack_into_segment(ParamGroup& group, size_t param, const at::Tensor& gradient) = 0;
  // Packs and frees held gradients, since this backward may have no more gradients for the group.
  virtual void pack_pending(ParamGroup& /*group*/) {}
  // Hands over the packed gradients in the reduce dtype and keeps nothing of the group. They are flat, by parameter.
  // Undefined: nothing of that parameter was packed.
  virtual std::vector<at::Tensor> take_packed(ParamGroup& group) = 0;
  // Notifies the peers that the group's gradients are complete, or that there are none. `forwards`: how many this rank
  // has run.
  virtual void begin_reduce(ParamGroup& group, ForwardCounts forwards) = 0;
  // Called in the root callback: the group has packed nothing, but peers may have packed and wait for this rank.
  virtual bool needs_empty_reduction(const ParamGroup& group) const = 0;
  // The result of a posted reduction.
  struct Finished {
    bool is_later = false;              // a peer posts later, so call again with flush
    std::unique_ptr<ReducedRows> rows;  // null: the transport keeps them for an all-reduce
  };
  virtual Finished finish_reduce(ParamGroup& group, bool flush) = 0;
  // Returns the layout of a rank's segment for a reduction that begins now.
  virtual std::shared_ptr<const Layout> segment_layout(ParamGroup& group) = 0;
  // Drops the group's packed or posted gradients. Returns whether there were any.
  virtual bool abandon_reduce(ParamGroup& group) = 0;
  // If the transport reduces over replicas, returns the rows that wait for that, in the order of the current stream.
  // Null: none.
  virtual std::unique_ptr<SegmentRows> partial(ParamGroup& /*group*/) { return nullptr; }
  // Drops these rows.
  virtual void drop_partial(ParamGroup& /*group*/) {}

  // Called in the root callback, after all reductions: the gradients may be read.
  virtual void end_backward() {}
  // Returns whether work is only enqueued, on streams of a device. The transport then also reduces over the replicas;
  // otherwise the root does.
  virtual bool has_streams() const { return false; }

  // Sets how many packed groups may be on their way to their reduction, and how many reduced ones to the host.
  virtual void set_max_reduce_buffers(size_t /*num*/) {}
  virtual size_t max_reduce_buffers() const { return 1; }
  // Returns unused memory to its allocator.
  virtual void release_idle() {}
  // Returns whether the group's unused gradients may go back to the allocator between two passes. Memory of the CPU
  // stays, because the system clears new pages.
  virtual bool frees_gradients(const ParamGroup& /*group*/) { return false; }
  virtual void publish_progress(uint64_t position) = 0;
  // Ends the backward without a reduction of `group`.
  virtual void skip_reduce(ParamGroup& /*group*/) {}
  virtual TransportStats stats() const = 0;

  // Memory lent to units, for memory profiles.
  struct Loan {
    std::string kind, owner;  // the last owner, empty: none yet
    const void* data = nullptr;
    size_t bytes = 0;
  };
  virtual std::vector<Loan> loans() const { return {}; }
};

// Throws the reason why a gradient cannot be packed after those that its group holds.
[[noreturn]] void throw_unfrozen(const ParamGroup& group, size_t param);
[[noreturn]] void throw_frozen_while_partial(const ParamGroup& group);

// Throws the exception that a collective of `group` left in the interpreter, as `explain` words it. `operation`: for
// example "all-gather".
[[noreturn]] void throw_collective_error(const Gil& gil, const ParamGroup& group, const PyRef& explain,
                                         const std::string& operation);
// Call collective(output, input, option), without the option if it is null. Return its work, or throw as above.
PyRef call_collective(const Gil& gil, ParamGroup& group, const PyRef& collective, PyObject* output, PyObject* input,
                      const char* operation, PyObject* option = nullptr);
PyRef call_collective(const Gil& gil, ParamGroup& group, const PyRef& collective, const at::Tensor& output,
                      const at::Tensor& input, const char* operation, PyObject* option = nullptr);
// All-reduces rows over the replicas.
void call_all_reduce(ParamGroup& group, const at::Tensor& rows);

}  // namespace fsdp2x
