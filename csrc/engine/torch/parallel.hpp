// Splits a rank's work over the threads that it owns: torch.set_num_threads, OMP_NUM_THREADS.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace fsdp2x {

// Fewer elements than this are not worth another thread: waking one costs as much as a few ten thousand elements.
inline constexpr int64_t kGrainNumel = 1 << 15;

// Calls run(begin, end) on torch's threads for ranges that partition [0, total), each of at least `grain`. The ranges
// depend on the number of threads, so the results of `run` must not depend on the ranges.
void run_parallel(int64_t total, int64_t grain, const std::function<void(int64_t, int64_t)>& run);

// Items of some elements each, whose elements are split over the threads together.
class Items {
 public:
  void add(int64_t numel) { ends_.push_back(first_of(ends_.size()) + numel); }
  // Calls run(item, begin, end) for ranges that together are every element of every item.
  template <class Run>
  void for_each_range(const Run& run) const {
    run_parallel(first_of(ends_.size()), kGrainNumel, [this, &run](int64_t begin, int64_t end) {
      auto item = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
      for (; begin < end; ++item) {
        const int64_t stop = std::min(end, ends_[item]);
        if (begin < stop) run(item, begin - first_of(item), stop - first_of(item));
        begin = stop;
      }
    });
  }

 private:
  int64_t first_of(size_t item) const { return item == 0 ? 0 : ends_[item - 1]; }

  std::vector<int64_t> ends_;
};

}  // namespace fsdp2x
