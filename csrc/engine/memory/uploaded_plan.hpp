// A plan of csrc/kernels/cuda in the memory of the kernels that run it.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "kernels/cuda/plan.hpp"

namespace fsdp2x {

// Allocates CPU memory for uploads to `device`. It is page-locked for a device with streams, so the host need not wait
// for the copy.
inline at::Tensor host_memory_for(at::Device device, at::ScalarType type, size_t numel) {
  const auto options = at::TensorOptions().dtype(type).pinned_memory(device.is_cuda());
  return at::empty({static_cast<int64_t>(numel)}, options);
}

enum class Arrival {
  now,       // the host waits: for plans that are made once and read by any stream
  in_order,  // in order of the current stream, whose work reads it next
};

template <class Segment>
size_t memory_bytes(const cuda::Plan<Segment>& plan) {
  return std::max<size_t>(plan.image_bytes(), 1);
}

template <class Segment>
struct UploadedPlan {
  // `target`: memory_bytes() of the device.
  UploadedPlan(cuda::Plan<Segment> made, at::Tensor target, Arrival arrival)
      : plan(std::move(made)), memory(std::move(target)) {
    const at::Tensor image = host_memory_for(memory.device(), at::kByte, memory_bytes(plan));
    plan.write_image(image.data_ptr());
    memory.copy_(image, /*non_blocking=*/arrival == Arrival::in_order);
  }
  cuda::List<Segment> list() const { return plan.list(memory.const_data_ptr()); }

  cuda::Plan<Segment> plan;
  at::Tensor memory;
};

}  // namespace fsdp2x
