// Simulates training steps of a planned model: the schedule runs, and its effects count bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/schedule/schedule.hpp"
#include "core/schedule/transport_memory.hpp"

namespace fsdp2x {

class PlannedUnit final : public ScheduledUnit {
 public:
  PlannedUnit(std::string name, bool reshards_after_forward, bool reshards_after_backward)
      : ScheduledUnit(std::move(name), options) {
    options.reshard_after_forward = reshards_after_forward;
    options.reshard_after_backward = reshards_after_backward;
  }
  void add_group(ScheduledGroup& group) {
    std::vector<ScheduledGroup*> groups = scheduled_groups();
    groups.push_back(&group);
    set_scheduled_groups(std::move(groups));
  }

  ScheduleOptions options;
  bool is_outstanding = false;  // its call waits for its backward
};

// A point on a walk through the modules of a model: a unit's first module, its first module whose backward reads
// parameters, a module that uses trainable parameters of a group, the first of several uses of a parameter, or the end
// of a unit's last module.
struct PlannedEvent {
  enum class Kind : uint8_t { open, read, use, sum, close };
  Kind kind = Kind::open;
  size_t unit = 0;
  size_t group = 0;  // of the unit, for `use`
  // Whether autograd announces the end (open) or the beginning (close) of the unit's backward.
  bool has_node = false;
  size_t bytes = 0;  // of the parameter's gradient, for `sum`
};

// Identical backwards of a step.
struct PlannedBackward {
  bool syncs = true;
  size_t num = 1;
  bool all_reduces = true;  // over replicas, if it syncs
};

class MemoryEffects final : public Effects {
 public:
  // Adds a group. Transports and groups must outlive this object.
  void add_group(PlannedGroup& group, TransportMemory& transport, PlannedGroup* smaller);
  MemoryTally& whole() { return whole_; }
  // Begins or ends a backward. `syncs`: it reduces its gradients.
  void run_backward(bool runs, bool syncs) {
    in_backward_ = runs;
    syncs_ = syncs;
  }
  // Begins or ends the end of a backward. Groups that are posted then wait for slower peers.
  void end(bool ends) { is_ending_ = ends; }
  void set_gradient(const PlannedGroup& group) { ready_ = &group; }
  // Adds a gradient to one that autograd holds: there are three of them until it has the sum.
  void sum_gradients(size_t bytes) {
    whole_.take(2 * bytes);
    whole_.give_back(2 * bytes);
  }
  // Return the numbers of the groups that were gathered and reduced since the last call.
  std::vector<size_t> take_gathers() { return std::exchange(gathers_, {}); }
  std::vector<size_t> take_reductions() { return std::exchange(reductions_, {}); }
  // Notes that the group has gradients, to which further reductions of the step add.
  void note_gradients(const PlannedGroup& group) { state_of(group).transport->note_gradients(group); }
  // Drops the gradients of the step.
  void drop_gradients();
  // Sets whether reductions end with the all-reduce over replicas.
  void set_all_reduces(bool all_reduces) {
    for (const PerGroup& state : groups_) state.transport->set_all_reduces(all_reduces);
  }

  bool inside_backward() const override { return in_backward_; }
  bool backward_is_alive() const override { return in_backward_; }
  bool has_outstanding_calls(const ScheduledUnit& unit) const override {
    return static_cast<const PlannedUnit&>(unit).is_outstanding;
  }
  bool has_gradient(ScheduledGroup& group, size_t param) const override;
  bool expects_gradients(const ScheduledGroup& /*group*/) const override { return false; }
  bool is_collective(const ScheduledGroup& group) const override;
  bool needs_empty_reduction(const ScheduledGroup& group) const override;
  bool needs_room(const ScheduledGroup& group, std::optional<size_t> param) override;
  void begin_gather(ScheduledGroup& group, ShardsNow shards) override;
  void finish_gather(ScheduledUnit& unit, ScheduledGroup& group) override;
  bool release_gather(ScheduledGroup& group, GatherEnd end) override;
  void begin_forward(uint64_t /*number*/, const ScheduledUnits& /*units*/) override {}
  void end_forward() override {}
  bool begin_backward(uint64_t /*number*/, bool /*is_alone*/) override { return true; }
  void end_backward() override;
  void publish_progress(uint64_t /*position*/) override {}
  void make_room(ScheduledGroup& group) override;
  void take_gradient(ScheduledGroup& group, size_t param) override;
  void pack_pending(ScheduledGroup& group) override;
  void begin_reduce(ScheduledGroup& group, ForwardCounts forwards) override;
  Reduced finish_reduce(ScheduledGroup& group, bool flush) override;
  void attach(ScheduledGroup& group) override;
  void begin_download(ScheduledGroup& group) override;
  bool drop(ScheduledGroup& /*group*/, Dropped /*what*/) override { return false; }

 private:
  struct PerGroup {
    PlannedGroup* group = nullptr;
    TransportMemory* transport = nullptr;
    PlannedGroup* smaller = nullptr;
    bool holds_gradients = false;  // of autograd
    bool has_pool = false;         // of gradients
  };
  PerGroup& state_of(const ScheduledGroup& group) { return groups_[static_cast<const PlannedGroup&>(group).number]; }
  const PerGroup& state_of(const ScheduledGroup& group) const {
    return groups_[static_cast<const PlannedGroup&>(group).number];
  }
  // Returns the group whose rows are gathered.
  PlannedGroup& source_of(ScheduledGroup& group);
  void take_pool(PlannedGroup& group);

  MemoryTally whole_;
  std::vector<PerGroup> groups_;  // by number
  std::vector<size_t> gathers_, reductions_;
  const PlannedGroup* ready_ = nullptr;  // whose gradient was accumulated
  bool in_backward_ = false, syncs_ = true, is_ending_ = false;
};

// All units below one root.
class PlannedSteps {
 public:
  explicit PlannedSteps(size_t page_bytes) : page_bytes_(page_bytes) {}

  // Each returns the index of the new item. `transport`: its name.
  size_t add_transport(const std::string& transport, const PlannedRanks& ranks);
  size_t add_unit(const std::string& name, bool reshards_after_forward, bool reshards_after_backward,
                  bool unshards_in_backward);
  // Adds a group. Without a unit, it is the smaller world of another group, which keeps its rows after forward.
  size_t add_group(std::optional<size_t> unit, size_t transport, const GroupBytes& bytes,
                   std::optional<size_t> smaller);

  // The groups, by index, that a backward and its forward gathered, and those that it reduced.
  struct Moved {
    size_t num = 1;  // number of identical backwards
    std::vector<size_t> gathers, reductions;
  };
  // Runs steps until the memory of the transports no longer changes. Returns what the last step moved.
  std::vector<Moved> run(const std::vector<PlannedEvent>& events, const std::vector<PlannedBackward>& backwards);
  const std::vector<std::unique_ptr<TransportMemory>>& transports() const { return transports_; }
  // Returns the most that a device holds at once in slots, buffers, and gradients.
  size_t device_bytes() { return effects_.whole().peak_bytes(); }

 private:
  void run_forward(const std::vector<PlannedEvent>& events);
  void run_backward(const std::vector<PlannedEvent>& events, bool syncs);

  size_t page_bytes_;
  MemoryEffects effects_;
  std::vector<std::unique_ptr<TransportMemory>> transports_;
  std::vector<std::unique_ptr<PlannedGroup>> groups_;
  std::vector<std::shared_ptr<PlannedUnit>> units_;
  std::vector<std::optional<uint64_t>> calls_;  // by unit: the number of its call
  Schedule schedule_{effects_};
};

}  // namespace fsdp2x
