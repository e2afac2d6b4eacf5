// Effects on records: every call is checked against the earlier calls, and one of them may throw.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/schedule/schedule.hpp"

namespace fsdp2x::programs {

// A rule of the schedule is broken.
struct Violation : std::logic_error {
  using std::logic_error::logic_error;
};
// The exception that a program plans.
struct Planned : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool condition, const std::string& what) {
  if (!condition) throw Violation(what);
}

// The backwards whose gradients are in a sum, by number.
using Sum = std::set<int>;

class RecordedGroup final : public ScheduledGroup {
 public:
  RecordedGroup(int number, bool trains) : number(number), trains(trains), name_("unit " + std::to_string(number)) {
    set_facts({.num_params = 1});
  }
  const std::string& name() const override { return name_; }

  const int number;
  const bool trains;
  const ScheduledUnit* unit = nullptr;  // its owner
  GatherState gather = GatherState::none;
  bool is_expected = false;  // its gradient is still to come in this backward
  Sum accumulated;           // by autograd
  std::optional<Sum> packed, reduced, downloading, partial;
  bool is_posted_to_peers = false;
  Sum attached;

 private:
  std::string name_;
};

class RecordedUnit final : public ScheduledUnit {
 public:
  RecordedUnit(int number, bool trains)
      : ScheduledUnit("unit " + std::to_string(number), options), group(number, trains) {
    group.unit = this;
    set_scheduled_groups({&group});
  }
  ScheduleOptions options;
  RecordedGroup group;
  int num_outstanding = 0;
};

// How the ranks of a program are connected.
struct Connection {
  bool is_collective = true;  // otherwise ranks see what the others have posted
  bool peers_are_late = false;
  bool has_replicas = false;
  bool downloads = false;
};

class RecordedEffects : public Effects {
 public:
  explicit RecordedEffects(Connection connection) : connection_(connection) {}

  // Sets the effect that throws, counted from here on. None: no effect throws.
  void throw_at(std::optional<size_t> effect) { throws_in_ = effect; }
  bool has_thrown() const { return has_thrown_; }
  size_t num_effects() const { return num_effects_; }
  int num_gathered() const { return num_gathered_; }
  // Returns gathers, reductions, and all-reduces in order. All ranks must issue the same.
  const std::vector<std::pair<char, int>>& collectives() const { return collectives_; }

  bool runs_backward = false;  // on this thread
  bool graph_lives = false;
  int backward = 0;  // number of the running or next backward

  bool inside_backward() const override { return runs_backward; }
  bool backward_is_alive() const override { return graph_lives; }
  bool has_outstanding_calls(const ScheduledUnit& unit) const override {
    return static_cast<const RecordedUnit&>(unit).num_outstanding > 0;
  }
  bool has_gradient(ScheduledGroup& group, size_t) const override { return !of(group).accumulated.empty(); }
  bool expects_gradients(const ScheduledGroup& group) const override { return of(group).is_expected; }
  bool is_collective(const ScheduledGroup& group) const override {
    return connection_.is_collective && of(group).trains;
  }
  bool needs_empty_reduction(const ScheduledGroup&) const override { return !connection_.is_collective; }
  bool needs_room(const ScheduledGroup& group, std::optional<size_t>) override { return !of(group).packed; }

