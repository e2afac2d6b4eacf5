// The states of units and of their groups of parameters. Only the schedule changes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp2x {

enum class ParamState : uint8_t { sharded, gathering, unsharded };
enum class Phase : uint8_t { idle, forward, backward, reduced };
// The state of gradients that have left autograd: none, with the transport, or also posted to the peers.
enum class GradientState : uint8_t { none, packed, posted };
// The state of a gather. `begun` includes a gather whose beginning raised.
enum class GatherState : uint8_t { none, begun, filled };

const char* to_string(ParamState state);
const char* to_string(Phase phase);
const char* to_string(GradientState state);

// The user's settings that the schedule reads, each time it needs them.
struct ScheduleOptions {
  bool reshard_after_forward = true;
  bool reshard_without_grad = false;  // after a forward without grad, even if reshard_after_forward is false
  bool reshard_after_backward = true;
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool unshard_in_backward = true;
};

// The backwards whose gradients are in one sum, by the root's numbering. A backward that raises spoils the sum.
struct Contributions {
  uint64_t backward = 0;       // the last that added something
  bool holds_earlier = false;  // an earlier backward also added something

  void add(uint64_t number, bool is_first) {
    if (backward == number) return;
    backward = number;
    holds_earlier = !is_first;
  }
};

// Parameters of a unit that share a mesh: gathered in one operation, reduced in one operation.
class ScheduledGroup {
 public:
  virtual ~ScheduledGroup() = default;
  ScheduledGroup(const ScheduledGroup&) = delete;
  ScheduledGroup& operator=(const ScheduledGroup&) = delete;

  virtual const std::string& name() const = 0;

  // What does not change while a pass runs. The owner of the group sets it before a forward begins.
  struct Facts {
    size_t num_params = 0;
    bool all_reduces_later = false;   // the schedule asks for the all-reduce over replicas at the end of a backward
    bool downloads = false;           // reduced rows go to the host before they become gradients
    bool may_overlap = false;         // in a synchronous schedule, a prediction may still prefetch the group in forward
    const void* transport = nullptr;  // only used as an identity
    size_t max_downloads = 1;         // groups of one transport that may be on their way to the host
  };
  const Facts& facts() const { return facts_; }
  void set_facts(const Facts& facts) { facts_ = facts; }

  // Whether it keeps the rows of the smaller world while it is sharded. The next gather reads them.
  bool keeps_rows() const { return keeps_rows_; }
  // Returns whether it kept rows.
  bool stop_keeping_rows() { return std::exchange(keeps_rows_, false); }

  GradientState gradient_state() const { return gradient_state_; }
  bool is_open() const { return gradient_state_ != GradientState::none; }
  bool is_posted() const { return gradient_state_ == GradientState::posted; }
  // Returns whether gradients wait for a reduction or an all-reduce.
  bool holds_unreduced() const { return is_open() || partial_contributions_.backward != 0; }
  // Whether packed gradients were handed to the user, who may write to them.
  bool is_shown() const { return is_shown_; }
  void set_shown(bool is_shown) { is_shown_ = is_shown; }
  // Notes that an optimizer zeroed `.grad` and missed the gradients that wait here.
  void note_zeroed() { was_zeroed_ = true; }
  bool take_zeroed() { return std::exchange(was_zeroed_, false); }

  // Notes that this reduction's rows wait together with earlier ones, for transports that all-reduce by themselves.
  void note_partial() { partial_contributions_ = contributions_; }
  // Notes that this reduction includes the rows that waited.
  void note_merged_partial() {
    contributions_.holds_earlier = true;
    partial_contributions_ = Contributions();
  }

 protected:
  ScheduledGroup() = default;

 private:
  friend class Gathers;
  friend class Reductions;

  // Throws if no transition leads from the current state to `to`.
  void set_gradients(GradientState to);

  Facts facts_;
  GatherState gather_state_ = GatherState::none;
  bool keeps_rows_ = false;
  GradientState gradient_state_ = GradientState::none;
  Contributions contributions_;          // of the packed gradients
  Contributions partial_contributions_;  // of the rows that wait for an all-reduce
  bool holds_partial_ = false;           // the schedule does the all-reduce, and rows wait for it
  bool is_shown_ = false;
  bool was_zeroed_ = false;
  bool posts_late_ = false;  // a peer posts this group only at the end of its backward
  bool is_reduced_ = false;  // in this backward
};

// Modules whose parameters are gathered together. A unit without parameters has no group.
class ScheduledUnit : public std::enable_shared_from_this<ScheduledUnit> {
 public:
  virtual ~ScheduledUnit() = default;
  ScheduledUnit(const ScheduledUnit&) = delete;
  ScheduledUnit& operator=(const ScheduledUnit&) = delete;

  const std::string& name() const { return name_; }
  bool has_params() const { return !groups_.empty(); }
  const std::vector<ScheduledGroup*>& scheduled_groups() const { return groups_; }
  bool may_overlap() const;  // all of its groups may
  ParamState param_state() const { return param_state_; }
  Phase phase() const { return phase_; }
  // Whether it took part in a forward under grad since its last synchronized backward: peers may wait for its
  // reduction.
  bool awaits_reduction() const { return awaits_reduction_; }
  // Number of running calls of its modules: recursion, threads.
  size_t num_running() const { return num_running_; }
  // Position of its reduction among all of this and earlier backwards. It grows and is the same on every rank.
  uint64_t backward_position() const { return backward_position_; }

  using Prefetches = std::vector<std::weak_ptr<ScheduledUnit>>;
  void set_forward_prefetch(Prefetches units) { forward_prefetch_ = std::move(units); }
  void set_backward_prefetch(Prefetches units) { backward_prefetch_ = std::move(units); }

 protected:
  // `options` must outlive the unit.
  ScheduledUnit(std::string name, const ScheduleOptions& options) : name_(std::move(name)), options_(options) {}
  void set_name(std::string name) { name_ = std::move(name); }
  // Sets the groups, which must outlive their use here. Throws unless the unit is sharded.
  void set_scheduled_groups(std::vector<ScheduledGroup*> groups);

 private:
  friend class ForwardOrder;
  friend class Gathers;
  friend class Reductions;
  friend class Schedule;

  void set_params(ParamState from, ParamState to);
  // Recomputations inside a backward do not change the phase: no transition leads from backward to forward.
  void set_phase(Phase to);

  std::string name_;
  const ScheduleOptions& options_;
  std::vector<ScheduledGroup*> groups_;
  ParamState param_state_ = ParamState::sharded;
  Phase phase_ = Phase::idle;
  bool awaits_reduction_ = false;
  uint64_t awaits_since_ = 0;  // number of the forward that set it
  size_t num_running_ = 0;
  bool is_written_in_forward_ = false;  // seen once: a forward wrote its shards after their gather had begun
  bool has_ended_reads_ = false;        // in this backward, see Schedule::end_reads
  uint64_t backward_position_ = 0;
  std::vector<size_t> forward_indices_;  // positions in the order of forwards, the last call last
  Prefetches forward_prefetch_, backward_prefetch_;
};

using ScheduledUnits = std::vector<std::shared_ptr<ScheduledUnit>>;

}  // namespace fsdp2x
