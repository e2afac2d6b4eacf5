// Sorts the parameters of a step into launches.
#include "engine/optim/device_steps.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/memory/storage.hpp"
#include "engine/optim/adamw_job.hpp"

namespace fsdp2x {
namespace {

cuda::AdamWSegment segment_of(const AdamWJob& job) {
  cuda::AdamWSegment segment;
  segment.param = job.pair.param.tensor.mutable_data_ptr();
  segment.exp_avg = job.exp_avg.memory.mutable_data_ptr();
  segment.exp_avg_sq = job.exp_avg_sq.memory.mutable_data_ptr();
  if (job.max_exp_avg_sq.memory.defined()) segment.max_exp_avg_sq = job.max_exp_avg_sq.memory.mutable_data_ptr();
  segment.exp_avg_scales = job.exp_avg.scales_at(0);
  segment.exp_avg_sq_scales = job.exp_avg_sq.scales_at(0);
  segment.max_exp_avg_sq_scales = job.max_exp_avg_sq.scales_at(0);
  segment.numel = job.pair.param.tensor.numel();
  if (job.is_stochastic) segment.numbers = {job.rounding.first, job.rounding.run, job.rounding.stride};
  segment.type = engine_dtype(job.pair.param.tensor.scalar_type());
  segment.moment_type = engine_dtype(job.exp_avg.memory.scalar_type());
  return segment;
}

// Jobs that one launch can step.
struct Launch {
  at::Device device;
  std::vector<cuda::AdamWSegment> segments;
  cuda::AdamWArgs args;
  int num_groups = 0;

  explicit Launch(const AdamWJob& job) : device(job.pair.param.tensor.device()) {
    args.coded = job.is_coded();
    args.stochastic = job.is_stochastic;
    args.rounding = job.rounding.key;
  }

  bool stores_alike(const AdamWJob& job) const {
    return args.coded == job.is_coded() && args.stochastic == job.is_stochastic &&
           (!job.is_stochastic || args.rounding.step == job.rounding.key.step);
  }

  bool is_last_group(const AdamWJob& job) const {
    return num_groups > 0 && std::memcmp(&args.steps[num_groups - 1], &job.step, sizeof(job.step)) == 0;
  }

  bool has_room(const AdamWJob& job) const {
    return device == job.pair.param.tensor.device() && segments.size() < static_cast<size_t>(cuda::kMaxTable) &&
           (is_last_group(job) || num_groups < cuda::kMaxGroups) && stores_alike(job);
  }

  void add(const AdamWJob& job) {
    if (!is_last_group(job)) args.steps[num_groups++] = job.step;
    cuda::AdamWSegment segment = segment_of(job);
    segment.source = static_cast<int32_t>(segments.size());
    segment.group = num_groups - 1;
    args.grads[segments.size()] = job.pair.grad.tensor.const_data_ptr();
    segments.push_back(segment);
  }
};

}  // namespace

void DeviceSteps::run(std::span<const AdamWJob> jobs, const at::Tensor& grad_scale) {
  std::vector<Launch> launches;
  for (const AdamWJob& job : jobs) {
    if (job.pair.param.tensor.numel() == 0) continue;
    // Launches for other storage types or devices may come between.
    const auto has_room = [&job](const Launch& launch) { return launch.has_room(job); };
    const auto launch = std::find_if(launches.rbegin(), launches.rend(), has_room);
    (launch == launches.rend() ? launches.emplace_back(job) : *launch).add(job);
  }
  for (size_t i = 0; i < launches.size(); ++i) {
    Launch& launch = launches[i];
    const DeviceScope scope(launch.device);
    at::Tensor scale;  // freed in the order of the stream that reads it
    if (grad_scale.defined()) {
      scale = grad_scale.to(launch.device, at::kFloat);
      launch.args.grad_scale = scale.const_data_ptr<float>();
    }
    kernels_->adamw(plans_.list(i, launch.segments, launch.device), launch.args, scope.stream());
  }
}

}  // namespace fsdp2x
