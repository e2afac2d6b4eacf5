// State that the parts of the device transport share: the collectives of the process groups, the lanes (streams) and
// how they follow each other, and the counted memory.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/params/param_group.hpp"
#include "engine/torch/py_ref.hpp"
#include "engine/transport/device/device_buffers.hpp"

namespace fsdp2x {

// Python callables of the process groups. Each is ordered by the current stream and returns once it is enqueued.
struct DeviceCollectives {
  PyRef all_gather;        // (output, input)
  PyRef all_gather_group;  // ([output], [input]): in one launch. Null: gather in one piece, packed
  PyRef reduce_scatter;    // (output, input, average: bool)
  PyRef all_to_all;        // (output, input): of bytes
  PyRef allocate;          // (bytes) -> memory registered with the process group. Null: torch's allocator
};

class DeviceContext {
 public:
  DeviceContext(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer);

  const DeviceCollectives& collectives() const { return collectives_; }
  DeviceLayer& layer() const { return *layer_; }

  // Makes buffers to borrow. `tally`: they are counted with temporary memory.
  std::unique_ptr<DeviceBuffers> make_buffers(const std::string& name, bool tallied = true);
  const std::vector<DeviceBuffers*>& all_buffers() const { return all_buffers_; }
  MemoryTally& tally() { return tally_; }
  const MemoryTally& tally() const { return tally_; }
  // Returns whether memory is kept for the next borrower, as registered memory is because it is expensive.
  bool keeps() const { return static_cast<bool>(collectives_.allocate); }

  // Orders the next work of `lane` after all work that `other` has so far.
  void follow(Lane lane, Lane other);
  void follow_compute(Lane lane) { follow(lane, Lane::compute); }
  void join(Lane lane) { follow(Lane::compute, lane); }
  void host_waits_for(Lane lane);

  // Notes that a block of gradients was given back after work of `lane`. This happens if hooks take gradients
  // immediately, as an optimizer in backward does. The next taker in this backward may be on another lane.
  void note_freed_block(Lane lane) { lanes_with_freed_blocks_[static_cast<size_t>(lane)] = true; }
  // Orders `lane` before it gets a block of gradients that other lanes may have used last.
  void follow_blocks(Lane lane);
  void forget_freed_blocks() { lanes_with_freed_blocks_.fill(false); }

 private:
  at::Tensor allocate(size_t bytes);

  DeviceCollectives collectives_;
  std::shared_ptr<DeviceLayer> layer_;
  MemoryTally tally_;  // temporary memory, without slots
  std::vector<DeviceBuffers*> all_buffers_;
  std::vector<std::unique_ptr<DeviceEvent>> lane_events_;  // per lane, for its work so far
  std::array<bool, kNumLanes> lanes_with_freed_blocks_{};
};

// Returns whether parameters are views of the pool. Not if Python prepares the pool before each gather, as for aliases,
// or has asked for a copy because a forward writes to them.
inline bool reads_pool(const ParamGroup& group) { return group.views_pool() && !group.calls().begin_extension_gather; }

// A call from a user hook that runs on another lane, as gradient hooks do. While it lives, the compute lane is current
// and ordered after that lane. At the end, the lane continues after the compute lane.
class HomeScope {
 public:
  explicit HomeScope(DeviceContext& context) : context_(context), away_(context.layer().current_lane()) {
    if (away_ == Lane::compute || away_ == Lane::host) return;
    context.join(away_);
    scope_.emplace(context.layer(), Lane::compute);
  }
  ~HomeScope() {
    if (!scope_) return;
    scope_.reset();
    context_.follow_compute(away_);
  }
  HomeScope(const HomeScope&) = delete;
  HomeScope& operator=(const HomeScope&) = delete;

 private:
  DeviceContext& context_;
  Lane away_;
  std::optional<LaneScope> scope_;
};

}  // namespace fsdp2x
