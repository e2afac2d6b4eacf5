// Rows of a reduction, summed or to be summed.
#include "engine/params/reduced_rows.hpp"

#include "core/error.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

// The sums of some parameters' rows, which run together.
class SegmentRows::Sums {
 public:
  explicit Sums(const SegmentRows& rows) : rows_(rows) {
    const size_t num = rows.layout_->params().size();
    pieces_.reserve(num);
    pointers_.reserve(num * rows.sources_.size());
    types_.reserve(num * rows.sources_.size());
  }

  void add(size_t param, DType type, void* target, double divisor, bool accumulate) {
    cpu::ReducePiece piece;
    piece.src_type = rows_.type_;
    piece.dst_type = type;
    piece.sources = pointers_.data() + pointers_.size();
    piece.source_types = types_.data() + types_.size();
    for (const RowSource& source : rows_.sources_) {
      if (source.filled != nullptr && source.filled[param] == 0) continue;
      const ParamPlace& place = source.layout->params()[param];
      pointers_.push_back(source.segment + place.reduce_segment_offset);
      types_.push_back(place.shape.reduce);
      ++piece.num_sources;  // without any: zeros
    }
    piece.dst = target;
    piece.numel = rows_.layout_->params()[param].shard_numel;
    piece.divisor = divisor * (rows_.averages_ ? static_cast<double>(rows_.sources_.size()) : 1.0);
    piece.round = true;
    piece.accumulate = accumulate;
    items_.add(piece.numel);
    pieces_.push_back(piece);
  }

  void run() const {
    const ReleaseGil released;
    items_.for_each_range([&](size_t i, int64_t begin, int64_t end) { cpu::reduce(pieces_[i], begin, end); });
  }

 private:
  const SegmentRows& rows_;
  std::vector<cpu::ReducePiece> pieces_;
  std::vector<const void*> pointers_;
  std::vector<DType> types_;
  Items items_;
};

SegmentRows::SegmentRows(at::Tensor segment, std::shared_ptr<const Layout> layout, DType type, double divisor)
    : layout_(std::move(layout)), type_(type), divisor_(divisor) {
  keep(std::move(segment));
}

SegmentRows::SegmentRows(std::vector<RowSource> sources, std::shared_ptr<void> memory,
                         std::shared_ptr<const Layout> layout, DType type, double divisor, bool averages)
    : sources_(std::move(sources)),
      memory_(std::move(memory)),
      layout_(std::move(layout)),
      type_(type),
      divisor_(divisor),
      averages_(averages) {}

std::unique_ptr<SegmentRows> SegmentRows::zeros(std::shared_ptr<const Layout> layout, DType type, double divisor) {
  const auto bytes = static_cast<int64_t>(layout->flagged_segment_bytes());
  return std::make_unique<SegmentRows>(at::zeros({bytes}, at::kByte), std::move(layout), type, divisor);
}

void SegmentRows::sum() {
  if (segment_.defined()) return;
  at::Tensor segment = at::zeros({static_cast<int64_t>(layout_->flagged_segment_bytes())}, at::kByte);
  auto* const data = static_cast<std::byte*>(segment.mutable_data_ptr());
  std::vector<float> flags(layout_->params().size());
  const std::vector<uint8_t> found = has_gradient();
  Sums sums(*this);
  for (size_t i = 0; i < found.size(); ++i) {
    const ParamPlace& place = layout_->params()[i];
    if (found[i] == 0 || !place.shape.trainable) continue;
    flags[i] = 1.0F;
    sums.add(i, type_, data + place.reduce_segment_offset, 1.0, /*accumulate=*/false);
  }
  sums.run();
  cpu::cast_copy(type_, data + layout_->reduce_segment_bytes(), DType::f32, flags.data(),
                 static_cast<int64_t>(flags.size()));
  keep(std::move(segment));
}

void SegmentRows::keep(at::Tensor segment) {
  segment_ = std::move(segment);
  sources_ = {{static_cast<const std::byte*>(segment_.const_data_ptr()), layout_.get(), nullptr}};
  memory_.reset();
  averages_ = false;
}

at::Tensor SegmentRows::values() {
  sum();
  return typed(segment_, type_, 0, layout_->flagged_segment_bytes());
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
  return typed(segment_, type_, place.reduce_segment_offset,
               static_cast<size_t>(place.shard_numel) * dtype_bytes(type_));
}

void SegmentRows::clear(size_t param, bool drops) {
  rows(param).zero_();
  if (drops) flags()[static_cast<int64_t>(param)].zero_();
}

at::Tensor SegmentRows::flags() {
  return typed(segment_, type_, layout_->reduce_segment_bytes(), layout_->params().size() * dtype_bytes(type_));
}

std::vector<uint8_t> SegmentRows::has_gradient() {
  const size_t num = layout_->params().size();
  std::vector<uint8_t> found(num);
  std::vector<float> values(num);
  for (const RowSource& source : sources_) {
    const uint8_t* const filled = source.filled;
    if (filled == nullptr && segment_.defined() && !segment_.is_cpu()) {
      const at::Tensor copy = flags().to(at::kCPU, at::kFloat);
      std::copy_n(copy.const_data_ptr<float>(), num, values.data());
    } else if (filled == nullptr) {
      const std::byte* const flags = source.segment + source.layout->reduce_segment_bytes();
      cpu::cast_copy(DType::f32, values.data(), type_, flags, static_cast<int64_t>(num));
    }
    for (size_t i = 0; i < num; ++i) found[i] |= filled != nullptr ? filled[i] != 0 : values[i] > 0.0F;
  }
  return found;
}

void SegmentRows::run_hook(const Gil& gil, const PyRef& hook) {
  sum();
  call_hook(gil, hook, typed(segment_, type_, 0, layout_->reduce_segment_bytes()));
}

void SegmentRows::write(const GradientTargets& targets) {
  Sums sums(*this);
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    sums.add(i, layout_->params()[i].shape.grad(), targets[i]->data, divisor_, targets[i]->accumulate);
  }
  sums.run();
  memory_.reset();  // before user hooks, which may raise
}

std::unique_ptr<SegmentRows> to_segment(std::unique_ptr<ReducedRows> rows) {
  SegmentRows* const segment = rows->segment();
  if (segment == nullptr) throw Error("fsdp2x: reduced rows that wait for an all-reduce are not in a segment");
  rows.release();
  segment->sum();  // it may be kept
  return std::unique_ptr<SegmentRows>(segment);
}

void call_hook(const Gil& gil, const PyRef& hook, const at::Tensor& rows) {
  const PyRef object = PyRef::steal(THPVariable_Wrap(rows));
  call(gil, hook.get(), object.get());
}

}  // namespace fsdp2x
