// Reduced rows in CPU memory.
#include "engine/params/reduced_rows.hpp"

#include "core/error.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "engine/memory/storage.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

SegmentRows::SegmentRows(std::vector<at::Tensor> segments, std::shared_ptr<const Layout> layout, DType type,
                         double divisor, bool averages)
    : segments_(std::move(segments)), layout_(std::move(layout)), type_(type), divisor_(divisor), averages_(averages) {}

std::unique_ptr<SegmentRows> SegmentRows::zeros(std::shared_ptr<const Layout> layout, DType type, double divisor) {
  const auto bytes = static_cast<int64_t>(layout->flagged_segment_bytes());
  return std::make_unique<SegmentRows>(std::vector{at::zeros({bytes}, at::kByte)}, std::move(layout), type, divisor);
}

void SegmentRows::reduce(size_t offset, int64_t numel, DType target_type, void* target, double divisor,
                         bool accumulate) const {
  if (numel == 0) return;
  std::vector<const void*> sources;
  for (const at::Tensor& segment : segments_) {
    sources.push_back(static_cast<const std::byte*>(segment.const_data_ptr()) + offset);
  }
  cpu::ReducePiece piece;
  piece.src_type = type_;
  piece.dst_type = target_type;
  piece.sources = sources.data();
  piece.num_sources = static_cast<int>(sources.size());
  piece.dst = target;
  piece.piece_numel = piece.src_stride = numel;
  piece.divisor = divisor * (averages_ ? piece.num_sources : 1);
  piece.round = true;
  piece.accumulate = accumulate;
  run_parallel(numel, kGrainNumel, [&](int64_t begin, int64_t end) { cpu::reduce(piece, begin, end); });
}

void SegmentRows::sum() {
  if (segments_.size() == 1) return;
  const size_t bytes = layout_->flagged_segment_bytes();
  at::Tensor summed = at::empty({static_cast<int64_t>(bytes)}, segments_.front().options().dtype(at::kByte));
  reduce(0, static_cast<int64_t>(bytes / dtype_bytes(type_)), type_, summed.mutable_data_ptr(), 1.0, false);
  segments_ = {std::move(summed)};
  averages_ = false;
}

at::Tensor SegmentRows::values() {
  sum();
  return typed(segments_.front(), type_, 0, layout_->flagged_segment_bytes());
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
  return typed(segments_.front(), type_, place.reduce_segment_offset,
               static_cast<size_t>(place.shard_numel) * dtype_bytes(type_));
}

void SegmentRows::clear(size_t param, bool drops) {
  rows(param).zero_();
  if (drops) flags()[static_cast<int64_t>(param)].zero_();
}

at::Tensor SegmentRows::flags() {
  return typed(segments_.front(), type_, layout_->reduce_segment_bytes(),
               layout_->params().size() * dtype_bytes(type_));
}

std::vector<uint8_t> SegmentRows::has_gradient() {
  const size_t num = layout_->params().size();
  std::vector<float> values(num);
  if (segments_.front().is_cpu()) {
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
  call_hook(gil, hook, typed(segments_.front(), type_, 0, layout_->reduce_segment_bytes()));
}

void SegmentRows::write(const GradientTargets& targets) {
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = layout_->params()[i];
    reduce(place.reduce_segment_offset, place.shard_numel, place.shape.grad(), targets[i]->data, divisor_,
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
