// Ranks of the model. They use the protocol as the engine does (engine/transport/shm/shared_memory_transport.cpp),
// without tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/slots.hpp"
#include "model/explorer.hpp"
#include "shm/shm_map.hpp"
#include "shm/shm_protocol.hpp"

namespace fsdp2x::model {

using cpu::GatherPost;
using cpu::Joined;
using cpu::ShmProtocol;

inline constexpr size_t kSlotBytes = 64;  // bytes of a unit, and of the ledgers' pages
inline constexpr uint64_t kTag = 7;

// State that the ranks of a run share.
struct World {
  explicit World(int num) : num_ranks(num), map(num, size_t{1} << 30), control(map.control_bytes() / sizeof(Line)) {}
  std::byte* bytes() const { return const_cast<std::byte*>(control.data()->bytes); }
  struct alignas(128) Line {
    std::byte bytes[128] = {};
  };
  int num_ranks;
  cpu::ShmMap map;
  std::vector<Line> control;
  // [slot][rank]: rows; [rank][slot]: scratches.
  std::array<std::array<Cell, 4>, 4> slots;
  std::array<std::array<Cell, 4>, 4> scratches;
};

class ModelRank {
 public:
  ModelRank(World& world, int rank, int num_ranks) : world_(world), gathers_(kSlotBytes), scratches_(kSlotBytes) {
    cpu::ShmOptions options;
    options.rank = rank;
    options.world = num_ranks;
    protocol_ = std::make_unique<ShmProtocol>(options, world.map, world.bytes());
  }
  ShmProtocol& protocol() { return *protocol_; }
  int rank() const { return protocol_->rank(); }

  // Called before each call of the protocol: a rank only knows its position in its program, and its ledgers.
  void forget() {
    uint64_t state = ++num_calls_;
    const auto add = [&state](uint64_t value) { state = (state ^ value) * 0x100000001b3ULL; };
    for (const SlotLedger* ledger : {&gathers_, &scratches_}) {
      for (const char letter : listed(ledger->owners())) add(static_cast<uint64_t>(letter));
      for (size_t id = 0; id < ledger->num_slots(); ++id) add(ledger->slot(static_cast<int>(id)).num_uses);
    }
    for (const Reduction& reduction : closing_) add(reduction.unit * 1000 + reduction.epoch);
    for (const uint64_t epoch : epochs_) add(epoch);
    add(sequence_);
    add(num_later_);
    add(num_steps_ * 2 + (is_published_ ? 1 : 0));
    add(resting_.num_uses);
    model::forget(state);
  }

  // --- gathers ---
  struct Gather {
    Slot slot;
    GatherPost post;
  };
  Gather begin_gather(uint32_t unit) {
    Gather gather{gathers_.acquire(kSlotBytes, "unit"), {}};
    gather.post = {++sequence_, unit, static_cast<uint32_t>(gather.slot.id), gather.slot.offset, kSlotBytes};
    forget();
    protocol_->acquire_slot(gather.post, gather.slot.num_uses);
    forget();
    cell(gather).write(value(gather.post, rank()));
    protocol_->post_gather(gather.post);
    return gather;
  }
  void finish_gather(const Gather& gather) {
    forget();
    protocol_->join_gather(gather.post);
    forget();
    for (int other = 0; other < protocol_->world(); ++other) {
      require(world_.slots[gather.post.slot][static_cast<size_t>(other)].read() == value(gather.post, other),
              "rank " + std::to_string(rank()) + " reads the rows of rank " + std::to_string(other) + " in gather #" +
                  std::to_string(gather.post.sequence));
    }
  }
  void release_gather(const Gather& gather) {
    forget();
    protocol_->release_slot(gather.post.slot, gather.slot.num_uses);
    gathers_.release(gather.slot.id);
  }
  void gather(uint32_t unit) {
    const Gather it = begin_gather(unit);
    finish_gather(it);
    release_gather(it);
  }

  // --- gathers where rows rest ---
  Gather begin_resting_gather(uint32_t unit) {
    if (resting_.id < 0) resting_ = gathers_.reserve(kSlotBytes, "unit", kSlotBytes);
    ++resting_.num_uses;
    Gather gather{resting_, {++sequence_, unit, static_cast<uint32_t>(resting_.id), resting_.offset, kSlotBytes}};
    forget();
    if (!is_published_) {
      protocol_->acquire_slot(gather.post, resting_.num_uses);
      forget();
      cell(gather).write(rows(rank()));
      is_published_ = true;
    }
    protocol_->post_gather(gather.post);
    return gather;
  }
  void finish_resting_gather(const Gather& gather) {
    forget();
    protocol_->join_gather(gather.post);
    forget();
    for (int other = 0; other < protocol_->world(); ++other) {
      require(world_.slots[gather.post.slot][static_cast<size_t>(other)].read() == rows(other),
              "rank " + std::to_string(rank()) + " reads the rows of rank " + std::to_string(other) + " after step " +
                  std::to_string(num_steps_));
    }
  }
  void release_resting_gather(const Gather& gather) {
    forget();
    protocol_->release_slot(gather.post.slot, gather.slot.num_uses);
  }
  // Sets new values for this rank's rows, directly where peers read if none reads, else at the next gather.
  void step(bool asks = true) {
    ++num_steps_;
    forget();
    const auto slot = static_cast<uint32_t>(resting_.id);
    if (!asks || protocol_->slot_is_released(slot, resting_.num_uses)) {
      world_.slots[slot][static_cast<size_t>(rank())].write(rows(rank()));
    } else {
      is_published_ = false;
    }
  }

