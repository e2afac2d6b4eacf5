// Which memory each transport takes and frees, and when, in bytes only. Slots, buffers and reductions on their way are
// counted by the classes that the transports of csrc/engine/transport allocate by.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "core/buffers.hpp"
#include "core/reduction_queue.hpp"
#include "core/schedule/states.hpp"
#include "core/slots.hpp"

namespace fsdp2x {

// A group of parameters on one rank, in bytes.
struct GroupBytes {
  size_t shard_pool = 0;
  size_t slot = 0;
  size_t scratch = 0;         // packed gradients, where peers read them
  size_t wide_scratch = 0;    // the same without gradient sync, where others are added to them
  size_t gather_segment = 0;  // of a rank, in what a process group gathers
  size_t reduce_segment = 0;  // of a rank, in what a process group reduces
  size_t coded_reduce = 0;    // of a rank, in an all-to-all in a wire format; 0: reductions travel as they are
  size_t staging = 0;         // of all ranks, in what a device gathers packed
  size_t gradient = 0;        // of autograd: the largest, on a device all of them
  size_t gradient_pool = 0;
  size_t reduced = 0;  // this rank's reduced rows
  size_t landing = 0;  // where they lie on the host until it has cast them; 0: they are the gradients

  bool is_trainable = false;
  bool reduces_in_place = false;  // the reduced rows are the gradients, on a device
  bool offloads = false;          // shards and gradients are in host memory
  bool keeps_shards = false;      // and the device has a copy of the shards
  bool rests = false;             // its shards are rows of the slot that it is gathered in
  bool reduces_unused = false;
};

class PlannedGroup final : public ScheduledGroup {
 public:
  PlannedGroup(size_t number, std::string name, GroupBytes bytes) : number(number), bytes(bytes), name_(name) {}
  const std::string& name() const override { return name_; }

  const size_t number;  // of all groups of the plan
  const GroupBytes bytes;

 private:
  std::string name_;
};

// The ranks that share a transport.
struct PlannedRanks {
  size_t world = 1;
  size_t replicas = 1;
  bool registers_memory = false;             // a device's buffers are registered with the backend, and kept
  std::optional<size_t> max_reduce_buffers;  // packed units on their way, on a device; null: by bytes
};

// The memory of one transport.
class TransportMemory {
 public:
  virtual ~TransportMemory() = default;

  virtual bool has_streams() const { return false; }
  // Gathers run ahead in forward, and reductions overlap with the next unit.
  virtual bool overlaps() const { return true; }
  // Ranks see the posts of others. Groups that are posted at the end of a backward wait for slower ranks.
  virtual bool is_shared() const { return false; }

  virtual void begin_gather(const PlannedGroup& group) = 0;
  virtual void finish_gather(const PlannedGroup& /*group*/) {}
  virtual void release_gather(const PlannedGroup& group) = 0;

  // The first gradient of a group is packed. `syncs`: this backward reduces it.
  virtual void open(const PlannedGroup& /*group*/, bool /*syncs*/) {}
  // Gradients wait for a later backward. Returns whether those of autograd are freed.
  virtual bool pack_pending(const PlannedGroup& /*group*/) { return false; }
  // Whether gradients are packed into the gradient pool.
  virtual bool packs_into_pool(const PlannedGroup& /*group*/) const { return false; }
  virtual bool needs_room(const PlannedGroup& group, bool for_gradient) = 0;
  virtual void make_room(const PlannedGroup& /*group*/) {}
  virtual void begin_reduce(const PlannedGroup& /*group*/) {}
  // Takes the memory that the collective writes to, after the gradients are packed and freed.
  virtual void take_rows(const PlannedGroup& /*group*/) {}
  virtual void finish_reduce(const PlannedGroup& group) = 0;
  virtual void begin_download(const PlannedGroup& /*group*/) {}
  virtual void finish_download(const PlannedGroup& /*group*/) {}
  virtual size_t max_downloads() const { return 1; }
  virtual void end_backward() {}
  // From now on a reduction adds to what is in the gradient pool, until forget_gradients.
  virtual void note_gradients(const PlannedGroup& /*group*/) {}
  virtual void forget_gradients() {}

  virtual size_t gather_slot_bytes() const = 0;
  virtual size_t peak_gather_bytes() const = 0;
  // This rank's part of slots that ranks share; 0 where the slots are out of the memory of the scratches.
  virtual size_t own_gather_slot_bytes() const { return 0; }
  virtual size_t scratch_bytes() const = 0;
  virtual size_t resident_shard_bytes() const { return 0; }
  virtual size_t landing_bytes() const { return 0; }
};

// Shared memory of one host's ranks, or one rank's own: gather slots and reduce scratches of whole pages.
class SharedTransportMemory final : public TransportMemory {
 public:
  SharedTransportMemory(const PlannedRanks& ranks, size_t page_bytes);

  bool is_shared() const override { return world_ > 1; }
  void begin_gather(const PlannedGroup& group) override;
  void release_gather(const PlannedGroup& group) override;
  void open(const PlannedGroup& group, bool syncs) override;
  bool needs_room(const PlannedGroup& group, bool for_gradient) override;
  void begin_reduce(const PlannedGroup& group) override { open(group, /*syncs=*/true); }
  void finish_reduce(const PlannedGroup& group) override;
  size_t gather_slot_bytes() const override { return slots_.arena_bytes(); }
  size_t peak_gather_bytes() const override { return slots_.peak_owned_bytes(); }
  size_t own_gather_slot_bytes() const override { return (slots_.arena_bytes() + world_ - 1) / world_; }
  size_t scratch_bytes() const override { return scratches_.arena_bytes(); }