  void begin_gather(ScheduledGroup& group, ShardsNow) override {
    require(of(group).gather == GatherState::none, "a gather begins twice: " + group.name());
    of(group).gather = GatherState::begun;
    ++num_gathered_;
    collectives_.emplace_back('g', of(group).number);
    effect();
  }
  void finish_gather(ScheduledUnit&, ScheduledGroup& group) override {
    require(of(group).gather == GatherState::begun, "a gather is finished that did not begin: " + group.name());
    effect();
    of(group).gather = GatherState::filled;
  }
  bool release_gather(ScheduledGroup& group, GatherEnd end) override {
    if (end == GatherEnd::canceled) {
      require(of(group).gather == GatherState::begun, "a gather is canceled that did not begin: " + group.name());
    } else {
      require(of(group).gather == GatherState::filled, "a gather is released that is not filled: " + group.name());
    }
    of(group).gather = GatherState::none;
    --num_gathered_;
    effect();
    return false;
  }
  void begin_pass(PassKind) override { effect(); }
  void begin_forward(uint64_t, const ScheduledUnits& units) override {
    for (const auto& unit : units) {
      for (ScheduledGroup* const group : unit->scheduled_groups()) {
        group->set_facts({1, connection_.has_replicas, connection_.downloads});
      }
    }
    effect();
  }
  void end_forward() override {}
  bool begin_backward(uint64_t, bool) override {
    graph_lives = true;
    effect();
    return true;
  }
  void end_backward() override {}
  void publish_progress(uint64_t position) override {
    require(position > progress_, "progress goes back");
    progress_ = position;
  }
  void make_room(ScheduledGroup&) override { effect(); }
  void take_gradient(ScheduledGroup& group, size_t) override {
    require(!of(group).is_posted_to_peers, "peers read what is packed: " + group.name());
    require(!of(group).accumulated.empty(), "nothing to pack: " + group.name());
    effect();
    if (!of(group).packed) of(group).packed.emplace();
    of(group).packed->merge(of(group).accumulated);
    of(group).accumulated.clear();
  }
  void pack_pending(ScheduledGroup& group) override {
    require(of(group).packed.has_value(), "nothing to pack: " + group.name());
    effect();
  }
  void begin_reduce(ScheduledGroup& group, ForwardCounts) override {
    require(!of(group).is_posted_to_peers, "a reduction begins twice: " + group.name());
    effect();
    if (!of(group).packed) of(group).packed.emplace();
    of(group).is_posted_to_peers = true;
    collectives_.emplace_back('r', of(group).number);
  }
  Reduced finish_reduce(ScheduledGroup& group, bool flush) override {
    require(of(group).is_posted_to_peers, "a reduction is finished that did not begin: " + group.name());
    require(!of(group).reduced, "reduced rows are nowhere: " + group.name());
    if (!flush && !connection_.is_collective && connection_.peers_are_late) return Reduced::later;
    effect();
    of(group).is_posted_to_peers = false;
    of(group).reduced = std::exchange(of(group).packed, std::nullopt);
    return Reduced::rows;
  }
  void keep_partial(ScheduledGroup& group) override {
    effect();
    if (!of(group).partial) of(group).partial.emplace();
    of(group).partial->merge(take_reduced(group));
  }
  void all_reduce(ScheduledGroup& group) override {
    collectives_.emplace_back('a', of(group).number);
    of(group).reduced = std::exchange(of(group).partial, std::nullopt).value_or(Sum());
    effect();
  }
  void run_reduce_hook(ScheduledGroup&) override { effect(); }
  void attach(ScheduledGroup& group) override {
    if (group.facts().downloads) return finish_download(group);
    Sum sum = take_reduced(group);
    effect();
    add(group, sum);
  }
  void begin_download(ScheduledGroup& group) override {
    require(!of(group).downloading, "two downloads of a group: " + group.name());
    Sum sum = take_reduced(group);
    effect();
    of(group).downloading = std::move(sum);
  }
  bool drop(ScheduledGroup& group, Dropped what) override {
    switch (what) {
      case Dropped::packed:
        of(group).is_posted_to_peers = false;
        return std::exchange(of(group).packed, std::nullopt).has_value();
      case Dropped::partial:
        of(group).partial.reset();
        break;
      case Dropped::reduced:
        of(group).reduced.reset();
        break;
      case Dropped::downloads:
        of(group).downloading.reset();
        break;
      case Dropped::accumulated:
        of(group).accumulated.clear();
        break;
    }
    return false;
  }

 private:
  static RecordedGroup& of(ScheduledGroup& group) { return static_cast<RecordedGroup&>(group); }
  static const RecordedGroup& of(const ScheduledGroup& group) { return static_cast<const RecordedGroup&>(group); }
  void effect() {
    ++num_effects_;
    if (!throws_in_) return;
    if (*throws_in_ == 0) {
      throws_in_.reset();
      has_thrown_ = true;
      throw Planned("planned");
    }
    --*throws_in_;
  }
  static Sum take_reduced(ScheduledGroup& group) {
    require(of(group).reduced.has_value(), "no reduced rows: " + group.name());
    return *std::exchange(of(group).reduced, std::nullopt);
  }
  static void finish_download(ScheduledGroup& group) {
    require(of(group).downloading.has_value(), "a download ends that did not begin: " + group.name());
    add(group, *std::exchange(of(group).downloading, std::nullopt));
  }
  static void add(ScheduledGroup& group, const Sum& sum) {
    for (const int number : sum) {
      require(of(group).attached.insert(number).second, "a gradient is added twice: " + group.name());
    }
  }

  Connection connection_;
  std::optional<size_t> throws_in_;
  bool has_thrown_ = false;
  size_t num_effects_ = 0;
  int num_gathered_ = 0;
  uint64_t progress_ = 0;
  std::vector<std::pair<char, int>> collectives_;
};

}  // namespace fsdp2x::programs
