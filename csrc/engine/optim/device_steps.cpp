// Cuts the parameters of a step into launches and runs them through kept plans.
#include "engine/optim/device_steps.hpp"

#include <algorithm>
#include <cstring>

#include "engine/memory/storage.hpp"

namespace fsdp2x {

namespace {

// Jobs that one launch can step.
template <class Job>
struct Launch {
  at::Device device = at::kCPU;
  std::vector<typename Job::Segment> segments;
  typename Job::Args args;
  int num_groups = 0;
};

template <class Step>
bool has_same_bits(const Step& a, const Step& b) {
  return std::memcmp(&a, &b, sizeof(Step)) == 0;
}

// --- what an optimizer has of its own: hyperparameters of a launch's groups, how it stores, state -- -----------------

template <class Job>
bool is_group(const Job& job, const typename Job::Args& args, int group) {
  if constexpr (requires { job.momentum; }) {
    if (args.momentum[group] != job.momentum) return false;
  }
  return has_same_bits(args.steps[group], job.step);
}

template <class Job>
void set_group(const Job& job, typename Job::Args& args, int group) {
  args.steps[group] = job.step;
  if constexpr (requires { job.momentum; }) args.momentum[group] = job.momentum;
}

bool is_coded(const DeviceAdamWJob& job) { return job.exp_avg_scales.defined(); }

bool stores_alike(const DeviceAdamWJob& job, const cuda::AdamWArgs& args) {
  return args.coded == is_coded(job) && args.stochastic == job.is_stochastic &&
         (!job.is_stochastic || args.rounding.step == job.key.step);
}

template <class Job>
bool stores_alike(const Job&, const typename Job::Args&) {
  return true;
}

void set_storing(const DeviceAdamWJob& job, cuda::AdamWArgs& args) {
  args.coded = is_coded(job);
  args.stochastic = job.is_stochastic;
  args.rounding = job.key;
}

template <class Job>
void set_storing(const Job&, typename Job::Args&) {}

cuda::AdamWSegment segment_of(const DeviceAdamWJob& job) {
  cuda::AdamWSegment segment;
  segment.param = job.param.mutable_data_ptr();
  segment.exp_avg = job.exp_avg.mutable_data_ptr();
  segment.exp_avg_sq = job.exp_avg_sq.mutable_data_ptr();
  if (job.max_exp_avg_sq.defined()) segment.max_exp_avg_sq = job.max_exp_avg_sq.mutable_data_ptr();
  if (is_coded(job)) {
    segment.exp_avg_scales = job.exp_avg_scales.mutable_data_ptr<float>();
    segment.exp_avg_sq_scales = job.exp_avg_sq_scales.mutable_data_ptr<float>();
    if (job.max_exp_avg_sq.defined()) {
      segment.max_exp_avg_sq_scales = job.max_exp_avg_sq_scales.mutable_data_ptr<float>();
    }
  }
  if (job.is_stochastic) segment.numbers = job.numbers;
  segment.type = engine_dtype(job.param.scalar_type());
  segment.moment_type = engine_dtype(job.exp_avg.scalar_type());
  return segment;
}

cuda::SgdSegment segment_of(const DeviceSgdJob& job) {
  cuda::SgdSegment segment;
  segment.param = job.param.mutable_data_ptr<float>();
  if (job.buffer.defined()) segment.buffer = job.buffer.mutable_data_ptr<float>();
  return segment;
}

cuda::LionSegment segment_of(const DeviceLionJob& job) {
  cuda::LionSegment segment;
  segment.param = job.param.mutable_data_ptr<float>();
  segment.average = job.average.mutable_data_ptr<float>();
  return segment;
}

// --- the same for all ------------------------------------------------------------------------------------------------

template <class Job>
bool has_room(const Launch<Job>& launch, const Job& job) {
  const bool is_known = launch.num_groups > 0 && is_group(job, launch.args, launch.num_groups - 1);
  return launch.device == job.param.device() && launch.segments.size() < static_cast<size_t>(cuda::kMaxTable) &&
         (is_known || launch.num_groups < cuda::kMaxGroups) && stores_alike(job, launch.args);
}

template <class Job>
void add(Launch<Job>& launch, const Job& job) {
  if (launch.num_groups == 0 || !is_group(job, launch.args, launch.num_groups - 1)) {
    set_group(job, launch.args, launch.num_groups++);
  }
  auto segment = segment_of(job);
  segment.numel = job.param.numel();
  segment.source = static_cast<int32_t>(launch.segments.size());
  segment.group = launch.num_groups - 1;
  launch.args.grads[launch.segments.size()] = job.grad.const_data_ptr();
  launch.segments.push_back(segment);
}

template <class Job>
std::vector<Launch<Job>> launches_of(const std::vector<Job>& jobs) {
  std::vector<Launch<Job>> launches;
  for (const Job& job : jobs) {
    if (job.param.numel() == 0) continue;
    // Those stored otherwise, or on another device, may have come between.
    auto launch = std::find_if(launches.rbegin(), launches.rend(), [&](const auto& one) { return has_room(one, job); });
    if (launch == launches.rend()) {
      launches.emplace_back().device = job.param.device();
      set_storing(job, launches.back().args);
      launch = launches.rbegin();
    }
    add(*launch, job);
  }
  return launches;
}

template <class Job, class Kernel>
void run_all(const std::vector<Job>& jobs, const at::Tensor& grad_scale, KeptPlans<typename Job::Segment>& plans,
             Kernel kernel) {
  std::vector<Launch<Job>> launches = launches_of(jobs);
  for (size_t i = 0; i < launches.size(); ++i) {
    const DeviceScope scope(launches[i].device);
    at::Tensor scale;  // freed in the order of the stream that reads it
    if (grad_scale.defined()) {
      scale = grad_scale.to(launches[i].device, at::kFloat);
      launches[i].args.grad_scale = scale.const_data_ptr<float>();
    }
    kernel(plans.list(i, launches[i].segments, launches[i].device), launches[i].args, scope.stream());
  }
}

}  // namespace

void DeviceSteps::run(const std::vector<DeviceAdamWJob>& jobs, const at::Tensor& grad_scale) {
  if (!jobs.empty()) run_all(jobs, grad_scale, adamw_plans_, kernels_->adamw);
}

void DeviceSteps::run(const std::vector<DeviceSgdJob>& jobs, const at::Tensor& grad_scale) {
  if (!jobs.empty()) run_all(jobs, grad_scale, sgd_plans_, kernels_->sgd);
}

void DeviceSteps::run(const std::vector<DeviceLionJob>& jobs, const at::Tensor& grad_scale) {
  if (!jobs.empty()) run_all(jobs, grad_scale, lion_plans_, kernels_->lion);
}

}  // namespace fsdp2x
