// How a root moves bytes between ranks: one interface, two implementations (shared memory or one rank; process group).
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <vector>

#include "core/slots.hpp"
#include "engine/memory/copy_program.hpp"
#include "engine/params/gradients.hpp"

namespace fsdp2x {

class ParamGroup;
class Unit;

namespace cpu {
class ShmGroup;
}

// What of a group lies in host memory, the pool among it, while the group is gathered and reduced on a device.
enum class Offload : uint8_t {
  nothing,
  gradients,   // shards and gradients; the device keeps a copy of the shards from a forward until its backward ends
  everything,  // shards and gradients; the device gets the shards for each gather
};

// The gather slot a group owns between begin_unshard and reshard.
struct GatherSlot {
  Slot slot;
  Slot kept;  // stays with the group between reshard and the next unshard (UnitOptions::keep_unsharded_storage)
  uint64_t sequence = 0;
  std::byte* write = nullptr;  // the engine's view
  std::byte* read = nullptr;   // the tensors' view
};

// How a gradient lies in a scratch: not at all, in ParamShape::packed(), in the reduce dtype of a wide scratch.
enum Packed : uint8_t { kNotPacked = 0, kPacked = 1, kPackedWide = 2 };

// Which backwards a sum of gradients is made of, by the root's number of them: what an exception spoils with the
// gradients of the backward that raised.
struct Parts {
  uint64_t backward = 0;       // the last that added something
  bool holds_earlier = false;  // there was something before that one

  void add(uint64_t number, bool is_first) {
    if (backward == number) return;
    backward = number;
    holds_earlier = !is_first;
  }
};

// A group's packed gradients, from the first pack until the reduction is finished.
struct Scratch {
  Slot slot;
  std::byte* data = nullptr;
  std::vector<uint8_t> filled;  // per parameter: how it was packed, see Packed
  bool wide = false;            // everything is in the reduce dtype
  bool open = false;
  bool posted = false;
  bool pending_flush = false;  // a peer posts this group only in its root callback
  bool reduced_this_backward = false;
  uint64_t epoch = 0;
  Parts parts;
};

struct TransportStats {
  size_t gather_slots_owned = 0, gather_slot_bytes = 0, peak_gather_bytes = 0;
  size_t scratch_slots_owned = 0, scratch_bytes = 0;
  size_t resident_shard_bytes = 0;  // on a device, of shards that are the host's
  size_t num_allocations = 0;       // blocks of memory taken and windows mapped, ever
  std::string owners;
};

// What a summing collective divides by beforehand: about the square root of the divisor for fp16, whose sums overflow
// early, as upstream does; the rest is divided afterwards.
double pre_divisor(const ParamGroup& group);

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  // Frugal: a reduction is waited for at once, no gather runs ahead by a guess, no memory is kept for the next step.
  virtual bool is_frugal() const { return false; }
  // Gives the group its index; in the same order on every rank.
  virtual void register_group(ParamGroup& group) = 0;

  // A forward of the root begins: parameters may have changed since the last one, up to the event `after` (a
  // torch.Event; null: up to now).
  virtual void begin_forward(const PyRef& /*after*/) {}
  // It ends: shards in host memory may be written again.
  virtual void end_forward() {}

  // The memory by which ranks tell each other which forward or backward they have left; null where they cannot.
  virtual std::shared_ptr<cpu::ShmGroup> shared_group() const { return nullptr; }

  // Own rows into the slot, told to the peers; may return before the peers have written theirs.
  virtual void begin_gather(ParamGroup& group) = 0;
  // All rows are there.
  virtual void finish_gather(ParamGroup& group) = 0;
  // The group no longer looks at the slot.
  virtual void release_gather(ParamGroup& group) = 0;

  // Adds a whole unsharded gradient to the group's scratch, which is not posted (opens it first); the first pack of a
  // parameter overwrites.
  virtual void pack(ParamGroup& group, size_t param, const at::Tensor& gradient) = 0;
  // Rows from another group's slot -> the group's pool.
  virtual void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) = 0;

  // This backward may have no more gradients for the group: what is held may be packed and freed.
  virtual void settle(ParamGroup& /*group*/) {}
  // Tells the peers that the scratch is complete (or empty, when it is not open).
  virtual void begin_reduce(ParamGroup& group) = 0;
  // In the root callback: the group has packed nothing, but peers may have, and they wait for this rank's word.
  virtual bool needs_empty_reduction(const ParamGroup& group) const = 0;
  // False: a peer posts later, call again with flush. True: the gradients are attached and the scratch is closed.
  virtual bool finish_reduce(ParamGroup& group, bool flush) = 0;
  // How a reduction that began now would lay out a rank's segment.
  virtual std::shared_ptr<const Layout> segment_layout(ParamGroup& group) = 0;
  // Drops what the group has packed or reduced, and is not in `.grad`. Returns whether there was any.
  virtual bool abandon_reduce(ParamGroup& group) = 0;
  // Where finish_reduce reduces over replicas: drops what waits for that.
  virtual void drop_partial(ParamGroup& /*group*/) {}

  // In the root callback, after all reductions: the gradients may be read.
  virtual void end_backward() {}
  // At the end of a backward, and of a forward without gradients: throws when a collective of this rank was enqueued
  // and has failed since, where that can be.
  virtual void check_collectives() {}
  // Whether work is only enqueued, on streams of a device. finish_reduce has reduced over the replicas, too, then;
  // otherwise the root does.
  virtual bool has_streams() const { return false; }

  // How many packed groups may be on their way to their reduction.
  virtual void set_max_reduce_buffers(size_t /*num*/) {}
  // Gives memory that nobody uses back to its allocator.
  virtual void release_idle() {}
  virtual void publish_progress(uint64_t position) = 0;
  virtual TransportStats stats() const = 0;

  // Memory that is lent to units, for memory profiles.
  struct Loan {
    std::string kind, owner;  // the last owner; empty: nobody yet
    const void* data = nullptr;
    size_t bytes = 0;
  };
  virtual std::vector<Loan> loans() const { return {}; }
};

}  // namespace fsdp2x
