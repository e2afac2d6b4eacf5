// Rank-major segments of gradients.
#include "engine/transport/segment_plans.hpp"

#include "core/gather_plan.hpp"
#include "engine/params/param_group.hpp"

namespace fsdp2x {

const std::vector<Copy>& SegmentPlan::copies_of(size_t param, DType type) {
  auto& copies = copies_[{param, type}];
  if (copies.empty()) {
    copies = packed->gradient_to_segments(param, type);
    // The layout's segments lie end to end; ours have the flags between them.
    const size_t segment = packed->reduce_segment_bytes();
    for (Copy& copy : copies) copy.dst_offset += copy.dst_offset / segment * (segment_bytes - segment);
    copies = joined(std::move(copies));
  }
  return copies;
}

bool SegmentPlan::is_pool(const Layout& pool) const {
  for (size_t i = 0; i < pool.params().size(); ++i) {
    const ParamPlace& place = layout->params()[i];
    if (!place.shape.trainable || place.shape.reduce != place.shape.orig ||
        place.reduce_segment_offset != pool.params()[i].shard_offset) {
      return false;
    }
  }
  return true;
}

SegmentPlan& SegmentPlans::of(const ParamGroup& group, size_t pack_below_bytes) {
  std::vector<bool> trainable(group.params().size());
  for (size_t i = 0; i < trainable.size(); ++i) {
    trainable[i] = group.layout().params()[i].shape.trainable && group.params()[i].sharded().requires_grad();
  }
  std::pair key(std::move(trainable), pack_below_bytes);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    SegmentPlan plan;
    plan.packed = std::make_shared<const Layout>(group.layout().training(key.first));
    plan.layout = plan.packed;
    const std::vector<bool> direct = direct_reductions(*plan.layout, pack_below_bytes);
    std::vector<bool> packs = key.first;
    for (size_t i = 0; i < direct.size(); ++i) {
      if (!direct[i]) continue;
      plan.direct.push_back(i);
      packs[i] = false;
    }
    if (!plan.direct.empty()) {
      plan.layout = std::make_shared<const Layout>(group.layout().training(key.first, direct));
      plan.packed = std::make_shared<const Layout>(group.layout().training(packs));
    }
    plan.segment_bytes = plan.rows_bytes = plan.packed->flagged_segment_bytes();
    for (const size_t i : plan.direct) {
      const ParamPlace& place = plan.layout->params()[i];
      plan.rows_bytes += align_up(static_cast<size_t>(place.padded_shard_numel) * dtype_bytes(place.shape.reduce));
    }
    const size_t element = dtype_bytes(group.reduce_type());
    // The same flags for every rank, and nothing behind them that was never written: it travels with them.
    const auto flags_numel = static_cast<int64_t>((plan.segment_bytes - plan.packed->reduce_segment_bytes()) / element);
    plan.flags_to_segments = {.src_offset = 0,
                              .dst_offset = plan.packed->reduce_segment_bytes(),
                              .count = group.layout().world(),
                              .piece_numel = flags_numel,
                              .src_stride = 0,
                              .dst_stride = static_cast<int64_t>(plan.segment_bytes / element),
                              .src = DType::f32,
                              .dst = group.reduce_type()};
    found = plans_.emplace(std::move(key), std::move(plan)).first;
  }
  return found->second;
}

}  // namespace fsdp2x
