// Reduced rows in CPU memory.
#include "engine/params/reduced_rows.hpp"

#include "core/error.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "engine/memory/storage.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

SegmentRows::SegmentRows(at::Tensor segment, std::shared_ptr<const Layout> layout, DType type, double divisor)
    : memory_(std::move(segment)), layout_(std::move(layout)), type_(type), divisor_(divisor) {}

std::unique_ptr<SegmentRows> SegmentRows::zeros(std::shared_ptr<const Layout> layout, DType type, double divisor) {
  const auto bytes = static_cast<int64_t>(layout->flagged_segment_bytes());
  return std::make_unique<SegmentRows>(at::zeros({bytes}, at::kByte), std::move(layout), type, divisor);
}

void SegmentRows::await_sum(bool averages) {
  num_segments_ = layout_->world();
  averages_ = averages;
}

void SegmentRows::reduce(size_t offset, int64_t numel, DType target_type, void* target, double divisor,
                         bool accumulate) const {
  if (numel == 0) return;
  std::vector<const void*> sources;
  for (int i = 0; i < num_segments_; ++i) {
    sources.push_back(static_cast<const std::byte*>(memory_.const_data_ptr()) + offset +
                      static_cast<size_t>(i) * layout_->flagged_segment_bytes());
  }
  cpu::ReducePiece piece;
  piece.src_type = type_;
  piece.dst_type = target_type;
  piece.sources = sources.data();
  piece.num_sources = num_segments_;
  piece.dst = target;
  piece.piece_numel = piece.src_stride = numel;
  piece.divisor = divisor * (averages_ ? num_segments_ : 1);
  piece.round = true;
  piece.accumulate = accumulate;
  run_parallel(numel, kGrainNumel, [&](int64_t begin, int64_t end) { cpu::reduce(piece, begin, end); });
}

void SegmentRows::sum() {
  if (num_segments_ == 1) return;
  const size_t bytes = layout_->flagged_segment_bytes();
  at::Tensor summed = at::empty({static_cast<int64_t>(bytes)}, memory_.options());
  reduce(0, static_cast<int64_t>(bytes / dtype_bytes(type_)), type_, summed.mutable_data_ptr(), 1.0, false);
  memory_ = std::move(summed);
  num_segments_ = 1;
  averages_ = false;
}

at::Tensor SegmentRows::values() {
  sum();
  return typed(memory_, type_, 0, layout_->flagged_segment_bytes());
}

bool SegmentRows::add(SegmentRows& other) {
  const auto trains = [](const ParamPlace& place) { return place.shape.trainable; };
  if (!std::ranges::equal(layout_->params(), other.layout_->params(), {}, trains, trains)) return false;
  values().add_(other.values());
  return true;
}

at::Tensor SegmentRows::rows(size_t param) {
  sum();
  const ParamPlace& place = layout_->params()[param];
  return typed(memory_, type_, place.reduce_segment_offset,
               static_cast<size_t>(place.shard_numel) * dtype_bytes(type_));
}

void SegmentRows::clear(size_t param, bool drops) {
  rows(param).zero_();
  if (drops) flags()[static_cast<int64_t>(param)].zero_();
}

at::Tensor SegmentRows::flags() {
  return typed(memory_, type_, layout_->reduce_segment_bytes(), layout_->params().size() * dtype_bytes(type_));
}

std::vector<uint8_t> SegmentRows::has_gradient() {
  const size_t num = layout_->params().size();
  std::vector<float> values(num);
  if (memory_.is_cpu()) {
    reduce(layout_->reduce_segment_bytes(), static_cast<int64_t>(num), DType::f32, values.data(), 1.0, false);
  } else {
    const at::Tensor copy = flags().to(at::kCPU, at::kFloat);
    std::copy_n(copy.const_data_ptr<float>(), num, values.data());
  }
  std::vector<uint8_t> has_gradient(num);
  std::ranges::transform(values, has_gradient.begin(), [](float value) { return value > 0.0F ? 1 : 0; });
  return has_gradient;
}

void SegmentRows::run_hook(const Gil& gil, const PyRef& hook) {
  sum();
  call_hook(gil, hook, typed(memory_, type_, 0, layout_->reduce_segment_bytes()));
}

void SegmentRows::write(const GradientTargets& targets) {
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = layout_->params()[i];
    reduce(place.reduce_segment_offset, place.shard_numel, place.shape.orig, targets[i]->data, divisor_,
           targets[i]->accumulate);
  }
}

std::unique_ptr<SegmentRows> to_segment(std::unique_ptr<ReducedRows> rows) {
  SegmentRows* const segment = rows->segment();
  if (segment == nullptr) throw Error("fsdp2x: reduced rows that wait for an all-reduce are not in a segment");
  rows.release();
  segment->sum();  // it may be kept
  return std::unique_ptr<SegmentRows>(segment);
}

void call_hook(const Gil& /*gil*/, const PyRef& hook, const at::Tensor& rows) {
  const PyRef object = PyRef::steal(THPVariable_Wrap(rows));
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(hook.get(), object.get(), nullptr));
  if (!done) throw_python_error();
}

}  // namespace fsdp2x
