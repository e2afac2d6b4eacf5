// Ranks of the model that run the schedule over shared memory, and over a process group.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "model/shm_ranks.hpp"
#include "schedule/programs.hpp"
#include "shm/shm_word.hpp"

namespace fsdp2x::model {

// Calls the protocol as SharedMemoryTransport does.
class ProtocolEffects final : public programs::RecordedEffects {
 public:
  ProtocolEffects(programs::Connection connection, ModelRank& rank) : RecordedEffects(connection), rank_(rank) {}

  void begin_gather(ScheduledGroup& group, ShardsNow shards) override {
    RecordedEffects::begin_gather(group, shards);
    gathers_[number(group)] = rank_.begin_gather(number(group));
  }
  void finish_gather(ScheduledUnit& unit, ScheduledGroup& group) override {
    rank_.finish_gather(gathers_.at(number(group)));
    RecordedEffects::finish_gather(unit, group);
  }
  bool release_gather(ScheduledGroup& group, GatherEnd end) override {
    const auto found = gathers_.extract(number(group));
    if (!found.empty()) rank_.release_gather(found.mapped());  // begin_gather may have thrown
    return RecordedEffects::release_gather(group, end);
  }
  void begin_forward(uint64_t pass, const ScheduledUnits& units) override {
    RecordedEffects::begin_forward(pass, units);
    rank_.forget();
    rank_.protocol().enter_forward(pass);
  }
  bool begin_backward(uint64_t pass, bool is_alone) override {
    rank_.forget();
    rank_.protocol().enter_backward(pass, is_alone);
    return RecordedEffects::begin_backward(pass, is_alone);
  }
  void end_pass(bool notifies_peers) override {
    if (!notifies_peers) return;
    rank_.forget();
    rank_.protocol().end_pass();
  }
  void publish_progress(uint64_t position) override {
    RecordedEffects::publish_progress(position);
    rank_.forget();
    rank_.protocol().publish_progress(position);
  }
  void begin_reduce(ScheduledGroup& group, ForwardCounts forwards) override {
    RecordedEffects::begin_reduce(group, forwards);
    reductions_[number(group)] = rank_.post_reduction(number(group), position(group), kTag, false);
  }
  Reduced finish_reduce(ScheduledGroup& group, bool flush) override {
    ModelRank::Reduction& reduction = reductions_.at(number(group));
    reduction.position = position(group);
    if (!rank_.finish_reduction(reduction, flush)) return Reduced::later;
    return RecordedEffects::finish_reduce(group, /*flush=*/true);
  }
  void skip_reduce(ScheduledGroup& group) override {
    rank_.forget();
    rank_.protocol().skip_reduction(number(group));
  }

 private:
  static uint32_t number(const ScheduledGroup& group) {
    return static_cast<uint32_t>(static_cast<const programs::RecordedGroup&>(group).number);
  }
  static uint64_t position(const ScheduledGroup& group) {
    return static_cast<const programs::RecordedGroup&>(group).unit->backward_position();
  }

  ModelRank& rank_;
  std::map<uint32_t, ModelRank::Gather> gathers_;
  std::map<uint32_t, ModelRank::Reduction> reductions_;
};

// A process group: a collective ends when every rank has posted as many. All ranks must post the same one.
struct GroupWorld {
  static constexpr size_t kMaxCollectives = 64;
  struct Member {
    cpu::Word num_posted;
    cpu::Doorbell bell;
    std::array<Cell, kMaxCollectives> posted;
  };
  explicit GroupWorld(int num) : num_ranks(num) {}
  int num_ranks;
  std::array<Member, 4> members;
};

class GroupEffects final : public programs::RecordedEffects {
 public:
  GroupEffects(programs::Connection connection, GroupWorld& world, int rank)
      : RecordedEffects(connection), world_(world), rank_(rank) {}

  void begin_gather(ScheduledGroup& group, ShardsNow shards) override {
    RecordedEffects::begin_gather(group, shards);
    waits_for_[&group] = post('g', group);
  }
  void finish_gather(ScheduledUnit& unit, ScheduledGroup& group) override {
    wait(waits_for_.at(&group));
    RecordedEffects::finish_gather(unit, group);
  }
  void begin_reduce(ScheduledGroup& group, ForwardCounts forwards) override {
    RecordedEffects::begin_reduce(group, forwards);
    waits_for_[&group] = post('r', group);
  }
  Reduced finish_reduce(ScheduledGroup& group, bool flush) override {
    wait(waits_for_.at(&group));
    return RecordedEffects::finish_reduce(group, flush);
  }

 private:
  GroupWorld::Member& member(int rank) { return world_.members[static_cast<size_t>(rank)]; }
  uint64_t post(char what, const ScheduledGroup& group) {
    const auto number = static_cast<uint64_t>(static_cast<const programs::RecordedGroup&>(group).number);
    forget(++num_steps_);
    member(rank_).posted[num_posted_].write(static_cast<uint64_t>(what) * 100 + number);
    member(rank_).num_posted.store(++num_posted_, std::memory_order_release);
    for (int peer = 0; peer < world_.num_ranks; ++peer) {
      if (peer == rank_) continue;
      member(peer).bell.fetch_add(1);
      cpu::wake(member(peer).bell);
    }
    return num_posted_;
  }
  void wait(uint64_t num) {
    for (int peer = 0; peer < world_.num_ranks; ++peer) {
      while (true) {
        forget(++num_steps_ * 8 + static_cast<uint64_t>(peer));
        const uint32_t rung = member(rank_).bell.load();
        if (member(peer).num_posted.load(std::memory_order_acquire) >= num) break;
        cpu::sleep_on(member(rank_).bell, rung, {});
        --num_steps_;
      }
      require(member(peer).posted[num - 1].read() == member(rank_).posted[num - 1].read(),
              "rank " + std::to_string(peer) + " posts another collective than rank " + std::to_string(rank_));
    }
  }

  GroupWorld& world_;
  int rank_;
  uint64_t num_posted_ = 0, num_steps_ = 0;
  std::map<const ScheduledGroup*, uint64_t> waits_for_;
};

}  // namespace fsdp2x::model
