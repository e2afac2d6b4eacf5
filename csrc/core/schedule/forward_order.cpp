// Recorded orders.
#include "core/schedule/forward_order.hpp"

#include <algorithm>
#include <utility>

namespace fsdp2x {

void ForwardOrder::begin_sequence() {
  this_sequence_.clear();
  cursor_ = 0;
}

void ForwardOrder::begin_forward(bool is_first, const std::vector<std::shared_ptr<ScheduledUnit>>& units) {
  if (is_first) clear(units);
  begin_ = order_.size();
}

void ForwardOrder::end_sequence() {
  if (this_sequence_.empty()) return;
  last_sequence_ = std::move(this_sequence_);
  this_sequence_.clear();
  cursor_ = 0;
}

void ForwardOrder::abandon_forward(const std::vector<std::shared_ptr<ScheduledUnit>>& units, bool has_grad) {
  const bool has_gathered = !this_sequence_.empty();
  end_sequence();  // as on ranks that ended this forward
  // After a forward with gradients, those raise in backward, which forgets their prediction.
  if (has_grad && has_gathered) last_sequence_.clear();
  order_.resize(std::min(order_.size(), begin_));
  for (const auto& unit : units) {
    std::erase_if(unit->forward_indices_, [this](size_t index) { return index >= begin_; });
  }
}

void ForwardOrder::clear(const std::vector<std::shared_ptr<ScheduledUnit>>& units) {
  order_.clear();
  for (const auto& unit : units) unit->forward_indices_.clear();
}

void ForwardOrder::forget() {
  order_.clear();
  this_sequence_.clear();
  last_sequence_.clear();
  cursor_ = 0;
}

std::shared_ptr<ScheduledUnit> ForwardOrder::next_after(ScheduledUnit& unit) {
  this_sequence_.push_back(unit.weak_from_this());
  const auto is_unit = [&unit](const std::weak_ptr<ScheduledUnit>& weak) { return weak.lock().get() == &unit; };
  const auto found =
      std::find_if(last_sequence_.begin() + static_cast<std::ptrdiff_t>(cursor_), last_sequence_.end(), is_unit);
  if (found == last_sequence_.end()) return nullptr;
  cursor_ = static_cast<size_t>(found - last_sequence_.begin()) + 1;
  return cursor_ == last_sequence_.size() ? nullptr : last_sequence_[cursor_].lock();
}

void ForwardOrder::record(ScheduledUnit& unit) {
  unit.forward_indices_.push_back(order_.size());
  order_.push_back(unit.weak_from_this());
}

std::shared_ptr<ScheduledUnit> ForwardOrder::before(ScheduledUnit& unit) {
  if (unit.forward_indices_.empty()) return nullptr;
  const size_t index = unit.forward_indices_.back();
  unit.forward_indices_.pop_back();
  if (index == 0 || index > order_.size()) return nullptr;
  std::shared_ptr<ScheduledUnit> found = order_[index - 1].lock();
  return found.get() == &unit ? nullptr : found;
}

}  // namespace fsdp2x
