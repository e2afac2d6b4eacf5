// Reductions that a device has on their way, in numbers only: the rule that the engine follows and the planner plays.
//
// As many as were asked for (set_reduce_scatter_max_input_buffers). Otherwise two between two units, so that the
// network has no gap, where that does not raise the peak: in the place of the slot that the unit has just given back,
// or where both are within what the largest unit needs; and one beside the next unit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

namespace fsdp2x {

class ReductionQueue {
 public:
  // What one holds until the compute lane has waited for it.
  struct Reduction {
    uint64_t number = 0;
    size_t bytes = 0;  // of gradients, packed or not
    int buffer = -1;
    std::vector<int> segments;  // once nobody on the host needs them
  };

  void set_max_buffers(size_t num) {
    max_buffers_ = num;
    counts_bytes_ = false;
  }
  size_t max_buffers() const { return max_buffers_; }

  // One more is on its way. Returns its number.
  uint64_t begin(int buffer, size_t bytes) {
    queue_.push_back({++num_begun_, bytes, buffer, {}});
    return num_begun_;
  }
  // Its rows are written: the segment goes back with its buffer. False: that has gone already.
  bool add_segment(uint64_t number, int segment) {
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [number](const Reduction& reduction) { return reduction.number == number; });
    if (found == queue_.end()) return false;
    found->segments.push_back(segment);
    return true;
  }
  size_t size() const { return queue_.size(); }
  // The oldest one has been waited for.
  Reduction pop() {
    Reduction oldest = std::move(queue_.front());
    queue_.pop_front();
    return oldest;
  }

  // How many may be on their way when `bytes` of gradients are packed for one more. `given_back`: the size of the slot
  // that the unit has given back for good.
  size_t allowed_before(size_t bytes, std::optional<size_t> given_back) {
    largest_bytes_ = std::max(largest_bytes_, bytes);
    const size_t most = max_buffers_ - 1;
    // A buffer has flags and pads on top.
    const bool takes_place_of_slot = given_back && bytes <= *given_back + *given_back / 8;
    if (!counts_bytes_ || takes_place_of_slot) return most;
    size_t total = bytes;
    for (const Reduction& reduction : queue_) total += reduction.bytes;
    return total <= largest_bytes_ ? most : 0;
  }
  // How many may be beside the backward that goes on behind that.
  size_t allowed_beside() const { return counts_bytes_ ? 1 : max_buffers_; }

 private:
  size_t max_buffers_ = 2;
  bool counts_bytes_ = true;
  size_t largest_bytes_ = 0;  // of all that it was asked about
  uint64_t num_begun_ = 0;
  std::deque<Reduction> queue_;  // oldest first
};

}  // namespace fsdp2x
