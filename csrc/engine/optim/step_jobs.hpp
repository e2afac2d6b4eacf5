// Shared parts of all optimizer steps: a parameter with its gradient, state lookup, the walk over gradients, and the
// run of jobs on the host and on a device. Keeps no state. All functions except bytes_at and const_bytes_at need the
// GIL.
//
// A Job is one parameter of a step. It has:
//
//   pair                     the parameter and its gradient
//   step.sign                factor by which the kernels multiply gradients
//
// This function is found by the type of the Job:
//
//   run(job, begin, end)     the CPU kernel over these elements, called without the GIL in several threads
//
// device_steps.hpp lists the rest.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/memory/local_tensor.hpp"
#include "engine/optim/device_steps.hpp"
#include "engine/optim/optimizer.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"

namespace fsdp2x {

// A parameter with its gradient, and the memory of both.
struct Pair {
  PyObject* object;
  LocalTensor param;
  LocalTensor grad;
  at::Device device = at::kCPU;  // where the kernels run

  bool fits() const;
  bool fits(const LocalTensor& state, at::ScalarType type = at::kFloat) const;
  // Bumps version counters, so that autograd detects that saved tensors have changed.
  void bump_versions() const;
};

Pair pair_of(PyObject* param, const at::Tensor& grad, const DeviceSteps* on_device);

// Returns a borrowed reference, null if the key is missing.
PyObject* look_up(PyObject* dict, PyObject* key);

// Calls function(group, index), which makes missing state.
void call_maker(PyObject* function, size_t group, size_t index);

// Returns the state of `param`, null if there is none yet.
PyObject* state_of(PyObject* state, PyObject* param);

// Undefined if the key is missing.
LocalTensor local_item(PyObject* dict, PyObject* key);

inline std::byte* bytes_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

inline const std::byte* const_bytes_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<const std::byte*>(tensor.const_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

// Runs the jobs on a device and removes them from `jobs`.
template <class Job>
void run_on_device(std::vector<Job>& jobs, DeviceSteps& steps, const at::Tensor& grad_scale) {
  const auto lies_on_host = [&](const Job& job) { return !steps.kernels().serve(job.pair.param.tensor.device()); };
  if (std::all_of(jobs.begin(), jobs.end(), lies_on_host)) return;
  const auto first = std::stable_partition(jobs.begin(), jobs.end(), lies_on_host);
  steps.run(first, jobs.end(), grad_scale);
  for (auto job = first; job != jobs.end(); ++job) job->pair.bump_versions();
  jobs.erase(first, jobs.end());
}

template <class Job>
void run_all(std::vector<Job>& jobs, DeviceSteps* on_device, const at::Tensor& grad_scale) {
  if (on_device != nullptr) run_on_device(jobs, *on_device, grad_scale);
  if (grad_scale.defined() && !jobs.empty()) {
    // `sign` multiplies gradients in the kernels, and it is exactly 1 or -1.
    const auto scale = static_cast<float>(grad_scale.item<double>());
    for (Job& job : jobs) job.step.sign *= scale;
  }
  {
    const ReleaseGil released;
    std::vector<int64_t> numels;
    for (const Job& job : jobs) numels.push_back(job.pair.param.tensor.numel());
    for_each_range(numels, [&](size_t i, int64_t begin, int64_t end) { run(jobs[i], begin, end); });
  }
  for (const Job& job : jobs) job.pair.bump_versions();
}

// Calls take(group number, index, parameter, gradient) for every parameter with a gradient. If it returns false, the
// parameter is left over.
template <class Group, class Take>
LeftOver for_each_gradient(const std::vector<Group>& groups, const Take& take) {
  LeftOver left_over;
  for (size_t g = 0; g < groups.size(); ++g) {
    PyObject* params = groups[g].params.get();
    for (size_t i = 0; i < list_size(params); ++i) {
      PyObject* param = list_item(params, i);
      const at::Tensor& grad = grad_of(param);
      if (grad.defined() && !take(g, i, param, grad)) left_over.emplace_back(g, i);
    }
  }
  return left_over;
}

}  // namespace fsdp2x
