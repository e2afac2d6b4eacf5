// The orders in which forwards ran, which predict the next gather: the last forward predicts this one, and this
// iteration's forwards predict backward.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/schedule/states.hpp"

namespace fsdp2x {

class ForwardOrder {
 public:
  // Begins a forward of the root.
  void begin_sequence();
  // Begins a forward in the order. `is_first`: no graph waits for its backward, so it starts a new order. Otherwise it
  // adds to the order.
  void begin_forward(bool is_first, const std::vector<std::shared_ptr<ScheduledUnit>>& units);
  // Ends it. If it gathered nothing, the sequence before still predicts the next one.
  void end_sequence();
  // Removes the running forward from the order.
  void abandon_forward(const std::vector<std::shared_ptr<ScheduledUnit>>& units, bool has_grad);
  void clear(const std::vector<std::shared_ptr<ScheduledUnit>>& units);
  // Also forgets the prediction of the last forward.
  void forget();

  // Notes that the unit's forward begins and gathers it. Returns the unit that was gathered next in the last forward
  // that gathered any. Null if there is none. Ranks gather in one order, so they predict the same.
  std::shared_ptr<ScheduledUnit> next_after(ScheduledUnit& unit);
  // Notes that the unit's forward has ended.
  void record(ScheduledUnit& unit);
  // Notes that the unit's backward begins. Returns the unit whose forward ended before it, null if there is none.
  std::shared_ptr<ScheduledUnit> before(ScheduledUnit& unit);

 private:
  using Units = std::vector<std::weak_ptr<ScheduledUnit>>;

  Units order_;                          // by the ends of this iteration's forwards, with repetitions
  size_t begin_ = 0;                     // start of the running forward
  Units last_sequence_, this_sequence_;  // of gathered units by the beginnings, of one forward
  size_t cursor_ = 0;                    // in last_sequence_
};

}  // namespace fsdp2x
