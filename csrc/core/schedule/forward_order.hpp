// The orders in which forwards ran, which tell what is gathered next: the last forward predicts this one, and this
// iteration's forwards predict backward.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/schedule/states.hpp"

namespace fsdp2x {

class ForwardOrder {
 public:
  // A forward of the root begins.
  void begin_sequence();
  // No graph waits for its backward: the forward is the first of its iteration. Otherwise it adds to the order.
  void begin_forward(bool is_first, const std::vector<std::shared_ptr<ScheduledUnit>>& units);
  void end_sequence() { last_sequence_.swap(this_sequence_); }
  // The forward that runs is taken out again.
  void abandon_forward(const std::vector<std::shared_ptr<ScheduledUnit>>& units);
  void clear(const std::vector<std::shared_ptr<ScheduledUnit>>& units);
  // The last forward predicts nothing any more, either.
  void forget();

  // The unit's forward begins. Returns the one that began after it in the last forward; null where the orders differ:
  // no prediction is better than a wrong one.
  std::shared_ptr<ScheduledUnit> next_after(ScheduledUnit& unit);
  // The unit's forward has ended.
  void record(ScheduledUnit& unit);
  // The unit's backward begins. Returns the unit whose forward ended before it; null: none.
  std::shared_ptr<ScheduledUnit> before(ScheduledUnit& unit);

 private:
  using Units = std::vector<std::weak_ptr<ScheduledUnit>>;

  Units order_;                          // by the ends of forwards, of this iteration, with repetitions
  size_t begin_ = 0;                     // of the forward that runs
  Units last_sequence_, this_sequence_;  // by the beginnings, of one forward
  size_t cursor_ = 0;                    // in last_sequence_
};

}  // namespace fsdp2x
