// What the steps of all optimizers share: a parameter with its gradient, look-up in the state, the walk over gradients,
// and the run of jobs on the host and on a device. Keeps nothing. Only bytes_at and const_bytes_at need no GIL.
//
// A Job is one parameter of a step. It has
//
//   pair                     the parameter and its gradient
//   step.sign                what the kernels multiply gradients with
//
// and beside it, found by its type,
//
//   run(job, begin, end)     the kernel of the host over these elements; without the GIL, in several threads
//
// and what device_steps.hpp asks for.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
  at::Device device = at::kCPU;  // of the kernels

  bool fits() const;
  bool fits(const LocalTensor& state, at::ScalarType type = at::kFloat) const;
  // What autograd saved before the step must be seen to have changed.
  void bump_versions() const;
};

Pair pair_of(PyObject* param, const at::Tensor& grad, const DeviceSteps* on_device);

// Borrowed; null when it is not there.
PyObject* look_up(PyObject* dict, PyObject* key);

// Calls function(group, index), which makes what the state lacks.
void call_maker(PyObject* function, size_t group, size_t index);

// The state of `param`; null when there is none yet.
PyObject* state_of(PyObject* state, PyObject* param);

// Undefined when it is not there.
LocalTensor local_item(PyObject* dict, PyObject* key);

inline std::byte* bytes_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

inline const std::byte* const_bytes_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<const std::byte*>(tensor.const_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

// Takes what lies on a device out of `jobs`.
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
    // The sign is what the kernels multiply gradients with, and exact.
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

// Calls take(group number, index, parameter, gradient) for every parameter that has a gradient; what it returns false
// for is left over.
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
