// The actions that a schedule asks for. The engine implements them on tensors, the planner on byte counts, and tests on
// records.
//
// Contract, which the schedule relies on and enforces:
//
// - *Exceptions.* Every effect may throw, and the schedule passes the exception on when its own state is consistent.
//
//   | effect that throws | what the schedule does |
//   | --- | --- |
//   | begin_gather, finish_gather | cancels the gather once for each group of the unit that has begun, also for the one
//     that threw; the unit is sharded |
//   | release_gather | the group counts as released; the other groups of the unit are released as well |
//   | take_gradient, pack_pending, begin_reduce | the group keeps its state: abandoning the backward drops it |
//   | finish_reduce, all_reduce, run_reduce_hook, begin_download, attach | the group's gradients count as reduced; rows
//     that are not attached are dropped; sums with earlier backwards are lost, and every pass raises until a reset |
//   | begin_pass, begin_forward, begin_backward | the pass has begun: it is abandoned like one that raised later |
//
// - *Reentrance.* `run_reduce_hook` and `attach` run users' hooks, which may gather, reshard, run a forward, or step an
//   optimizer. The schedule has recorded the group as reduced before it calls them.
// - *Answers* are return values. An effect never calls the schedule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/collective_order.hpp"
#include "core/forward_counts.hpp"
#include "core/schedule/states.hpp"

namespace fsdp2x {

// Named parts of a step, for profiles.
enum class Section : uint8_t {
  all_gather,
  all_gather_copy_out,
  pre_backward,
  forward_prefetch,
  backward_prefetch,
  post_backward_reshard,
  post_backward_reduce,
};

struct OpenSection {
  virtual ~OpenSection() = default;
};

// The state of a posted reduction.
enum class Reduced : uint8_t {
  later,  // a peer posts later: ask again, with `flush` at the latest
  kept,   // the transport keeps the rows for its all-reduce
  rows,   // rows exist: attach, begin_download, keep_partial, or drop_reduced follows
};

// The shards that a gather reads.
enum class ShardsNow : uint8_t {
  may_change,   // the user may have just written them
  stand_still,  // no shard changes now
  are_watched,  // likewise, but the forward that runs may write them: were_shards_written is asked later
};

enum class GatherEnd : uint8_t {
  canceled,   // it has begun, in part or as a whole, and was not finished
  released,   // its slot is free
  keeps_rows  // likewise, but a smaller world may keep the rows until the next gather
};

// Gradients on their way.
enum class Dropped : uint8_t {
  packed,      // or posted
  partial,     // rows that wait for an all-reduce
  reduced,     // rows that are not attached
  downloads,   // rows on their way to the host
  accumulated  // by autograd
};

class Effects {
 public:
  virtual ~Effects() = default;

  // --- questions, which change nothing ---
  // Whether this thread runs nodes of a backward. A forward that a checkpoint recomputes counts as well.
  virtual bool inside_backward() const = 0;
  // Whether autograd still has the backward that begin_backward announced.
  virtual bool backward_is_alive() const = 0;
  // Whether calls of the unit wait for their backward.
  virtual bool has_outstanding_calls(const ScheduledUnit& unit) const = 0;
  // Whether autograd has accumulated a gradient of the parameter that is not packed.
  virtual bool has_gradient(ScheduledGroup& group, size_t param) const = 0;
  // Whether this backward still has gradients to come for the group.
  virtual bool expects_gradients(const ScheduledGroup& group) const = 0;
  // Whether peers wait in a collective for a reduction of a group that has no gradient here.
  virtual bool is_collective(const ScheduledGroup& group) const = 0;
  // Whether to reduce a group that has packed nothing, because peers may have, or because rows wait.
  virtual bool needs_empty_reduction(const ScheduledGroup& group) const = 0;
  // Whether pending reductions hold memory that the group needs next. `param`: to pack a gradient of it. Null: for the
  // group's reduction, or while that runs.
  virtual bool needs_room(const ScheduledGroup& group, std::optional<size_t> param) = 0;
  // Throws unless this process may act on the unit. `action`: "gather unit".
  virtual void check_process(const ScheduledUnit& /*unit*/, const char* /*action*/) const {}

