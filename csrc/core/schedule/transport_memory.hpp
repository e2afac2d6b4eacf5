// The memory that each transport takes and frees, in bytes only. The transports of csrc/engine/transport allocate with
// the same classes for slots, buffers, and running reductions.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
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
  size_t scratch = 0;         // packed gradients that peers read
  size_t wide_scratch = 0;    // the same without gradient sync, when others are added to them
  size_t gather_segment = 0;  // of a rank, gathered by a process group
  size_t reduce_segment = 0;  // of a rank, reduced by a process group
  size_t reduce_buffer = 0;   // of all ranks, for what a device reduces at once: all, or a piece
  size_t coded_reduce = 0;    // of a rank, in an all-to-all in a wire format, 0: no wire format
  size_t received = 0;        // of a reduction over a CPU's process group
  size_t staging = 0;         // of all ranks, for parameters that are gathered packed, not in place
  size_t gradient = 0;        // of autograd: the largest, on a device all of them
  size_t gradient_pool = 0;
  size_t reduced = 0;  // this rank's reduced rows
  size_t landing = 0;  // memory on the host until it has cast them, 0: they are the gradients

  bool is_trainable = false;
  bool reduces_in_place = false;  // the reduced rows are the gradients, on a device
  bool offloads = false;          // shards and gradients are in CPU memory
  bool keeps_shards = false;      // and the device has a copy of the shards
  bool rests = false;  // its shards are rows of the slot that it is gathered in, or (on a device) all of them
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
  bool registers_memory = false;             // a device's buffers are registered with the backend and kept
  std::optional<size_t> max_reduce_buffers;  // running packed units on a device, null: limited by bytes
};

// The memory of one transport.
class TransportMemory {
 public:
  virtual ~TransportMemory() = default;

  // Whether gathers run ahead in forward, and reductions overlap with the next unit.
  virtual bool overlaps() const { return true; }
  // Whether forward prefetches the group although the transport does not overlap.
  virtual bool may_overlap(const PlannedGroup& /*group*/) const { return false; }
  // Whether ranks see the posts of others. Groups posted at the end of a backward wait for slower ranks.
  virtual bool is_shared() const { return false; }

  virtual void begin_gather(const PlannedGroup& group) = 0;
  virtual void finish_gather(const PlannedGroup& /*group*/) {}
  virtual void release_gather(const PlannedGroup& group) = 0;

  // Packs the first gradient of a group. `syncs`: this backward reduces it.
  virtual void open(const PlannedGroup& /*group*/, bool /*syncs*/) {}
  // Keeps gradients for a later backward. Returns whether those of autograd are freed.
  virtual bool pack_pending(const PlannedGroup& /*group*/) { return false; }
  // Returns whether gradients are packed into the gradient pool.
  virtual bool packs_into_pool(const PlannedGroup& /*group*/) const { return false; }
  virtual bool needs_room(const PlannedGroup& group, bool for_gradient) = 0;
  virtual void make_room(const PlannedGroup& /*group*/) {}
  // `gradient_bytes`: of autograd's unpacked gradients. Returns whether it keeps these until it is done.
  virtual bool begin_reduce(const PlannedGroup& /*group*/, size_t /*gradient_bytes*/) { return false; }
  // Takes the memory that the collective writes to, after the gradients are packed and freed.
  virtual void take_rows(const PlannedGroup& /*group*/) {}
  virtual void finish_reduce(const PlannedGroup& group) = 0;
  virtual void begin_download(const PlannedGroup& /*group*/) {}
  virtual void finish_download(const PlannedGroup& /*group*/) {}
  virtual size_t max_downloads() const { return 1; }
  virtual void end_backward() {}
  virtual void set_all_reduces(bool /*all_reduces*/) {}
  // Returns whether it keeps the rows of a reduction until another backward all-reduces them.
  virtual bool keeps_partial() const { return false; }
  // Makes reductions add to the contents of the gradient pool, until forget_gradients.
  virtual void note_gradients(const PlannedGroup& /*group*/) {}
  virtual void forget_gradients() {}

  virtual size_t gather_slot_bytes() const = 0;
  virtual size_t peak_gather_bytes() const = 0;
  // Returns this rank's part of slots that ranks share. 0 if the slots and scratches share memory.
  virtual size_t own_gather_slot_bytes() const { return 0; }
  virtual size_t scratch_bytes() const = 0;
  virtual size_t resident_shard_bytes() const { return 0; }
  virtual size_t landing_bytes() const { return 0; }
};

