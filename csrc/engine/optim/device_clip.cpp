// Cuts gradients into launches and runs them through kept plans.
//
//   tiles of bucket 0 | tiles of bucket 1 | ...     sum_squares: one number per tile
//           v                   v                   add_up
//       sums[0]             sums[1]                 over the ranks, added up, then: clip_factor, scale_gradients
#include "engine/optim/device_clip.hpp"

#include <algorithm>

#include "engine/memory/storage.hpp"

namespace fsdp2x {

namespace {

// Gradients of one bucket that one launch can take.
struct ClipLaunch {
  long bucket;
  std::vector<cuda::ReduceSegment> segments;
  cuda::TargetTable targets;
};

std::vector<ClipLaunch> launches_of(const std::vector<DeviceGradient>& gradients) {
  std::vector<const DeviceGradient*> sorted;
  for (const DeviceGradient& gradient : gradients) {
    if (gradient.values.numel() > 0) sorted.push_back(&gradient);
  }
  // Gradients without a bucket come last.
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) {
    return static_cast<size_t>(a->bucket) < static_cast<size_t>(b->bucket);
  });
  std::vector<ClipLaunch> launches;
  for (const DeviceGradient* gradient : sorted) {
    if (launches.empty() || launches.back().bucket != gradient->bucket ||
        launches.back().segments.size() == static_cast<size_t>(cuda::kMaxTable)) {
      launches.push_back({gradient->bucket, {}, {}});
    }
    ClipLaunch& launch = launches.back();
    cuda::ReduceSegment segment;
    segment.numel = gradient->values.numel();
    segment.target = static_cast<int32_t>(launch.segments.size());
    segment.src = segment.dst = engine_dtype(gradient->values.scalar_type());
    launch.targets.base[launch.segments.size()] = gradient->values.mutable_data_ptr();
    launch.segments.push_back(segment);
  }
  return launches;
}

at::TensorOptions f64_on(at::Device device) { return at::TensorOptions().dtype(at::kDouble).device(device); }

}  // namespace

at::Tensor DeviceClip::sum_squares(const std::vector<DeviceGradient>& gradients) {
  const at::Device device = gradients.at(0).values.device();
  const DeviceScope scope(device);
  long num_buckets = 0;
  for (const DeviceGradient& gradient : gradients) num_buckets = std::max(num_buckets, gradient.bucket + 1);
  std::vector<int64_t> num_tiles(static_cast<size_t>(num_buckets));
  int64_t total_tiles = 0;
  const std::vector<ClipLaunch> launches = launches_of(gradients);
  std::vector<cuda::ReduceList> lists;
  for (size_t i = 0; i < launches.size() && launches[i].bucket >= 0; ++i) {
    lists.push_back(plans_.list(i, launches[i].segments, device));
    num_tiles[static_cast<size_t>(launches[i].bucket)] += lists.back().num_tiles;
    total_tiles += lists.back().num_tiles;
  }
  const at::Tensor tile_sums = at::empty({total_tiles}, f64_on(device));
  const at::Tensor sums = at::empty({num_buckets}, f64_on(device));
  auto* tiles = tile_sums.mutable_data_ptr<double>();
  for (size_t i = 0; i < lists.size(); ++i) {
    kernels_->sum_squares(lists[i], launches[i].targets, tiles, scope.stream());
    tiles += lists[i].num_tiles;
  }
  tiles = tile_sums.mutable_data_ptr<double>();
  for (size_t bucket = 0; bucket < num_tiles.size(); ++bucket) {
    const double* values = tiles;
    at::Tensor parts;  // freed in the order of the stream that reads it
    int64_t num = num_tiles[bucket];
    for (; num > cuda::kSumNumel; num = parts.numel()) {
      const at::Tensor next = at::empty({cuda::num_sums(num)}, f64_on(device));
      kernels_->add_up(values, num, next.mutable_data_ptr<double>(), scope.stream());
      values = next.const_data_ptr<double>();
      parts = next;
    }
    kernels_->add_up(values, num, sums.mutable_data_ptr<double>() + bucket, scope.stream());
    tiles += num_tiles[bucket];
  }
  return sums;
}

ClipNumbers DeviceClip::clip_numbers(const at::Tensor& square_sum, double max_norm, bool in_f64) const {
  const DeviceScope scope(square_sum.device());
  const at::Tensor norm = at::empty({}, f64_on(square_sum.device()));
  at::Tensor factor = at::empty_like(norm);
  kernels_->clip_factor(square_sum.const_data_ptr<double>(), max_norm, in_f64, norm.mutable_data_ptr<double>(),
                        factor.mutable_data_ptr<double>(), scope.stream());
  return {in_f64 ? norm : norm.to(at::kFloat), std::move(factor)};
}

void DeviceClip::multiply(const std::vector<DeviceGradient>& gradients, const at::Tensor& factor) {
  const at::Device device = gradients.at(0).values.device();
  const DeviceScope scope(device);
  const std::vector<ClipLaunch> launches = launches_of(gradients);
  for (size_t i = 0; i < launches.size(); ++i) {
    kernels_->scale_gradients(plans_.list(i, launches[i].segments, device), launches[i].targets,
                              factor.const_data_ptr<double>(), scope.stream());
  }
}

}  // namespace fsdp2x