  // --- reductions ---
  struct Reduction {
    uint32_t unit;
    uint64_t epoch;
    uint64_t position;
    Slot slot;
  };
  Reduction post_reduction(uint32_t unit, uint64_t position, uint64_t tag = kTag, bool publishes = true) {
    forget();
    sweep();
    if (!closing_.empty()) {  // one scratch at a time, where that is sure to come
      const Reduction& last = closing_.back();
      forget();
      protocol_->wait_consumed_in_order(last.unit, last.epoch, last.position);
      sweep();
    }
    Reduction reduction{unit, ++epochs_[unit], position, scratches_.acquire(kSlotBytes, "unit")};
    world_.scratches[static_cast<size_t>(rank())][static_cast<size_t>(reduction.slot.id)].write(
        gradient(reduction, rank()));
    forget();
    protocol_->post_reduction(unit, reduction.epoch, tag, static_cast<uint64_t>(reduction.slot.id));
    if (publishes) {
      forget();
      protocol_->publish_progress(position);
    }
    return reduction;
  }
  bool finish_reduction(const Reduction& reduction, bool flush, uint64_t tag = kTag) {
    forget();
    if (protocol_->join_reduction(reduction.unit, reduction.epoch, tag, reduction.position, flush) == Joined::later) {
      num_later_ = num_later_ * 2 + 1;
      return false;
    }
    num_later_ *= 2;
    forget();
    for (int other = 0; other < protocol_->world(); ++other) {
      const auto slot = protocol_->peer_scratch_offset(reduction.unit, other);
      require(world_.scratches[static_cast<size_t>(other)][slot].read() == gradient(reduction, other),
              "rank " + std::to_string(rank()) + " sums the gradient of rank " + std::to_string(other) + " for unit " +
                  std::to_string(reduction.unit));
    }
    consume(reduction);
    return true;
  }
  void consume(const Reduction& reduction) {
    forget();
    protocol_->consume_reduction(reduction.unit, reduction.epoch);
    closing_.push_back(reduction);
  }
  void flush(uint64_t position, std::deque<Reduction>& pending) {
    forget();
    protocol_->publish_progress(position);
    for (const Reduction& reduction : pending) require(finish_reduction(reduction, true), "a flush waits");
    pending.clear();
  }

 private:
  Cell& cell(const Gather& gather) { return world_.slots[gather.post.slot][static_cast<size_t>(rank())]; }
  static uint64_t value(const GatherPost& post, int rank) {
    return post.sequence * 100 + post.unit * 10 + static_cast<uint64_t>(rank);
  }
  uint64_t rows(int rank) const { return num_steps_ * 100 + static_cast<uint64_t>(rank) + 5000; }
  static uint64_t gradient(const Reduction& reduction, int rank) {
    return reduction.epoch * 100 + reduction.unit * 10 + static_cast<uint64_t>(rank) + 1000;
  }
  void sweep() {
    while (!closing_.empty() && protocol_->reduction_is_consumed(closing_.front().unit, closing_.front().epoch)) {
      scratches_.release(closing_.front().slot.id);
      closing_.pop_front();
    }
  }

  World& world_;
  SlotLedger gathers_;
  SlotLedger scratches_;
  std::unique_ptr<ShmProtocol> protocol_;
  uint64_t sequence_ = 0;
  uint64_t num_calls_ = 0;
  uint64_t num_later_ = 0;  // joins that were left for the flush
  Slot resting_;
  bool is_published_ = false;  // the slot has this rank's newest rows
  uint64_t num_steps_ = 0;
  std::array<uint64_t, 8> epochs_{};
  std::deque<Reduction> closing_;
};

// Names of the words in a trace.
inline std::string name_of(const World& world, int num_ranks, const void* address) {
  auto* const control = world.bytes();
  for (int rank = 0; rank < num_ranks; ++rank) {
    const cpu::RankState& state = world.map.state(control, rank);
    const std::string of = " of rank " + std::to_string(rank);
    const std::vector<std::pair<const void*, std::string>> fields = {{&state.closed, "closed"},
                                                                     {&state.failed, "failed"},
                                                                     {&state.num_posted, "num_posted"},
                                                                     {&state.progress, "progress"},
                                                                     {&state.wanted_gather, "wanted_gather"},
                                                                     {&state.wanted_slot, "wanted_slot"},
                                                                     {&state.wanted_reduction, "wanted_reduction"},
                                                                     {&state.wanted_end, "wanted_end"},
                                                                     {&state.doorbell, "doorbell"},
                                                                     {&state.sleeping, "sleeping"}};
    for (const auto& [word, name] : fields) {
      if (word == address) return name + of;
    }
    for (uint64_t i = 0; i < cpu::kRingEntries; ++i) {
      const cpu::RingEntry& entry = world.map.entry(control, rank, i);
      if (address >= &entry && address < &entry + 1) return "ring entry " + std::to_string(i) + of;
    }
    for (uint32_t i = 0; i < cpu::kMaxSlots; ++i) {
      if (address == &world.map.released(control, rank, i)) return "released " + std::to_string(i) + of;
      const cpu::UnitRecord& record = world.map.unit(control, rank, i);
      if (address >= &record && address < &record + 1) return "unit record " + std::to_string(i) + of;
    }
    for (size_t i = 0; i < 4; ++i) {
      if (address == &world.slots[i][static_cast<size_t>(rank)]) return "rows in slot " + std::to_string(i) + of;
      if (address == &world.scratches[static_cast<size_t>(rank)][i]) return "scratch " + std::to_string(i) + of;
    }
  }
  return "";
}

}  // namespace fsdp2x::model
