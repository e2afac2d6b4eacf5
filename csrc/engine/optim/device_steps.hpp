// Optimizer steps on a device with the kernels of csrc/kernels/cuda. Plans contain the addresses of parameters and
// state, which usually stay the same. A plan is rebuilt and uploaded after something moved. Otherwise a step is one
// launch per plan.
//
// A Job is one parameter of a step (step_jobs.hpp). All its tensors are dense and have one memory format, and the
// gradient has the parameter's dtype. For a device, a Job has:
//
//   Args                           the arguments of its kernel, with `steps`, `grads` and `grad_scale`
//   launch(kernels, list, args, stream)
//
// These functions are found by the type of the Job:
//
//   segment_of(job)                                  the job in a plan
//   stores_alike(job, args), set_storing(job, args)  what all jobs of a launch must have in common
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/memory/device_kernels.hpp"
#include "kernels/rules/optimizer_rules.hpp"

namespace fsdp2x {

// State that an optimizer keeps between its steps.
class DeviceSteps {
 public:
  explicit DeviceSteps(const cuda::Kernels* on_host) : kernels_(on_host) {}

  const DeviceKernels& kernels() const { return kernels_; }
  // Enqueues one step on the current streams. `grad_scale`: undefined, or one number that multiplies all gradients.
  template <class Iterator>
  void run(Iterator first, Iterator last, const at::Tensor& grad_scale);
  // Returns the number of plans built so far.
  size_t num_plans() const { return adamw_plans_.num_built() + float_plans_.num_built(); }

 private:
  KeptPlans<cuda::AdamWSegment>& plans_of(const cuda::AdamWSegment&) { return adamw_plans_; }
  KeptPlans<cuda::FloatSegment>& plans_of(const cuda::FloatSegment&) { return float_plans_; }

  DeviceKernels kernels_;
  KeptPlans<cuda::AdamWSegment> adamw_plans_;
  KeptPlans<cuda::FloatSegment> float_plans_;
};

// Jobs that one launch can step.
template <class Job>
struct Launch {
  using Segment = decltype(segment_of(std::declval<const Job&>()));
  at::Device device = at::kCPU;
  std::vector<Segment> segments;
  typename Job::Args args;
  int num_groups = 0;

  bool is_last_group(const Job& job) const {
    return num_groups > 0 && std::memcmp(&args.steps[num_groups - 1], &job.step, sizeof(job.step)) == 0;
  }

  bool has_room(const Job& job) const {
    return device == job.pair.param.tensor.device() && segments.size() < static_cast<size_t>(cuda::kMaxTable) &&
           (is_last_group(job) || num_groups < cuda::kMaxGroups) && stores_alike(job, args);
  }

  void add(const Job& job) {
    if (!is_last_group(job)) args.steps[num_groups++] = job.step;
    Segment segment = segment_of(job);
    segment.numel = job.pair.param.tensor.numel();
    segment.source = static_cast<int32_t>(segments.size());
    segment.group = num_groups - 1;
    args.grads[segments.size()] = job.pair.grad.tensor.const_data_ptr();
    segments.push_back(segment);
  }
};

template <class Iterator>
void DeviceSteps::run(Iterator first, Iterator last, const at::Tensor& grad_scale) {
  using Job = std::remove_cvref_t<decltype(*first)>;
  std::vector<Launch<Job>> launches;
  for (; first != last; ++first) {
    if (first->pair.param.tensor.numel() == 0) continue;
    // Launches for other storage types or devices may come between.
    const auto has_room = [&first](const Launch<Job>& launch) { return launch.has_room(*first); };
    auto launch = std::find_if(launches.rbegin(), launches.rend(), has_room);
    if (launch == launches.rend()) {
      launches.emplace_back().device = first->pair.param.tensor.device();
      set_storing(*first, launches.back().args);
      launch = launches.rbegin();
    }
    launch->add(*first);
  }
  for (size_t i = 0; i < launches.size(); ++i) {
    Launch<Job>& launch = launches[i];
    const DeviceScope scope(launch.device);
    at::Tensor scale;  // freed in the order of the stream that reads it
    if (grad_scale.defined()) {
      scale = grad_scale.to(launch.device, at::kFloat);
      launch.args.grad_scale = scale.const_data_ptr<float>();
    }
    Job::launch(*kernels_.operator->(), plans_of(launch.segments.front()).list(i, launch.segments, launch.device),
                launch.args, scope.stream());
  }
}

}  // namespace fsdp2x
