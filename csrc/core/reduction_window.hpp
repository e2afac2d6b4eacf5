// How many reductions a device has on their way at once, in numbers only: the rule that the engine follows and the
// planner plays.
//
// As many as was asked for (set_reduce_scatter_max_input_buffers). Otherwise two between two units, so that the network
// has no gap, where that does not raise the peak: in the place of the slot that the unit has just given back, or where
// both are within what the largest unit needs; and one beside the next unit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

namespace fsdp2x {

class ReductionWindow {
 public:
  void set_max_buffers(size_t num) {
    max_buffers_ = num;
    counts_bytes_ = false;
  }

  // How many may be on their way, with `bytes_in_flight` so far, when `bytes` of gradients are packed for one more.
  // `given_back`: the size of the slot that the unit has given back for good.
  size_t before(size_t bytes, size_t bytes_in_flight, std::optional<size_t> given_back) {
    largest_bytes_ = std::max(largest_bytes_, bytes);
    const size_t most = max_buffers_ - 1;
    // A buffer has flags and pads on top.
    const bool takes_place_of_slot = given_back && bytes <= *given_back + *given_back / 8;
    if (!counts_bytes_ || takes_place_of_slot) return most;
    return bytes + bytes_in_flight <= largest_bytes_ ? most : 0;
  }
  // How many may be beside the backward that goes on behind that.
  size_t beside() const { return counts_bytes_ ? 1 : max_buffers_; }
  size_t max_buffers() const { return max_buffers_; }

 private:
  size_t max_buffers_ = 2;
  bool counts_bytes_ = true;
  size_t largest_bytes_ = 0;  // of all reductions so far
};

}  // namespace fsdp2x
