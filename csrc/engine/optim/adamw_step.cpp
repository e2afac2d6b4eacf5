// The step of AdamW: its moments in fp32, bf16, or 8 bits, its step counts, and the source of its rounding bits.
#include "engine/optim/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "engine/memory/storage.hpp"
#include "engine/optim/coded_moments.hpp"
#include "engine/optim/step_jobs.hpp"
#include "kernels/cpu/optimizers.hpp"
#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x {
namespace {

struct AdamWJob {
  using Args = cuda::AdamWArgs;
  Pair pair;
  at::Tensor exp_avg, exp_avg_sq, max_exp_avg_sq;                       // the last one undefined without amsgrad
  at::Tensor exp_avg_scales, exp_avg_sq_scales, max_exp_avg_sq_scales;  // undefined unless moments are codes
  at::Tensor count;
  const AdamWGroup* group;  // until the numbers are there
  AdamWStep step;
  bool is_stochastic;
  cpu::Rounding rounding;

  static void launch(const cuda::Kernels& kernels, const cuda::AdamWList& list, const Args& args, cuda::Stream stream) {
    kernels.adamw(list, args, stream);
  }
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

// A moment of a state: its memory, and its scales if the memory holds codes.
struct MomentMemory {
  at::Tensor memory, scales;
};

// Returns the moment. Undefined memory: the kernels cannot take it.
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
  jobs.push_back({std::move(pair), std::move(exp_avg.memory), std::move(exp_avg_sq.memory), std::move(largest.memory),
                  std::move(exp_avg.scales), std::move(exp_avg_sq.scales), std::move(largest.scales),
                  std::move(count.tensor), &group, AdamWStep(), false, cpu::Rounding()});
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
  piece.param = bytes_at(job.pair.param.tensor, begin);
  piece.grad = const_bytes_at(job.pair.grad.tensor, begin);
  piece.exp_avg = bytes_at(job.exp_avg, begin);
  piece.exp_avg_sq = bytes_at(job.exp_avg_sq, begin);
  if (job.max_exp_avg_sq.defined()) piece.max_exp_avg_sq = bytes_at(job.max_exp_avg_sq, begin);
  piece.exp_avg_scales = scales_at(job.exp_avg_scales, begin);
  piece.exp_avg_sq_scales = scales_at(job.exp_avg_sq_scales, begin);
  piece.max_exp_avg_sq_scales = scales_at(job.max_exp_avg_sq_scales, begin);
  piece.numel = end - begin;
  cpu::Rounding rounding = job.rounding;
  rounding.offset = begin;
  if (job.is_stochastic) piece.rounding = &rounding;
  cpu::adamw(piece, job.step);
}

bool is_coded(const AdamWJob& job) { return job.exp_avg_scales.defined(); }

cuda::AdamWSegment segment_of(const AdamWJob& job) {
  cuda::AdamWSegment segment;
  segment.param = job.pair.param.tensor.mutable_data_ptr();
  segment.exp_avg = job.exp_avg.mutable_data_ptr();
  segment.exp_avg_sq = job.exp_avg_sq.mutable_data_ptr();
  if (job.max_exp_avg_sq.defined()) segment.max_exp_avg_sq = job.max_exp_avg_sq.mutable_data_ptr();
  segment.exp_avg_scales = scales_at(job.exp_avg_scales, 0);
  segment.exp_avg_sq_scales = scales_at(job.exp_avg_sq_scales, 0);
  segment.max_exp_avg_sq_scales = scales_at(job.max_exp_avg_sq_scales, 0);
  if (job.is_stochastic) segment.numbers = {job.rounding.first, job.rounding.run, job.rounding.stride};
  segment.type = engine_dtype(job.pair.param.tensor.scalar_type());
  segment.moment_type = engine_dtype(job.exp_avg.scalar_type());
  return segment;
}

bool stores_alike(const AdamWJob& job, const cuda::AdamWArgs& args) {
  return args.coded == is_coded(job) && args.stochastic == job.is_stochastic &&
         (!job.is_stochastic || args.rounding.step == job.rounding.key.step);
}

void set_storing(const AdamWJob& job, cuda::AdamWArgs& args) {
  args.coded = is_coded(job);
  args.stochastic = job.is_stochastic;
  args.rounding = job.rounding.key;
}

// The jobs of all gradients that the kernels can take, with the numbers of their step.
std::vector<AdamWJob> adamw_jobs(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                                 const NarrowRules& rules, const DeviceSteps* on_device, LeftOver& left_over) {
  std::vector<AdamWJob> jobs;
  std::vector<size_t> first_numbers;
  size_t num_params = 0;
  for (const AdamWGroup& group : groups) {
    first_numbers.push_back(num_params);
    num_params += list_size(group.params.get());
  }
  jobs.reserve(num_params);
  left_over = for_each_gradient(groups, [&](size_t g, size_t i, PyObject* param, const at::Tensor& grad) {
    PyObject* own = state_of(state, param);
    if (own == nullptr || PyDict_GET_SIZE(own) == 0) {
      call_maker(make_state, g, i);
      own = state_of(state, param);
      if (own == nullptr) throw Error("adamw_step: make_state made no state for a parameter");
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
  return jobs;
}

}  // namespace

LeftOver adamw_step(const std::vector<AdamWGroup>& groups, PyObject* state, PyObject* make_state,
                    const NarrowRules& rules, DeviceSteps* on_device, const at::Tensor& grad_scale) {
  LeftOver left_over;
  std::vector<AdamWJob> jobs = adamw_jobs(groups, state, make_state, rules, on_device, left_over);
  run_all(jobs, on_device, grad_scale);
  return left_over;
}

}  // namespace fsdp2x
