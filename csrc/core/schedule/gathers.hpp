// Moves parameters between sharded and unsharded. Every gather that begins is released or canceled once, whatever
// raises.
#pragma once

#include "core/schedule/effects.hpp"
#include "core/schedule/states.hpp"

namespace fsdp2x {

class Gathers {
 public:
  explicit Gathers(Effects& effects) : effects_(effects) {}

  // Does nothing unless the unit is sharded.
  void begin(ScheduledUnit& unit, ShardsNow shards);
  // Does nothing unless the gather has begun.
  void finish(ScheduledUnit& unit);
  // Releases or cancels the gather and drops kept rows.
  void reshard(ScheduledUnit& unit);
  // Reshards, and may keep the rows in a smaller world.
  void reshard_after_forward(ScheduledUnit& unit);
  // Cancels an unused gather.
  void cancel(ScheduledUnit& unit);
  void drop_rows(ScheduledUnit& unit);

 private:
  void cancel_after_exception(ScheduledUnit& unit) noexcept;
  // Releases the groups, and cancels those that are not filled. Throws the first exception after all of them.
  void release(ScheduledUnit& unit, GatherEnd end);

  Effects& effects_;
};

}  // namespace fsdp2x
