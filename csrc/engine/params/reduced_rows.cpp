// Reduced rows in CPU memory.
#include "engine/params/reduced_rows.hpp"

#include "core/error.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "engine/memory/device_copy.hpp"
#include "engine/memory/storage.hpp"

namespace fsdp2x {

SegmentRows::SegmentRows(at::Tensor segment, std::shared_ptr<const Layout> layout, DType type, double divisor)
    : memory_(std::move(segment)), layout_(std::move(layout)), type_(type), divisor_(divisor) {}

std::unique_ptr<SegmentRows> SegmentRows::zeros(std::shared_ptr<const Layout> layout, DType type, double divisor) {
  const auto bytes = static_cast<int64_t>(layout->flagged_segment_bytes());
  return std::make_unique<SegmentRows>(at::zeros({bytes}, at::kByte), std::move(layout), type, divisor);
}

at::Tensor SegmentRows::values() const { return typed(memory_, type_, 0, layout_->flagged_segment_bytes()); }

bool SegmentRows::add(const SegmentRows& other) {
  const auto trains = [](const ParamPlace& place) { return place.shape.trainable; };
  if (!std::ranges::equal(layout_->params(), other.layout_->params(), {}, trains, trains)) return false;
  values().add_(other.values());
  return true;
}

at::Tensor SegmentRows::rows(size_t param) const {
  const ParamPlace& place = layout_->params()[param];
  return typed(memory_, type_, place.reduce_segment_offset,
               static_cast<size_t>(place.shard_numel) * dtype_bytes(type_));
}

void SegmentRows::clear(size_t param, bool drops) {
  rows(param).zero_();
  if (drops) flags()[static_cast<int64_t>(param)].zero_();
}

at::Tensor SegmentRows::flags() const {
  return typed(memory_, type_, layout_->reduce_segment_bytes(), layout_->params().size() * dtype_bytes(type_));
}

std::vector<uint8_t> SegmentRows::has_gradient() {
  const at::Tensor values = flags().to(at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
  std::vector<uint8_t> has_gradient(layout_->params().size());
  for (size_t i = 0; i < has_gradient.size(); ++i) has_gradient[i] = values.const_data_ptr<float>()[i] > 0.0F ? 1 : 0;
  return has_gradient;
}

void SegmentRows::run_hook(const Gil& gil, const PyRef& hook) {
  call_hook(gil, hook, typed(memory_, type_, 0, layout_->reduce_segment_bytes()));
}

void SegmentRows::write(const GradientTargets& targets) {
  const auto* const rows = static_cast<const std::byte*>(memory_.const_data_ptr());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = layout_->params()[i];
    scale_into(at::kCPU, place.shape.orig, targets[i]->data, type_, rows + place.reduce_segment_offset,
               place.shard_numel, divisor_, targets[i]->accumulate);
  }
}

std::unique_ptr<SegmentRows> to_segment(std::unique_ptr<ReducedRows> rows) {
  SegmentRows* const segment = rows->segment();
  if (segment == nullptr) throw Error("fsdp2x: reduced rows that wait for an all-reduce are not in a segment");
  rows.release();
  return std::unique_ptr<SegmentRows>(segment);
}

void call_hook(const Gil& /*gil*/, const PyRef& hook, const at::Tensor& rows) {
  const PyRef object = PyRef::steal(THPVariable_Wrap(rows));
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(hook.get(), object.get(), nullptr));
  if (!done) throw_python_error();
}

}  // namespace fsdp2x
