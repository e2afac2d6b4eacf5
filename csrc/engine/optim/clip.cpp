// Decides which gradients the kernels can take, and runs the CPU kernels over them.
#include "engine/optim/clip.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {
namespace {

bool is_summable(const at::Tensor& tensor, at::Device device) {
  return is_plain_memory(tensor, device) && engine_dtype(tensor.scalar_type()) != DType::byte;
}

// Asks Python once for each mesh and placements.
class Buckets {
 public:
  explicit Buckets(PyObject* bucket_of) : bucket_of_(bucket_of) {}
  long of(PyObject* spec) {
    Cut cut = cut_of(spec);
    for (const Known& known : known_) {
      if (same_cut(known.cut, cut)) return known.bucket;
    }
    const PyRef answer =
        PyRef::steal(PyObject_CallFunctionObjArgs(bucket_of_, spec == nullptr ? Py_None : spec, nullptr));
    const long bucket = answer ? PyLong_AsLong(answer.get()) : -1;
    if (PyErr_Occurred() != nullptr) throw_python_error();
    known_.push_back({std::move(cut), bucket});
    return bucket;
  }

 private:
  struct Known {
    Cut cut;
    long bucket;
  };
  PyObject* bucket_of_;
  std::vector<Known> known_;
};

struct Term {
  at::Tensor values;
  size_t bucket;
};

// Adds the squares of every term to its bucket. Neither the parts nor the order in which they are added depend on the
// number of threads, so the sums do not either.
void add_up(const std::vector<Term>& terms, std::vector<double>& sums) {
  struct Part {
    size_t term;
    int64_t begin, end;
    double sum;
  };
  std::vector<Part> parts;
  int64_t total = 0;
  for (size_t t = 0; t < terms.size(); ++t) {
    const int64_t numel = terms[t].values.numel();
    total += numel;
    for (int64_t begin = 0; begin < numel; begin += kGrainNumel) {
      parts.push_back({t, begin, std::min(numel, begin + kGrainNumel), 0.0});
    }
  }
  const auto num_parts = static_cast<int64_t>(parts.size());
  const int64_t grain = total <= kGrainNumel ? num_parts : std::max<int64_t>(num_parts * kGrainNumel / total, 1);
  run_parallel(num_parts, grain, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      Part& part = parts[static_cast<size_t>(p)];
      const at::Tensor& values = terms[part.term].values;
      const auto* data = static_cast<const std::byte*>(values.const_data_ptr()) +
                         static_cast<size_t>(part.begin) * values.element_size();
      part.sum = cpu::sum_squares(engine_dtype(values.scalar_type()), data, part.end - part.begin);
    }
  });
  for (const Part& part : parts) sums[terms[part.term].bucket] += part.sum;
}

}  // namespace

LocalGradients::LocalGradients(PyObject* params, DeviceClip* on_device) : on_device_(on_device) {
  const size_t num_params = list_size(params);
  entries_.reserve(num_params);
  for (size_t i = 0; i < num_params; ++i) {
    PyObject* param = list_item(params, i);
    const at::Tensor& grad = grad_of(param);
    PyRef object = grad.defined() ? PyRef::steal(THPVariable_Wrap(grad)) : PyRef();
    if (grad.defined() && !object) throw_python_error();
    LocalTensor local = local_tensor(object ? object.get() : param);
    any_double_ |= object && grad.scalar_type() == at::kDouble;
    if (object && !device_) device_ = grad.device();
    const Place place = object ? place_of(local.tensor) : Place::nowhere;
    entries_.push_back({i, std::move(object), std::move(local), place});
  }
}

LocalGradients::Place LocalGradients::place_of(const at::Tensor& local) const {
  const bool is_served = on_device_ != nullptr && on_device_->kernels().serve(*device_);
  // The device's kernels compute in fp32.
  if (is_served && is_summable(local, *device_)) {
    return local.scalar_type() == at::kDouble ? Place::elsewhere : Place::device;
  }
  return is_summable(local, at::kCPU) ? Place::host : Place::elsewhere;
}

std::vector<DeviceGradient> LocalGradients::on_device() const {
  std::vector<DeviceGradient> gradients;
  for (const Entry& entry : entries_) {
    if (entry.place == Place::device) gradients.push_back({entry.local.tensor, entry.bucket});
  }
  return gradients;
}

GradientSums LocalGradients::sum_squares(PyObject* bucket_of) {
  GradientSums result;
  Buckets buckets(bucket_of);
  std::vector<Term> terms;
  for (Entry& entry : entries_) {
    if (entry.place == Place::nowhere) {
      if (entry.local.tensor.defined()) buckets.of(entry.local.spec.get());
      continue;
    }
    if (entry.place != Place::elsewhere) entry.bucket = buckets.of(entry.local.spec.get());
    if (entry.bucket < 0) {
      result.left_over.push_back(entry.index);
    } else if (entry.place == Place::host) {
      const auto bucket = static_cast<size_t>(entry.bucket);
      terms.push_back({entry.local.tensor, bucket});
      if (result.on_host.size() <= bucket) result.on_host.resize(bucket + 1, 0.0);
    }
  }
  if (const auto gradients = on_device(); !gradients.empty()) result.on_device = on_device_->sum_squares(gradients);
  const ReleaseGil released;
  add_up(terms, result.on_host);
  return result;
}

std::vector<size_t> LocalGradients::multiply(const at::Tensor& factor) const {
  std::vector<size_t> left_over;
  std::vector<const Entry*> multiplied;
  for (const Entry& entry : entries_) {
    if (entry.place == Place::elsewhere || (entry.place == Place::host && !factor.is_cpu())) {
      left_over.push_back(entry.index);
    } else if (entry.grad) {
      multiplied.push_back(&entry);
    }
  }
  if (const auto gradients = on_device(); !gradients.empty()) {
    on_device_->multiply(gradients, factor);
  } else if (factor.is_cpu()) {
    const double value = factor.item<double>();
    if (value == 1.0) return {};
    multiply_on_host(value);
  }
  for (const Entry* entry : multiplied) {
    THPVariable_Unpack(entry->grad.get()).unsafeGetTensorImpl()->bump_version();
    if (entry->local.spec) entry->local.tensor.unsafeGetTensorImpl()->bump_version();
  }
  return left_over;
}

void LocalGradients::multiply_on_host(double factor) const {
  std::vector<at::Tensor> tensors;
  Items items;
  for (const Entry& entry : entries_) {
    if (entry.place != Place::host) continue;
    tensors.push_back(entry.local.tensor);
    items.add(entry.local.tensor.numel());
  }
  const ReleaseGil released;
  items.for_each_range([&](size_t i, int64_t begin, int64_t end) {
    auto* data = static_cast<std::byte*>(tensors[i].mutable_data_ptr());
    data += static_cast<size_t>(begin) * tensors[i].element_size();
    cpu::multiply(engine_dtype(tensors[i].scalar_type()), data, end - begin, factor);
  });
}

}  // namespace fsdp2x
