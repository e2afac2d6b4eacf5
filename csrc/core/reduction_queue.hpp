// The running reductions of a device, as numbers only: the engine follows this rule, and the planner simulates it.
//
// set_reduce_scatter_max_input_buffers sets how many may run. By default, one runs next to the next unit. Two may run
// between two units to leave no gap in the network, if that does not raise the peak: the new one takes the place of the
// slot that the unit just gave back, or both fit in what the largest unit needs.
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
  // Memory that a reduction holds until the compute stream has waited for it.
  struct Reduction {
    uint64_t number = 0;
    size_t bytes = 0;  // of gradients, packed or not
    int buffer = -1;
    std::vector<int> segments;  // after their last use on the host
  };

  void set_max_buffers(size_t num) {
    max_buffers_ = num;
    counts_bytes_ = false;
  }
  size_t max_buffers() const { return max_buffers_; }

  // Adds a reduction and returns its number.
  uint64_t begin(int buffer, size_t bytes) {
    queue_.push_back({++num_begun_, bytes, buffer, {}});
    return num_begun_;
  }
  // Adds the segment of written rows, to go back with the buffer. Returns false if the reduction is already gone.
  bool add_segment(uint64_t number, int segment) {
    const auto found = std::find_if(queue_.begin(), queue_.end(),
                                    [number](const Reduction& reduction) { return reduction.number == number; });
    if (found == queue_.end()) return false;
    found->segments.push_back(segment);
    return true;
  }
  size_t size() const { return queue_.size(); }
  // Removes the oldest reduction, after the compute stream has waited for it.
  Reduction pop() {
    Reduction oldest = std::move(queue_.front());
    queue_.pop_front();
    return oldest;
  }

  // Returns how many may still run when `bytes` of gradients are packed for another one. `given_back`: the size of the
  // slot that the unit has given back and will not gather into again.
  size_t allowed_before(size_t bytes, std::optional<size_t> given_back) {
    largest_bytes_ = std::max(largest_bytes_, bytes);
    const size_t most = max_buffers_ - 1;
    // A buffer has flags and pads in addition.
    const bool takes_place_of_slot = given_back && bytes <= *given_back + *given_back / 8;
    if (!counts_bytes_ || takes_place_of_slot) return most;
    size_t total = bytes;
    for (const Reduction& reduction : queue_) total += reduction.bytes;
    return total <= largest_bytes_ ? most : 0;
  }
  // Returns how many may run next to the backward that continues after that.
  size_t allowed_beside() const { return counts_bytes_ ? 1 : max_buffers_; }

 private:
  size_t max_buffers_ = 2;
  bool counts_bytes_ = true;
  size_t largest_bytes_ = 0;  // of all requests so far
  uint64_t num_begun_ = 0;
  std::deque<Reduction> queue_;  // oldest first
};

}  // namespace fsdp2x
