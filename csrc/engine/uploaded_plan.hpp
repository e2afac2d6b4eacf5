// A plan of ring cuda in the memory of the kernels that run it.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "cuda/plan.hpp"

namespace fsdp2x {

template <class Segment>
struct UploadedPlan {
  UploadedPlan(cuda::Plan<Segment> made, at::Device device) : plan(std::move(made)) {
    at::Tensor image = at::empty({static_cast<int64_t>(std::max<size_t>(plan.image_bytes(), 1))}, at::kByte);
    plan.write_image(image.data_ptr());
    memory = image.to(device);  // once; returns when it has arrived
  }
  cuda::List<Segment> list() const { return plan.list(memory.const_data_ptr()); }

  cuda::Plan<Segment> plan;
  at::Tensor memory;
};

}  // namespace fsdp2x
