// Optimizer steps: looks up gradients and state, checks that the kernels can take them, runs the kernels.
#include "engine/optim/optimizer.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "core/moment_codes.hpp"
#include "cpu/adamw.hpp"
#include "engine/memory/local_tensor.hpp"
#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"

namespace fsdp2x {
namespace {

// A parameter with its gradient, and the memory of both.
struct Pair {
  PyObject* object;
  LocalTensor param;
  LocalTensor grad;
  at::Device device = at::kCPU;  // of the kernels

  bool fits() const {
    return is_plain_memory(param.tensor, device) && is_plain_memory(grad.tensor, device) &&
           same_layout(param.tensor, grad.tensor) && param.tensor.scalar_type() == grad.tensor.scalar_type() &&
           same_placements(param.spec.get(), grad.spec.get());
  }
  bool fits(const LocalTensor& state, at::ScalarType type = at::kFloat) const {
    return is_plain_memory(state.tensor, device) && state.tensor.scalar_type() == type &&
           same_layout(param.tensor, state.tensor) && same_placements(param.spec.get(), state.spec.get());
  }
  // What autograd saved before the step must be seen to have changed.
  void bump_versions() const {
    THPVariable_Unpack(object).unsafeGetTensorImpl()->bump_version();
    if (param.spec) param.tensor.unsafeGetTensorImpl()->bump_version();
  }
};

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

// Borrowed; null when it is not there.
PyObject* look_up(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw_python_error();
  return value;
}

void make(PyObject* function, size_t group, size_t index) {
  const PyRef result = PyRef::steal(PyObject_CallFunction(function, "nn", group, index));
  if (!result) throw_python_error();
}

// The state of `param`; null when there is none yet.
PyObject* state_of(PyObject* state, PyObject* param) {
  PyObject* own = look_up(state, param);
  if (own != nullptr && !PyDict_Check(own)) throw Error("optimizer: the state of a parameter is not a dict");
  return own;
}

LocalTensor local_item(PyObject* dict, PyObject* key) {
  PyObject* value = look_up(dict, key);
  return value == nullptr ? LocalTensor() : local_tensor(value);
}

// --- AdamW -----------------------------------------------------------------------------------------------------------

struct AdamWJob {
  Pair pair;
  at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;                       // the last one undefined without amsgrad
  at::Tensor exp_avg_scales, exp_avg_sq_scales, max_exp_avg_sq_scales;  // undefined but for codes
  at::Tensor count;
  const AdamWGroup* group;
  cpu::AdamWStep step;
  bool is_stochastic;
  cpu::Rounding rounding;
};

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

// A moment of a state: its memory, and its scales if that holds codes.
struct MomentMemory {
  at::Tensor memory, scales;
};

// Undefined memory: the kernels cannot take it.
MomentMemory moment_of(const Pair& pair, PyObject* state, const MomentNames& names, bool takes_narrow_moments) {
  if (takes_narrow_moments && look_up(state, names.codes) != nullptr) {
    LocalTensor codes = local_item(state, names.codes);
    LocalTensor scales = local_item(state, names.scales);
    const int64_t num_blocks = (pair.param.tensor.numel() + kMomentBlock - 1) / kMomentBlock;
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

// The parameters of an optimizer are numbered through its groups; 2^40 elements each draw bits of their own.
constexpr int kNumberBits = 40;

cpu::Rounding rounding_of(const NarrowRules& rules, size_t group, size_t index, size_t number) {
  const PyRef place = PyRef::steal(PyObject_CallFunction(rules.stochastic.get(), "nn", group, index));
  unsigned long long first = 0;
  long long run = 0, stride = 0;
  if (!place || !PyArg_ParseTuple(place.get(), "KLL", &first, &run, &stride)) throw_python_error();
  if (first >> kNumberBits != 0 || number >> (61 - kNumberBits) != 0 || run <= 0) {
    throw Error("adamw_step: parameter " + std::to_string(number) + " has no room for its rounding bits");
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
  jobs.push_back({std::move(pair), std::move(exp_avg.memory), std::move(exp_avg_sq.memory), std::move(largest.memory),
                  std::move(exp_avg.scales), std::move(exp_avg_sq.scales), std::move(largest.scales),
                  std::move(count.tensor), &group, cpu::AdamWStep(), false, cpu::Rounding()});
  return true;
}

// In double precision and with pow, as Python computes them, so that the rounded numbers are torch's.
cpu::AdamWStep adamw_numbers(const AdamWGroup& group, double count) {
  const double bias1 = 1.0 - std::pow(group.beta1, count);
  const double bias2 = 1.0 - std::pow(group.beta2, count);
  const double size = group.lr_is_single ? static_cast<double>(static_cast<float>(group.lr) / static_cast<float>(bias1))
                                         : group.lr / bias1;
  cpu::AdamWStep step;
  step.decay = static_cast<float>(group.decay);
  step.weight = static_cast<float>(1.0 - group.beta1);
  step.beta2 = static_cast<float>(group.beta2);
  step.rest2 = static_cast<float>(1.0 - group.beta2);
  step.root = static_cast<float>(std::pow(bias2, 0.5));
  step.eps = static_cast<float>(group.eps);
  step.minus_size = static_cast<float>(-size);
  step.sign = group.maximize ? -1.0f : 1.0f;
  return step;
}

void count_steps(std::vector<AdamWJob>& jobs) {
  const AdamWGroup* group = nullptr;
  float counted = 0.0f;
  cpu::AdamWStep step;
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

std::byte* at(const at::Tensor& tensor, int64_t index) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

const std::byte* const_at(const at::Tensor& tensor, int64_t index) {
  return static_cast<const std::byte*>(tensor.const_data_ptr()) + static_cast<size_t>(index) * tensor.element_size();
}

float* scales_at(const at::Tensor& scales, int64_t begin) {
  return scales.defined() ? scales.mutable_data_ptr<float>() + begin / kMomentBlock : nullptr;
}

void run(const AdamWJob& job, int64_t begin, int64_t end) {
  if (job.exp_avg_scales.defined()) {  // a range steps the blocks that begin in it
    begin = (begin + kMomentBlock - 1) / kMomentBlock * kMomentBlock;
    end = std::min((end + kMomentBlock - 1) / kMomentBlock * kMomentBlock, job.pair.param.tensor.numel());
    if (begin >= end) return;
  }
  cpu::AdamWPiece piece;
  piece.type = engine_dtype(job.pair.param.tensor.scalar_type());
  piece.moments = engine_dtype(job.exp_avg.scalar_type());
  piece.param = at(job.pair.param.tensor, begin);
  piece.grad = const_at(job.pair.grad.tensor, begin);
  piece.exp_avg = at(job.exp_avg, begin);
  piece.exp_avg_sq = at(job.exp_avg_sq, begin);
  if (job.max_exp_avg_sq.defined()) piece.max_exp_avg_sq = at(job.max_exp_avg_sq, begin);
  piece.exp_avg_scales = scales_at(job.exp_avg_scales, begin);
  piece.exp_avg_sq_scales = scales_at(job.exp_avg_sq_scales, begin);
  piece.max_exp_avg_sq_scales = scales_at(job.max_exp_avg_sq_scales, begin);
  piece.numel = end - begin;
  cpu::Rounding rounding = job.rounding;
  rounding.offset = begin;
  if (job.is_stochastic) piece.rounding = &rounding;
  cpu::adamw(piece, job.step);
}

DeviceAdamWJob device_job(const AdamWJob& job) {
  return {job.pair.param.tensor,
          job.pair.grad.tensor,
          job.is_stochastic,
          job.rounding.key,
          {job.rounding.first, job.rounding.run, job.rounding.stride},
          job.exp_avg,
          job.exp_avg_sq,
          job.max_exp_avg_sq,
          job.exp_avg_scales,
          job.exp_avg_sq_scales,
          job.max_exp_avg_sq_scales,
          job.step};
}

// --- SGD -------------------------------------------------------------------------------------------------------------

struct SgdJob {
  Pair pair;
  at::Tensor buffer;  // undefined without momentum
  SgdStep step;
  SgdMomentum momentum;
};

SgdStep sgd_numbers(const SgdGroup& group) {
  SgdStep step;
  step.weight_decay = static_cast<float>(group.weight_decay);
  step.momentum = static_cast<float>(group.momentum);
  step.rest = static_cast<float>(1.0 - group.dampening);
  step.minus_lr = static_cast<float>(-group.lr);
  step.sign = group.maximize ? -1.0f : 1.0f;
  return step;
}

SgdMomentum momentum_of(const SgdGroup& group, bool is_first) {
  if (is_first) return group.nesterov ? SgdMomentum::first_nesterov : SgdMomentum::first;
  return group.nesterov ? SgdMomentum::later_nesterov : SgdMomentum::later;
}

void run(const SgdJob& job, int64_t begin, int64_t end) {
  cpu::SgdPiece piece;
  piece.param = reinterpret_cast<float*>(at(job.pair.param.tensor, begin));
  piece.grad = reinterpret_cast<const float*>(const_at(job.pair.grad.tensor, begin));
  piece.numel = end - begin;
  if (job.buffer.defined()) piece.buffer = reinterpret_cast<float*>(at(job.buffer, begin));
  piece.momentum = job.momentum;
  cpu::sgd(piece, job.step);
}

DeviceSgdJob device_job(const SgdJob& job) {
  return {job.pair.param.tensor, job.pair.grad.tensor, job.buffer, job.step, job.momentum};
}

// --- Lion ------------------------------------------------------------------------------------------------------------

struct LionJob {
  Pair pair;
  at::Tensor average;
  LionStep step;
};

LionStep lion_numbers(const LionGroup& group) {
  LionStep step;
  step.decay = static_cast<float>(group.decay);
  step.beta1 = static_cast<float>(group.beta1);
  step.rest1 = static_cast<float>(1.0 - group.beta1);
  step.beta2 = static_cast<float>(group.beta2);
  step.rest2 = static_cast<float>(1.0 - group.beta2);
  step.minus_lr = static_cast<float>(-group.lr);
  step.sign = group.maximize ? -1.0f : 1.0f;
  return step;
}

void run(const LionJob& job, int64_t begin, int64_t end) {
  cpu::lion(reinterpret_cast<float*>(at(job.pair.param.tensor, begin)),
            reinterpret_cast<const float*>(const_at(job.pair.grad.tensor, begin)),
            reinterpret_cast<float*>(at(job.average, begin)), end - begin, job.step);
}

DeviceLionJob device_job(const LionJob& job) {
  return {job.pair.param.tensor, job.pair.grad.tensor, job.average, job.step};
}

// --- the same for all ------------------------------------------------------------------------------------------------

// Takes what lies on a device out of `jobs`.
template <class Job>
void run_on_device(std::vector<Job>& jobs, DeviceSteps& steps, const at::Tensor& grad_scale) {
  const auto lies_on_host = [&](const Job& job) { return !steps.kernels().serve(job.pair.param.tensor.device()); };
  if (std::all_of(jobs.begin(), jobs.end(), lies_on_host)) return;
  const auto first = std::stable_partition(jobs.begin(), jobs.end(), lies_on_host);
  std::vector<decltype(device_job(*first))> moved;
  for (auto job = first; job != jobs.end(); ++job) moved.push_back(device_job(*job));
  steps.run(moved, grad_scale);
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

}  // namespace

LeftOver adamw_step(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                    const NarrowRules& rules, DeviceSteps* on_device, const at::Tensor& grad_scale) {
  std::vector<AdamWJob> jobs;
  std::vector<size_t> first_numbers;
  size_t num_params = 0;
  for (const AdamWGroup& group : groups) {
    first_numbers.push_back(num_params);
    num_params += list_size(group.params.get());
  }
  jobs.reserve(num_params);
  LeftOver left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    PyObject* own = state_of(state, param);
    if (own == nullptr || PyDict_GET_SIZE(own) == 0) {
      make(make_state, g, i);
      own = state_of(state, param);
      if (own == nullptr) throw Error("adamw_step: make_state did not make the state");
    }
    if (!add_adamw_job(jobs, groups[g], pair_of(param, grad, on_device), own, rules.narrow_moments)) return false;
    AdamWJob& job = jobs.back();
    job.is_stochastic =
        rules.stochastic && (job.pair.param.tensor.scalar_type() == at::kBFloat16 ||
                             job.exp_avg.scalar_type() == at::kBFloat16 || job.exp_avg_scales.defined());
    if (job.is_stochastic) job.rounding = rounding_of(rules, g, i, first_numbers[g] + i);
    return true;
  });
  count_steps(jobs);
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

std::vector<at::Tensor> pooled_zeros(const std::vector<std::pair<std::vector<int64_t>, at::ScalarType>>& shapes) {
  size_t bytes = 0;
  std::vector<size_t> offsets;
  for (const auto& [sizes, type] : shapes) {
    offsets.push_back(bytes);
    bytes += align_up(static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type));
  }
  const at::Tensor pool = pool_memory(static_cast<int64_t>(bytes), at::TensorOptions()).zero_();
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < shapes.size(); ++i) {
    tensors.push_back(tensor_in_pool(pool, offsets[i], shapes[i].first, shapes[i].second));
  }
  return tensors;
}

LeftOver sgd_step(const std::vector<SgdGroup>& groups, PyObject* state, PyObject* make_buffer, DeviceSteps* on_device,
                  const at::Tensor& grad_scale) {
  static PyObject* const buffer_name = interned("momentum_buffer");
  std::vector<SgdJob> jobs;
  LeftOver left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    SgdJob job{pair_of(param, grad, on_device), at::Tensor(), sgd_numbers(groups[g]), SgdMomentum::none};
    if (!job.pair.fits() || job.pair.param.tensor.scalar_type() != at::kFloat) return false;
    if (groups[g].momentum != 0.0) {
      PyObject* own = state_of(state, param);
      PyObject* buffer = own == nullptr ? nullptr : look_up(own, buffer_name);
      const bool is_first = buffer == nullptr || buffer == Py_None;
      if (is_first) {
        make(make_buffer, g, i);
        own = state_of(state, param);
      }
      if (own == nullptr) throw Error("sgd_step: make_buffer did not make the buffer");
      LocalTensor local = local_item(own, buffer_name);
      const bool fits = job.pair.fits(local);
      if (is_first && !fits) throw Error("sgd_step: the buffer that was made is not like its parameter");
      if (!fits) return false;
      job.buffer = std::move(local.tensor);
      job.momentum = momentum_of(groups[g], is_first);
    }
    jobs.push_back(std::move(job));
    return true;
  });
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

LeftOver lion_step(const std::vector<LionGroup>& groups, PyObject* state, PyObject* make_state, DeviceSteps* on_device,
                   const at::Tensor& grad_scale) {
  static PyObject* const average_name = interned("exp_avg");
  std::vector<LionJob> jobs;
  LeftOver left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    LionJob job{pair_of(param, grad, on_device), at::Tensor(), lion_numbers(groups[g])};
    if (!job.pair.fits() || job.pair.param.tensor.scalar_type() != at::kFloat) return false;
    PyObject* own = state_of(state, param);
    if (own == nullptr || look_up(own, average_name) == nullptr) {
      make(make_state, g, i);
      own = state_of(state, param);
    }
    if (own == nullptr) throw Error("lion_step: make_state did not make the average");
    LocalTensor local = local_item(own, average_name);
    if (!job.pair.fits(local)) return false;
    job.average = std::move(local.tensor);
    jobs.push_back(std::move(job));
    return true;
  });
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

}  // namespace fsdp2x
