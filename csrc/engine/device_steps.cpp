// AdamW steps on a device.
#include "engine/device_steps.hpp"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "engine/storage.hpp"

namespace fsdp2x {

namespace {

bool is_same_step(const AdamWStep& a, const AdamWStep& b) { return std::memcmp(&a, &b, sizeof(AdamWStep)) == 0; }

auto facts_of(const cuda::AdamWSegment& one) {
  return std::tuple(one.param, one.exp_avg, one.exp_avg_sq, one.max_exp_avg_sq, one.numel, one.numbers.first,
                    one.numbers.run, one.numbers.stride, one.source, one.group, one.param_type, one.grad_type,
                    one.moment_type);
}

bool are_same(const std::vector<cuda::AdamWSegment>& a, const std::vector<cuda::AdamWSegment>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (facts_of(a[i]) != facts_of(b[i])) return false;
  }
  return true;
}

cuda::AdamWSegment segment_of(const DeviceAdamWJob& job) {
  cuda::AdamWSegment segment;
  segment.param = job.param.mutable_data_ptr();
  segment.exp_avg = job.exp_avg.mutable_data_ptr();
  segment.exp_avg_sq = job.exp_avg_sq.mutable_data_ptr();
  if (job.max_exp_avg_sq.defined()) segment.max_exp_avg_sq = job.max_exp_avg_sq.mutable_data_ptr();
  segment.numel = job.param.numel();
  if (job.is_stochastic) segment.numbers = job.numbers;
  segment.param_type = engine_dtype(job.param.scalar_type());
  segment.grad_type = engine_dtype(job.grad.scalar_type());
  segment.moment_type = engine_dtype(job.exp_avg.scalar_type());
  return segment;
}

}  // namespace

DeviceSteps::DeviceSteps(bool with_twins)
    : kernels_(with_twins ? &cuda::twin_kernels() : cuda::device_kernels()), with_twins_(with_twins) {}

bool DeviceSteps::serves(at::Device device) const {
  return kernels_ != nullptr && (with_twins_ ? device.is_cpu() : device.is_cuda());
}

std::vector<DeviceSteps::Launch> DeviceSteps::launches_of(const std::vector<DeviceAdamWJob>& jobs) const {
  std::vector<Launch> launches;
  for (const DeviceAdamWJob& job : jobs) {
    if (job.param.numel() == 0) continue;
    Launch* launch = launches.empty() ? nullptr : &launches.back();
    const auto has_room = [&](const Launch& one) {
      const bool is_known = one.num_groups > 0 && is_same_step(one.args.steps[one.num_groups - 1], job.step);
      return one.device == job.param.device() && one.segments.size() < static_cast<size_t>(cuda::kMaxTable) &&
             (is_known || one.num_groups < cuda::kMaxGroups) && one.args.stochastic == job.is_stochastic &&
             (!job.is_stochastic || one.args.rounding.step == job.key.step);
    };
    if (launch == nullptr || !has_room(*launch)) {
      launch = &launches.emplace_back();
      launch->device = job.param.device();
      launch->args.stochastic = job.is_stochastic;
      launch->args.rounding = job.key;
    }
    if (launch->num_groups == 0 || !is_same_step(launch->args.steps[launch->num_groups - 1], job.step)) {
      launch->args.steps[launch->num_groups++] = job.step;
    }
    cuda::AdamWSegment segment = segment_of(job);
    segment.source = static_cast<int32_t>(launch->segments.size());
    segment.group = launch->num_groups - 1;
    launch->args.grads[launch->segments.size()] = job.grad.const_data_ptr();
    launch->segments.push_back(segment);
  }
  return launches;
}

void DeviceSteps::adamw(const std::vector<DeviceAdamWJob>& jobs) {
  std::vector<Launch> launches = launches_of(jobs);
  kept_.resize(std::max(kept_.size(), launches.size()));
  for (size_t i = 0; i < launches.size(); ++i) {
    Launch& launch = launches[i];
    const c10::OptionalDeviceGuard guard(launch.device.is_cpu() ? std::nullopt : std::optional(launch.device));
    std::unique_ptr<Kept>& kept = kept_[i];
    if (kept == nullptr || !are_same(kept->segments, launch.segments)) {
      kept.reset(new Kept{launch.segments, {cuda::make_plan(launch.segments), launch.device}});
      ++num_plans_;
    }
    cuda::Stream stream = nullptr;
    if (!launch.device.is_cpu()) {
      const c10::impl::VirtualGuardImpl impl(launch.device.type());
      stream = static_cast<cuda::Stream>(impl.getStream(launch.device).native_handle());
    }
    kernels_->adamw(kept->plan.list(), launch.args, stream);
  }
}

}  // namespace fsdp2x