 private:
  size_t world_;
  SlotLedger slots_, scratches_;
  std::map<size_t, int> slot_of_, scratch_of_;  // by the number of the group
};

// A process group of the CPU: nothing is kept, and a reduction is finished at once. Its scratch bytes are the most
// memory there ever was, that of the slots included.
class GroupTransportMemory final : public TransportMemory {
 public:
  explicit GroupTransportMemory(const PlannedRanks& ranks);

  bool overlaps() const override { return false; }
  void begin_gather(const PlannedGroup& group) override;
  void finish_gather(const PlannedGroup& group) override;
  void release_gather(const PlannedGroup& group) override;
  void open(const PlannedGroup& group, bool syncs) override;
  bool needs_room(const PlannedGroup& group, bool for_gradient) override;
  void begin_reduce(const PlannedGroup& group) override;
  void finish_reduce(const PlannedGroup& group) override;
  size_t gather_slot_bytes() const override { return slots_.arena_bytes(); }
  size_t peak_gather_bytes() const override { return slots_.peak_owned_bytes(); }
  size_t scratch_bytes() const override { return tally_.peak_bytes(); }

 private:
  // Memory of a group.
  struct Held {
    int slot = -1;
    size_t gathered = 0, slot_bytes = 0, packed = 0, sent = 0, received = 0, rows = 0;
  };
  void hold(size_t& place, size_t bytes);
  void drop(size_t& place) { tally_.give_back(std::exchange(place, 0)); }
  void open_slot(const PlannedGroup& group);

  size_t world_;
  SlotLedger slots_;
  MemoryTally tally_;
  std::map<size_t, Held> held_;
};

// A process group of an accelerator: slots, what is gathered packed, gradients on their way, reduced rows, uploads; and
// what the host keeps of groups that offload, until it has cast the rows that have arrived.
class DeviceTransportMemory final : public TransportMemory {
 public:
  // `whole`: counts what a step holds of the device at once, with what its caller adds, and outlives this.
  DeviceTransportMemory(const PlannedRanks& ranks, MemoryTally& whole);

  bool has_streams() const override { return true; }
  void begin_gather(const PlannedGroup& group) override;
  void finish_gather(const PlannedGroup& group) override;
  void release_gather(const PlannedGroup& group) override;
  bool pack_pending(const PlannedGroup& group) override;
  bool packs_into_pool(const PlannedGroup& group) const override;
  bool needs_room(const PlannedGroup& group, bool for_gradient) override;
  void make_room(const PlannedGroup& group) override;
  void begin_reduce(const PlannedGroup& group) override;
  void take_rows(const PlannedGroup& group) override;
  void finish_reduce(const PlannedGroup& group) override;
  void begin_download(const PlannedGroup& group) override;
  void finish_download(const PlannedGroup& group) override;
  size_t max_downloads() const override { return queue_.max_buffers(); }
  void end_backward() override { retire(0); }
  void note_gradients(const PlannedGroup& group) override { summed_.insert(group.number); }
  void forget_gradients() override { summed_.clear(); }
  size_t gather_slot_bytes() const override { return slots_.standing_bytes(); }
  size_t peak_gather_bytes() const override { return slots_.peak_owned_bytes(); }
  size_t own_gather_slot_bytes() const override { return gather_slot_bytes(); }
  size_t scratch_bytes() const override { return tally_.peak_bytes(); }
  size_t resident_shard_bytes() const override { return residents_.bytes(); }
  size_t landing_bytes() const override { return landing_bytes_; }

 private:
  // Memory of a group.
  struct Held {
    int slot = -1, upload = -1, staging = -1;
    int packed = -1;      // a buffer with gradients that came without gradient sync
    int rows = -1;        // a segment of a reduction that is not finished
    uint64_t number = 0;  // of its last reduction
    bool is_resident = false;
    size_t landing = 0;  // of the host's block for rows on their way
  };
  struct Pools {
    Pools(bool keeps, MemoryTally* tally)
        : staging(keeps, tally), buffers(keeps, tally), segments(keeps, tally), uploads(keeps, tally) {}
    BufferLedger staging, buffers, segments, uploads;
  };
  size_t packed_bytes(const PlannedGroup& group) const { return group.bytes.reduce_segment * world_; }
  // How many reductions may be on their way when the gradients of the group are packed for one more.
  size_t allowed_before(const PlannedGroup& group);
  void retire(size_t num);
  bool ends_in_pool(const PlannedGroup& group) const;

  size_t world_, replicas_;
  MemoryTally tally_;
  BufferLedger slots_, residents_;
  Pools pools_;
  ReductionQueue queue_;
  std::map<size_t, Held> held_;  // by the number of the group
  std::set<size_t> summed_;      // whose gradients of this step are in their pool already
  std::vector<size_t> blocks_;   // free ones of the host
  size_t landing_bytes_ = 0;
};

}  // namespace fsdp2x