// Memory shared by one host's ranks, or private to one rank: gather slots and reduce scratches of complete pages.
class SharedTransportMemory final : public TransportMemory {
 public:
  SharedTransportMemory(const PlannedRanks& ranks, size_t page_bytes);

  bool is_shared() const override { return world_ > 1; }
  void begin_gather(const PlannedGroup& group) override;
  void release_gather(const PlannedGroup& group) override;
  void open(const PlannedGroup& group, bool syncs) override;
  bool needs_room(const PlannedGroup& group, bool for_gradient) override;
  bool begin_reduce(const PlannedGroup& group, size_t) override {
    open(group, /*syncs=*/true);
    return false;
  }
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

// A CPU process group: it keeps nothing and finishes each reduction immediately. Its scratch bytes are the peak of all
// memory, including slots.
class GroupTransportMemory final : public TransportMemory {
 public:
  explicit GroupTransportMemory(const PlannedRanks& ranks);

  bool overlaps() const override { return false; }
  // True if some of its parameters are gathered in place.
  bool may_overlap(const PlannedGroup& group) const override {
    return world_ > 1 && group.bytes.staging < group.bytes.gather_segment * world_;
  }
  void begin_gather(const PlannedGroup& group) override;
  void finish_gather(const PlannedGroup& group) override;
  void release_gather(const PlannedGroup& group) override;
  void open(const PlannedGroup& group, bool syncs) override;
  bool needs_room(const PlannedGroup& group, bool for_gradient) override;
  bool begin_reduce(const PlannedGroup& group, size_t gradient_bytes) override;
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

// A process group of an accelerator: slots, packed gathers, gradients on their way, reduced rows, and uploads. Also
// counts CPU memory of groups that offload, until the host has cast their rows.
class DeviceTransportMemory final : public TransportMemory {
 public:
  // `whole`: counts what a step holds of the device at once, together with the caller's memory. It must outlive this
  // object.
  DeviceTransportMemory(const PlannedRanks& ranks, MemoryTally& whole);

  void begin_gather(const PlannedGroup& group) override;
  void finish_gather(const PlannedGroup& group) override;
  void release_gather(const PlannedGroup& group) override;
  bool pack_pending(const PlannedGroup& group) override;
  bool packs_into_pool(const PlannedGroup& group) const override;
  bool needs_room(const PlannedGroup& group, bool for_gradient) override;
  void make_room(const PlannedGroup& group) override;
  bool begin_reduce(const PlannedGroup& group, size_t gradient_bytes) override;
  void take_rows(const PlannedGroup& group) override;
  void finish_reduce(const PlannedGroup& group) override;
  void begin_download(const PlannedGroup& group) override;
  void finish_download(const PlannedGroup& group) override;
  size_t max_downloads() const override { return queue_.max_buffers(); }
  void end_backward() override { retire(0); }
  void set_all_reduces(bool all_reduces) override { all_reduces_ = all_reduces; }
  bool keeps_partial() const override { return replicas_ > 1 && !all_reduces_; }
  void note_gradients(const PlannedGroup& group) override {
    if (!keeps_partial()) summed_.insert(group.number);
  }
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
    int packed = -1;      // a buffer with gradients from backwards without gradient sync
    int rows = -1;        // a segment of a reduction that is not finished
    int partial = -1;     // a segment with rows that wait for an all-reduce
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
  // Returns whether a reduction that begins now packs its pieces one by one.
  bool packs_pieces(const PlannedGroup& group);
  // Returns how many reductions may run when the gradients of the group are packed for another one.
  size_t allowed_before(const PlannedGroup& group);
  void retire(size_t num);
  bool ends_in_pool(const PlannedGroup& group) const;

  size_t world_, replicas_;
  bool all_reduces_ = true;
  MemoryTally& whole_;
  MemoryTally tally_;
  BufferLedger slots_, residents_;
  Pools pools_;
  ReductionQueue queue_;
  std::map<size_t, Held> held_;           // by the number of the group
  std::map<uint64_t, size_t> gradients_;  // bytes that reductions keep, by their number
  std::set<size_t> summed_;               // groups whose gradients of this step are already in their pool
  std::vector<size_t> blocks_;            // free blocks of the host
  size_t landing_bytes_ = 0;
};

// Returns the memory of the transport whose Transport::name is `name`. `whole`: see DeviceTransportMemory.
std::unique_ptr<TransportMemory> make_transport_memory(const std::string& name, const PlannedRanks& ranks,
                                                       size_t page_bytes, MemoryTally& whole);

}  // namespace fsdp2x
