// Rank-major segments of gradients.
#include "engine/transport/segment_plans.hpp"

#include "engine/memory/device_copy.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

const std::vector<Copy>& SegmentPlan::copies_of(size_t param, DType type) {
  auto& copies = copies_[{param, type}];
  if (copies.empty()) {
    copies = layout->gradient_to_segments(param, type);
    // The layout's segments lie end to end. These have the flags between them.
    const size_t segment = layout->reduce_segment_bytes();
    for (Copy& copy : copies) copy.dst_offset += copy.dst_offset / segment * (segment_bytes - segment);
    copies = joined(std::move(copies));
  }
  return copies;
}

at::Tensor SegmentPlan::unpacked(size_t param, DType type, const void* segments, at::Device device) {
  std::vector<Copy> copies = copies_of(param, type);
  for (Copy& copy : copies) {
    std::swap(copy.src_offset, copy.dst_offset);
    std::swap(copy.src_stride, copy.dst_stride);
    std::swap(copy.src, copy.dst);
  }
  const at::TensorOptions options = at::TensorOptions().device(device).dtype(torch_dtype(type));
  at::Tensor gradient = at::empty({layout->params()[param].shape.numel()}, options);
  run_copies_on(device, copies, segments, gradient.mutable_data_ptr());
  return gradient;
}

SegmentPlan& SegmentPlans::of(const ParamGroup& group) {
  std::vector<bool> trainable(group.params().size());
  for (size_t i = 0; i < trainable.size(); ++i) {
    trainable[i] = group.params()[i].trains(group.layout().params()[i]);
  }
  auto found = plans_.find(trainable);
  if (found == plans_.end()) {
    SegmentPlan plan;
    static_cast<ReductionPlan&>(plan) = plan_reduction(group.layout(), trainable, sizes_);
    const size_t element = dtype_bytes(group.reduce_type());
    // Every rank gets the same flags. The bytes after them are sent too, so they are written as well.
    const auto flags_numel = static_cast<int64_t>((plan.segment_bytes - plan.layout->reduce_segment_bytes()) / element);
    plan.flags_to_segments = {.src_offset = 0,
                              .dst_offset = plan.layout->reduce_segment_bytes(),
                              .count = group.layout().world(),
                              .piece_numel = flags_numel,
                              .src_stride = 0,
                              .dst_stride = static_cast<int64_t>(plan.segment_bytes / element),
                              .src = DType::f32,
                              .dst = group.reduce_type()};
    found = plans_.emplace(std::move(trainable), std::move(plan)).first;
  }
  return found->second;
}

SegmentPlan& SegmentPlans::of_all(const ParamGroup& group, bool is_wide) {
  std::optional<SegmentPlan>& plan = is_wide ? wide_ : narrow_;
  if (!plan) {
    plan.emplace();
    plan->layout = std::make_shared<const Layout>(is_wide ? group.layout() : group.layout().narrow());
    plan->segment_bytes = plan->layout->reduce_segment_bytes();
  }
  return *plan;
}

}  // namespace fsdp2x
