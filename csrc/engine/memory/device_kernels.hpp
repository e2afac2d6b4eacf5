// The kernels of csrc/kernels/cuda for optimizers and clipping: which memory they serve, where they are enqueued, and
// plans that are kept between calls.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "engine/memory/uploaded_plan.hpp"
#include "engine/torch/current_stream.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x {

// Returns the kernels of a CUDA device. Null: built without nvcc, or the driver cannot run them there, which warns
// once. Needs the GIL.
const cuda::Kernels* kernels_on(at::Device device);

// The kernels of CUDA devices. `on_host`: CPU kernels in their place, for tests.
class DeviceKernels {
 public:
  explicit DeviceKernels(const cuda::Kernels* on_host = nullptr)
      : table_(on_host != nullptr ? on_host : cuda::device_kernels()), is_on_host_(on_host != nullptr) {}

  // False: built without nvcc.
  bool exist() const { return table_ != nullptr; }
  bool serve(at::Device device) const { return is_on_host_ ? device.is_cpu() : kernels_on(device) != nullptr; }
  const cuda::Kernels* operator->() const { return table_; }

 private:
  const cuda::Kernels* table_;
  bool is_on_host_;
};

// While it lives, `device` is the current one, as launches want it.
class DeviceScope {
 public:
  explicit DeviceScope(at::Device device);
  // Returns the device's current stream.
  cuda::Stream stream() const { return stream_; }

 private:
  c10::OptionalDeviceGuard guard_;
  cuda::Stream stream_ = nullptr;
};

// Plans of launches that repeat from call to call, by number of the launch. A plan is rebuilt and uploaded again if its
// segments have changed, as in steps with other gradients. The host never waits for it.
template <class Segment>
class KeptPlans {
 public:
  cuda::List<Segment> list(size_t launch, const std::vector<Segment>& segments, at::Device device) {
    if (kept_.size() <= launch) kept_.resize(launch + 1);
    std::unique_ptr<Kept>& kept = kept_[launch];
    if (kept == nullptr || kept->plan.memory.device() != device || kept->segments != segments) {
      cuda::Plan<Segment> plan = cuda::make_plan(segments);
      at::Tensor memory = at::empty({static_cast<int64_t>(memory_bytes(plan))}, at::device(device).dtype(at::kByte));
      kept.reset(new Kept{segments, {std::move(plan), std::move(memory), Arrival::in_order}, current_stream(device)});
      ++num_built_;
    }
    // The plan is freed in the order of the stream that it was made on.
    const auto now = current_stream(device);
    if (now && now != kept->home) kept->plan.memory.record_stream(*now);
    return kept->plan.list();
  }
  // Returns the number of plans built so far.
  size_t num_built() const { return num_built_; }

 private:
  struct Kept {
    std::vector<Segment> segments;
    UploadedPlan<Segment> plan;
    std::optional<c10::Stream> home;
  };
  std::vector<std::unique_ptr<Kept>> kept_;
  size_t num_built_ = 0;
};

}  // namespace fsdp2x
