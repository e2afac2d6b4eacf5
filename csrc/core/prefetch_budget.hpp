// How far backward gathers ahead, in sizes only: the rule that the engine follows and the planner plays. The next unit
// always; those behind it while what is gathered and not used yet stays within the budget.
#pragma once

#include <cstddef>

namespace fsdp2x {

class PrefetchBudget {
 public:
  explicit PrefetchBudget(size_t bytes) : bytes_(bytes) {}

  // Whether a unit of `bytes` may be gathered, too.
  bool allows(size_t bytes, bool is_next) const { return is_next || ahead_ + bytes <= bytes_; }
  // It is gathered, or was already.
  void add(size_t bytes) { ahead_ += bytes; }
  bool is_spent() const { return ahead_ >= bytes_; }

 private:
  size_t bytes_;
  size_t ahead_ = 0;
};

}  // namespace fsdp2x
