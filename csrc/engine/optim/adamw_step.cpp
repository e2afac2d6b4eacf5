// The step of AdamW: its moments in fp32, bf16, or 8 bits, its step counts, and the source of its rounding bits.
#include "engine/optim/optimizer.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "engine/memory/storage.hpp"
#include "engine/optim/adamw_job.hpp"
#include "engine/optim/coded_moments.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"

namespace fsdp2x {
namespace {

std::byte* bytes_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

const std::byte* const_bytes_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<const std::byte*>(tensor.const_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

Pair pair_of(PyObject* param, const at::Tensor& grad, const DeviceSteps* on_device) {
  const PyRef object = PyRef::steal(THPVariable_Wrap(grad));
  if (!object) throw_python_error();
  Pair pair{param, local_tensor(param), local_tensor(object.get())};
  const at::Tensor& local = pair.param.tensor;
  if (on_device != nullptr && local.defined() && on_device->kernels().serve(local.device())) {
    pair.device = local.device();
  }
  return pair;
}

// Returns a borrowed reference, null if the key is missing.
PyObject* look_up(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw_python_error();
  return value;
}

// Calls function(group, index), which makes missing state.
void call_maker(PyObject* function, size_t group, size_t index) {
  const PyRef result = PyRef::steal(PyObject_CallFunction(function, "nn", group, index));
  if (!result) throw_python_error();
}

// Returns the state of `param`, null if there is none yet.
PyObject* state_of(PyObject* state, PyObject* param) {
  PyObject* own = look_up(state, param);
  if (own != nullptr && !PyDict_Check(own)) throw Error("optimizer: the state of a parameter is not a dict");
  return own;
}

// Undefined if the key is missing.
LocalTensor local_item(PyObject* dict, PyObject* key) {
  PyObject* value = look_up(dict, key);
  return value == nullptr ? LocalTensor() : local_tensor(value);
}

bool is_step_count(const at::Tensor& tensor) {
  return is_plain_memory(tensor) && tensor.scalar_type() == at::kFloat && tensor.numel() == 1;
}

// The names of a moment in a parameter's state.
struct MomentNames {
  PyObject *values, *codes, *scales;
};

MomentNames moment_names(const std::string& name) {
  return {interned(name.c_str()), interned((name + "_codes").c_str()), interned((name + "_scales").c_str())};
}

MomentMemory moment_of(const Pair& pair, PyObject* state, const MomentNames& names, bool takes_narrow_moments) {
  if (takes_narrow_moments && look_up(state, names.codes) != nullptr) {
    LocalTensor codes = local_item(state, names.codes);
    LocalTensor scales = local_item(state, names.scales);
    const int64_t num_blocks = num_moment_blocks(pair.param.tensor.numel());
    if (!pair.fits(codes, at::kByte) || scales.spec || !is_plain_memory(scales.tensor, pair.device) ||
        scales.tensor.scalar_type() != at::kFloat || scales.tensor.numel() != num_blocks) {
      return {};
    }
    return {std::move(codes.tensor), std::move(scales.tensor)};
  }
  LocalTensor values = local_item(state, names.values);
  const bool is_narrow =
      takes_narrow_moments && values.tensor.defined() && values.tensor.scalar_type() == at::kBFloat16;
  if (!pair.fits(values, is_narrow ? at::kBFloat16 : at::kFloat)) return {};
  return {std::move(values.tensor), {}};
}

// Numbers the parameters of an optimizer through its groups. Each has separate random bits for 2^40 elements.
constexpr int kNumberBits = 40;

cpu::Rounding rounding_of(const NarrowRules& rules, size_t group, size_t index, size_t number) {
  const PyRef place = PyRef::steal(PyObject_CallFunction(rules.stochastic.get(), "nn", group, index));
  unsigned long long first = 0;
  long long run = 0, stride = 0;
  if (!place || !PyArg_ParseTuple(place.get(), "KLL", &first, &run, &stride)) throw_python_error();
  if (first >> kNumberBits != 0 || number >> (61 - kNumberBits) != 0 || run <= 0) {
    throw Error("adamw_step: parameter " + std::to_string(number) + " cannot number its elements for rounding bits");
  }
  cpu::Rounding rounding;
  rounding.key.seed = rules.seed;
  rounding.first = static_cast<uint64_t>(number) << kNumberBits | first;
  rounding.run = run;
  rounding.stride = stride;
  return rounding;
}

bool add_adamw_job(std::vector<AdamWJob>& jobs, const AdamWGroup& group, Pair&& pair, PyObject* state,
                   bool takes_narrow_moments) {
  static PyObject* const step_name = interned("step");
  static const MomentNames names[] = {moment_names("exp_avg"), moment_names("exp_avg_sq"),
                                      moment_names("max_exp_avg_sq")};
  if (!pair.fits() || engine_dtype(pair.param.tensor.scalar_type()) == DType::byte ||
      pair.param.tensor.scalar_type() == at::kDouble) {
    return false;
  }
  LocalTensor count = local_item(state, step_name);
  if (!is_step_count(count.tensor) || count.spec) return false;
  MomentMemory moments[3];
  for (size_t i = 0; i < (group.amsgrad ? 3 : 2); ++i) {
    moments[i] = moment_of(pair, state, names[i], takes_narrow_moments);
    if (!moments[i].memory.defined() || moments[i].memory.scalar_type() != moments[0].memory.scalar_type()) {
      return false;
    }
  }
  auto& [exp_avg, exp_avg_sq, largest] = moments;
  jobs.push_back({std::move(pair), std::move(exp_avg), std::move(exp_avg_sq), std::move(largest),
                  std::move(count.tensor), &group});
  return true;
}

// Computes in double precision and with pow, as Python does, so that the rounded numbers equal torch's.
AdamWStep adamw_numbers(const AdamWGroup& group, double count) {
  const double bias1 = 1.0 - std::pow(group.beta1, count);
  const double bias2 = 1.0 - std::pow(group.beta2, count);
  const double size = group.lr_is_single ? static_cast<double>(static_cast<float>(group.lr) / static_cast<float>(bias1))
                                         : group.lr / bias1;
  AdamWStep step;
  step.decay = static_cast<float>(group.decay);
  step.weight = static_cast<float>(1.0 - group.beta1);
  step.beta2 = static_cast<float>(group.beta2);
  step.one_minus_beta2 = static_cast<float>(1.0 - group.beta2);
  step.sqrt_bias2 = static_cast<float>(std::pow(bias2, 0.5));
  step.eps = static_cast<float>(group.eps);
  step.neg_step_size = static_cast<float>(-size);
  step.sign = group.maximize ? -1.0f : 1.0f;
  return step;
}

void count_steps(std::vector<AdamWJob>& jobs) {
  const AdamWGroup* group = nullptr;
  float counted = 0.0f;
  AdamWStep step;
  for (AdamWJob& job : jobs) {
    const float count = *job.count.mutable_data_ptr<float>() += 1.0f;
    if (job.group != group || count != counted) step = adamw_numbers(*job.group, count);
    group = job.group;
    counted = count;
    job.step = step;
    job.rounding.key.step = static_cast<uint64_t>(count);
    job.count.unsafeGetTensorImpl()->bump_version();
  }
}

void run(const AdamWJob& job, int64_t begin, int64_t end) {
  if (job.is_coded()) {  // a range steps the blocks that begin in it
    begin = (begin + kMomentBlock - 1) / kMomentBlock * kMomentBlock;
    end = std::min((end + kMomentBlock - 1) / kMomentBlock * kMomentBlock, job.pair.param.tensor.numel());
    if (begin >= end) return;
  }
  cpu::AdamWPiece piece;
  piece.type = engine_dtype(job.pair.param.tensor.scalar_type());
  piece.moments = engine_dtype(job.exp_avg.memory.scalar_type());
  piece.param = bytes_at(job.pair.param.tensor, begin);
  piece.grad = const_bytes_at(job.pair.grad.tensor, begin);
  piece.exp_avg = bytes_at(job.exp_avg.memory, begin);
  piece.exp_avg_sq = bytes_at(job.exp_avg_sq.memory, begin);
  if (job.max_exp_avg_sq.memory.defined()) piece.max_exp_avg_sq = bytes_at(job.max_exp_avg_sq.memory, begin);
  piece.exp_avg_scales = job.exp_avg.scales_at(begin);
  piece.exp_avg_sq_scales = job.exp_avg_sq.scales_at(begin);
  piece.max_exp_avg_sq_scales = job.max_exp_avg_sq.scales_at(begin);
  piece.numel = end - begin;
  cpu::Rounding rounding = job.rounding;
  rounding.offset = begin;
  if (job.is_stochastic) piece.rounding = &rounding;
  cpu::adamw(piece, job.step);
}

// Makes the jobs of all gradients that the kernels can take, with the numbers of their step.
std::vector<AdamWJob> adamw_jobs(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                                 const NarrowRules& rules, const DeviceSteps* on_device, LeftOver& left_over) {
  std::vector<AdamWJob> jobs;
  const auto take = [&](size_t g, size_t i, size_t number, PyObject* param, const at::Tensor& grad) {
    PyObject* own = state_of(state, param);
    if (own == nullptr || PyDict_GET_SIZE(own) == 0) {
      call_maker(make_state, g, i);
      own = state_of(state, param);
      if (own == nullptr) throw Error("adamw_step: make_state made no state for a parameter");
    }
    if (!add_adamw_job(jobs, groups[g], pair_of(param, grad, on_device), own, rules.narrow_moments)) return false;
    AdamWJob& job = jobs.back();
    job.is_stochastic = rules.stochastic && (job.pair.param.tensor.scalar_type() == at::kBFloat16 ||
                                             job.exp_avg.memory.scalar_type() == at::kBFloat16 || job.is_coded());
    if (job.is_stochastic) job.rounding = rounding_of(rules, g, i, number);
    return true;
  };
  size_t number = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    PyObject* params = groups[g].params.get();
    for (size_t i = 0; i < list_size(params); ++i, ++number) {
      PyObject* param = list_item(params, i);
      const at::Tensor& grad = grad_of(param);
      if (grad.defined() && !take(g, i, number, param, grad)) left_over.emplace_back(g, i);
    }
  }
  count_steps(jobs);
  return jobs;
}

// Runs the jobs on a device and removes them from `jobs`.
void run_on_device(std::vector<AdamWJob>& jobs, DeviceSteps& steps, const at::Tensor& grad_scale) {
  const auto lies_on_host = [&](const AdamWJob& job) { return !steps.kernels().serve(job.pair.param.tensor.device()); };
  if (std::all_of(jobs.begin(), jobs.end(), lies_on_host)) return;
  const auto first = std::stable_partition(jobs.begin(), jobs.end(), lies_on_host);
  steps.run(std::span<const AdamWJob>(first, jobs.end()), grad_scale);
  for (auto job = first; job != jobs.end(); ++job) job->pair.bump_versions();
  jobs.erase(first, jobs.end());
}

}  // namespace

LeftOver adamw_step(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                    const NarrowRules& rules, DeviceSteps* on_device, const at::Tensor& grad_scale) {
  LeftOver left_over;
  std::vector<AdamWJob> jobs = adamw_jobs(groups, state, make_state, rules, on_device, left_over);
  if (on_device != nullptr) run_on_device(jobs, *on_device, grad_scale);
  if (grad_scale.defined() && !jobs.empty()) {
    // `sign` multiplies gradients in the kernels, and it is exactly 1 or -1.
    const auto scale = static_cast<float>(grad_scale.item<double>());
    for (AdamWJob& job : jobs) job.step.sign *= scale;
  }
  {
    const ReleaseGil released;
    Items items;
    for (const AdamWJob& job : jobs) items.add(job.pair.param.tensor.numel());
    items.for_each_range([&](size_t i, int64_t begin, int64_t end) { run(jobs[i], begin, end); });
  }
  for (const AdamWJob& job : jobs) job.pair.bump_versions();
  return left_over;
}

}  // namespace fsdp2x
