// Moves gradients from autograd to `.grad` for all units of one root: packed, posted, finished, attached. Also decides
// which gradients an exception invalidates.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "core/schedule/effects.hpp"
#include "core/schedule/states.hpp"

namespace fsdp2x {

class Reductions {
 public:
  explicit Reductions(Effects& effects) : effects_(effects) {}

  // Returns the number of the running or the next backward, counted from 1.
  uint64_t backward_number() const { return num_backwards_ + 1; }
  // `reaches_all`: gradients go to all leaves of the graph.
  void begin_backward(bool reaches_all) { reaches_all_ = reaches_all; }
  void end_backward() { ++num_backwards_; }

  // Packs a gradient that autograd has accumulated. A late one (a weight used outside its unit) waits for the posted
  // reduction and makes another one.
  void add_gradient(ScheduledUnit& unit, ScheduledGroup& group, size_t param);
  void pack_pending(ScheduledUnit& unit);
  // Returns whether peers may have gradients of the group, which has none here, and wait for this rank in a collective.
  // That requires that its unit took part in a forward under grad and that no live graph has a call of it.
  bool is_awaited(const ScheduledUnit& unit, const ScheduledGroup& group) const;
  // Begins the reduction of the group's gradients, which are complete for this backward.
  void post(ScheduledUnit& unit, ScheduledGroup& group, ForwardCounts forwards);
  // Finishes the posted reductions that all ranks have reached.
  void finish_pending();
  // Posts groups that no unit's backward has posted, in an order that is the same on every rank, and finishes
  // everything.
  void flush(const ScheduledUnits& units, ForwardCounts forwards);

  // --- dropping ---
  // Drops packed or posted gradients. Returns whether there were any.
  bool drop_packed(ScheduledGroup& group);
  // Drops reduced rows that wait for an all-reduce.
  void drop_partial(ScheduledGroup& group);
  // Drops reductions of a backward that raised. They hold their units, and the units hold the root, so a deleted model
  // would otherwise stay in memory until another backward.
  void forget_pending();
  // Drops gradients that the raised backward has packed or reduced and that are not in `.grad`. Gradients of earlier
  // backwards stay, unless they are in one sum with it: then they are lost.
  void abandon(ScheduledUnit& unit);
  // Drops all gradients of the unit that are not in `.grad`.
  void drop_all(ScheduledUnit& unit);
  void reset();

  // Throws after earlier gradients were lost, until reset().
  void refuse_after_loss() const;

 private:
  // A reduction that was posted and not finished, or reduced rows on their way to the host.
  struct OnItsWay {
    std::shared_ptr<ScheduledUnit> unit;
    ScheduledGroup* group;
  };
  void make_room(ScheduledGroup& group, std::optional<size_t> param);
  // Returns false if a peer posts later.
  bool finish(const std::shared_ptr<ScheduledUnit>& unit, ScheduledGroup& group, bool flush);
  void deliver(const std::shared_ptr<ScheduledUnit>& unit, ScheduledGroup& group);
  void finish_download(std::deque<OnItsWay>::iterator found);
  void all_reduce(const std::shared_ptr<ScheduledUnit>& unit, ScheduledGroup& group);
  // Returns whether a sum has gradients of backwards before the running or next one.
  bool holds_earlier(const Contributions& sum) const { return sum.backward != backward_number() || sum.holds_earlier; }
  void mark_lost(const ScheduledGroup& group);

  Effects& effects_;
  std::deque<OnItsWay> pending_;
  std::deque<OnItsWay> downloads_;  // oldest first
  std::string lost_;                // names of units
  uint64_t num_backwards_ = 0;
  bool reaches_all_ = true;
};

}  // namespace fsdp2x