  // --- parameters ---
  // Returns once the name of a gathered parameter that lost a change at a reshard.
  virtual std::optional<std::string> take_lost(ScheduledUnit& /*unit*/) { return std::nullopt; }
  // Follows changes before a forward over gathered parameters. False: they must be gathered again.
  virtual bool follow_gathered(ScheduledUnit& /*unit*/) { return true; }
  // Writes this rank's rows into the slot and posts them to the peers.
  virtual void begin_gather(ScheduledGroup& group, ShardsNow shards) = 0;
  // Whether watched shards were written since their gather began.
  virtual bool were_shards_written(const ScheduledUnit& /*unit*/) const { return false; }
  // Waits until all rows are there and registers the unsharded parameters in modules.
  virtual void finish_gather(ScheduledUnit& unit, ScheduledGroup& group) = 0;
  // A unit's parameters are about to be used. The gathers that run ahead have begun, if there are any.
  virtual void end_prefetch() {}
  // Registers the sharded parameters in modules and ends the use of the slot. Returns whether a smaller world keeps the
  // rows.
  virtual bool release_gather(ScheduledGroup& group, GatherEnd end) = 0;
  // Registers the sharded parameters in modules again, instead of the rows of the smaller world.
  virtual void drop_rows(ScheduledGroup& /*group*/) {}

  // --- passes ---
  virtual void begin_pass(PassKind /*kind*/) {}
  // `notifies_peers`: false for a backward that is gone.
  virtual void end_pass(bool /*notifies_peers*/) {}
  // Warns of waiting gradients that an optimizer's zero_grad has left. The warning may be an exception.
  virtual void warn_of_zeroed(const ScheduledUnits& /*units*/) {}
  // The root's forward begins, outside of a backward. `number` counts these from 1.
  virtual void begin_forward(uint64_t number, const ScheduledUnits& units) = 0;
  virtual void end_forward() = 0;
  // Whether the running forward is still on a stack. An interrupt ends a forward without an announcement.
  virtual bool forward_runs() const { return true; }
  // Announces the root's callback to autograd. `is_alone`: the backward is of the last forward only. Returns whether
  // gradients go to all leaves of the graph.
  virtual bool begin_backward(uint64_t number, bool is_alone) = 0;
  virtual void end_backward() = 0;
  // The unit's own backward begins, on this thread and stream.
  virtual void begin_unit_backward(ScheduledUnit& /*unit*/) {}
  virtual void publish_progress(uint64_t position) = 0;
  // Names a part of the step while the result lives. Null: there is no profiler.
  virtual std::unique_ptr<OpenSection> open_section(const ScheduledUnit& /*unit*/, Section /*section*/) {
    return nullptr;
  }

  // --- gradients ---
  virtual void make_room(ScheduledGroup& group) = 0;
  // Takes the accumulated gradient of the parameter and adds it to the packed gradients.
  virtual void take_gradient(ScheduledGroup& group, size_t param) = 0;
  // Packs a shown gradient of a parameter again. After the last one, the user no longer sees any.
  virtual void pack_shown(ScheduledGroup& /*group*/, size_t /*param*/) {}
  // Packs and frees held gradients, since this backward may have no more gradients for the group.
  virtual void pack_pending(ScheduledGroup& group) = 0;
  virtual void begin_reduce(ScheduledGroup& group, ForwardCounts forwards) = 0;
  virtual Reduced finish_reduce(ScheduledGroup& group, bool flush) = 0;
  // Ends the backward without a reduction of the group.
  virtual void skip_reduce(ScheduledGroup& /*group*/) {}
  // Adds the reduced rows to those that wait for an all-reduce.
  virtual void keep_partial(ScheduledGroup& /*group*/) {}
  // All-reduces the waiting rows, or zeros if there are none. The result is reduced rows.
  virtual void all_reduce(ScheduledGroup& /*group*/) {}
  // Runs the user's hook on the reduced rows.
  virtual void run_reduce_hook(ScheduledGroup& /*group*/) {}
  // Turns the reduced rows into gradients and runs the parameters' own hooks. For groups whose gradients are in CPU
  // memory, begin_download comes before it.
  virtual void attach(ScheduledGroup& group) = 0;
  virtual void begin_download(ScheduledGroup& /*group*/) {}
  // Drops gradients. Returns whether there were any that were packed or posted.
  virtual bool drop(ScheduledGroup& group, Dropped what) = 0;
};

}  // namespace fsdp2x
