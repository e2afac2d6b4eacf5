// What the parts of the device transport share: the collectives of the process groups, the lanes and how they follow
// each other, and the memory that is counted.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/torch/py_ref.hpp"
#include "engine/transport/device/device_buffers.hpp"

namespace fsdp2x {

// Python callables of the process groups. All are ordered by the current stream and return when they are enqueued.
struct DeviceCollectives {
  PyRef all_gather;        // (output, input)
  PyRef all_gather_group;  // ([output], [input]): in one launch; null: gather in one piece, packed
  PyRef reduce_scatter;    // (output, input, average: bool)
  PyRef all_to_all;        // (output, input): of bytes
  PyRef allocate;          // (bytes) -> memory registered with the process group; null: torch's allocator
};

class DeviceContext {
 public:
  DeviceContext(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer);

  const DeviceCollectives& collectives() const { return collectives_; }
  DeviceLayer& layer() const { return *layer_; }

  // Memory to lend. `tally`: it is counted with what comes and goes.
  std::unique_ptr<DeviceBuffers> make_buffers(const std::string& name, bool tallied = true);
  const std::vector<DeviceBuffers*>& all_buffers() const { return all_buffers_; }
  MemoryTally& tally() { return tally_; }
  const MemoryTally& tally() const { return tally_; }
  // Whether memory is kept for the next borrower: where it is dear.
  bool keeps() const { return static_cast<bool>(collectives_.allocate); }

  // Work that `lane` is given next comes after everything that `other` has been given.
  void follow(Lane lane, Lane other);
  void follow_compute(Lane lane) { follow(lane, Lane::compute); }
  void join(Lane lane) { follow(Lane::compute, lane); }
  void host_waits_for(Lane lane);

  // A block of gradients was given back behind the work of `lane`: of gradients that hooks took at once, as an
  // optimizer in backward does. Who takes such a block next in this backward may be on another lane.
  void note_freed_block(Lane lane) { lanes_with_freed_blocks_[static_cast<size_t>(lane)] = true; }
  // `lane` is given a block of gradients next, and others may have used it last.
  void follow_blocks(Lane lane);
  void forget_freed_blocks() { lanes_with_freed_blocks_.fill(false); }

 private:
  at::Tensor allocate(size_t bytes);

  DeviceCollectives collectives_;
  std::shared_ptr<DeviceLayer> layer_;
  MemoryTally tally_;  // of what comes and goes, slots aside
  std::vector<DeviceBuffers*> all_buffers_;
  std::vector<std::unique_ptr<DeviceEvent>> lane_events_;  // per lane: its work so far
  std::array<bool, kNumLanes> lanes_with_freed_blocks_{};
};

// A call from a hook of the user's that runs on another lane, as hooks of gradients do. While it lives the compute lane
// is the current one, behind that lane; the lane goes on behind it.
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
