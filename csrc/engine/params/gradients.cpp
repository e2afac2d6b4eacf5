// The gradient pool of a unit.
#include "engine/params/gradients.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include "engine/memory/device_copy.hpp"
#include "engine/memory/local_tensor.hpp"

namespace fsdp2x {

namespace {

at::Tensor allocate(size_t bytes, const at::TensorOptions& memory) {
  return pool_memory(static_cast<int64_t>(bytes), memory);
}

// Returns the number of elements in the gradient of `param`. A complex element counts as two in the layout.
int64_t numel_of(const ParamPlace& place, const at::Tensor& param) {
  return param.is_complex() ? place.shard_numel / 2 : place.shard_numel;
}

// Returns the dtype of the gradient of `param`.
at::ScalarType grad_type_of(const ParamPlace& place, const at::Tensor& param) {
  const at::ScalarType type = torch_dtype(place.shape.grad());
  return param.is_complex() ? c10::toComplexType(type) : type;
}

}  // namespace

BlockPool::Kind BlockPool::kind_of(size_t bytes, const at::TensorOptions& memory) {
  return {memory.device().type(), memory.pinned_memory(), bytes};
}

at::Tensor BlockPool::take(size_t bytes, const at::TensorOptions& memory) {
  was_taken_ = true;
  const Kind kind = kind_of(bytes, memory);
  auto found = free_.upper_bound(kind);  // after the last one given back, so others may become idle
  if (found == free_.begin() || (--found)->first != kind) {
    ++num_allocations_;
    if (keeps_) return allocate(bytes, memory);
    // In a block that lives for one step, huge pages cost more than they save: a tenth of a backward over gloo.
    return at::empty({static_cast<int64_t>(bytes)}, memory.dtype(at::kByte));
  }
  at::Tensor block = std::move(found->second.memory);
  free_.erase(found);
  return block;
}

void BlockPool::give_back(at::Tensor block, const at::TensorOptions& memory, bool stays) {
  if (!keeps_) return;
  const Kind kind = kind_of(block.nbytes(), memory);
  free_.emplace(kind, Block{std::move(block), stays, round_});
}

void BlockPool::end_loans() {
  if (std::exchange(was_taken_, false)) ++round_;
  std::erase_if(free_,
                [this](const auto& one) { return !one.second.stays || one.second.round + kIdleRounds < round_; });
  retired_.clear();
}

Gradients::Gradients(const Layout& layout, std::vector<Param>& params, at::TensorOptions memory, PyRef make_gradient,
                     PyRef add_to_foreign)
    : layout_(layout),
      params_(params),
      memory_(memory),
      calls_{std::move(make_gradient), std::move(add_to_foreign)},
      entries_(params.size()) {}

Gradients::Counts Gradients::count(const Gil& /*gil*/, const Entry& entry) const {
  const PyRef tensor = PyRef::steal(THPVariable_Wrap(entry.tensor));
  const PyRef local = PyRef::steal(THPVariable_Wrap(entry.local));
  return {entry.tensor.use_count(), entry.local.use_count(), entry.local.storage().use_count(), Py_REFCNT(tensor.get()),
          Py_REFCNT(local.get())};
}

bool Gradients::held_elsewhere(const Gil& gil, const Entry& entry) const {
  // The C++ count does not show a Python reference to the wrapper, and only the storage's count shows a view of the
  // local tensor. So the gradient is ours alone only if all five counts are back at their first values.
  const Counts now = count(gil, entry);
  return now.tensor > entry.alone.tensor || now.local > entry.alone.local || now.storage > entry.alone.storage ||
         now.tensor_object > entry.alone.tensor_object || now.local_object > entry.alone.local_object;
}

void Gradients::make(const Gil& gil, size_t param, const at::Tensor& memory, size_t offset, bool in_block) {
  const at::Tensor& like = params_[param].sharded();
  Entry& entry = entries_[param];
  const ParamPlace& place = layout_.params()[param];
  PyRef local_object = PyRef::steal(
      THPVariable_Wrap(tensor_in_pool(memory, offset, {numel_of(place, like)}, grad_type_of(place, like))));
  ++num_python_calls_;
  const PyRef tensor = call(gil, calls_.make_gradient.get(), params_[param].gradient_spec(), local_object.get());
  // The DTensor keeps a reshaped alias of `local`. Users see that alias, so watch it.
  local_object = PyRef();
  entry.tensor = THPVariable_Unpack(tensor.get());
  entry.local = local_tensor(tensor.get()).tensor;
  entry.in_block = in_block;
  entry.alone = Counts();
}

bool Gradients::has_own_gradient(size_t param) const {
  const at::Tensor& grad = params_[param].sharded().grad();
  return grad.defined() && grad.is_same(entries_[param].tensor);
}

std::shared_ptr<const Layout> Gradients::current_layout() const {
  std::vector<bool> trains(params_.size());
  bool is_same = places_ != nullptr;
  for (size_t i = 0; i < params_.size(); ++i) {
    trains[i] = params_[i].trains(layout_.params()[i]);
    is_same = is_same && trains[i] == places_->params()[i].shape.trainable;
  }
  return is_same ? places_ : std::make_shared<const Layout>(layout_.training(trains));
}

void Gradients::open_block(std::shared_ptr<const Layout> places) {
  places_ = std::move(places);
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (!entry.tensor.defined() || (entry.in_block ? places_->params()[i].shape.trainable : has_own_gradient(i))) {
      continue;
    }
    if (!entry.in_block) {
      if (entry.alone.tensor == 0) continue;  // part of this reduction for a parameter that only other ranks train
      commons_->blocks.retire(entry.local);
    }
    entry = Entry();
  }
  size_t bytes = places_->gradient_pool_bytes();
  if (reduces_in_place_ && places_->can_reduce_in_place()) bytes = std::max(bytes, places_->flagged_segment_bytes());
  block_ = commons_->blocks.take(bytes, memory_);
  is_lent_ = false;
}

std::optional<at::Tensor> Gradients::take_pool(const Gil& gil, const std::shared_ptr<const Layout>& reduced) {
  if (is_taken_) return std::nullopt;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const bool is_reduced = reduced->params()[i].shape.trainable;
    if (block_.defined() && is_reduced != places_->params()[i].shape.trainable) return std::nullopt;
    if (!is_reduced) continue;
    if (params_[i].sharded().grad().defined()) return std::nullopt;
    if (!block_.defined() || !entry.tensor.defined()) continue;
    if (!entry.in_block || held_elsewhere(gil, entry)) return std::nullopt;
  }
  if (!block_.defined()) open_block(reduced);
  is_taken_ = true;
  return block_;
}

GradientTarget Gradients::prepare(const Gil& gil, size_t param) {
  GradientTarget target;
  const ParamPlace& place = layout_.params()[param];
  const at::Tensor& sharded = params_[param].sharded();
  Entry& entry = entries_[param];
  if (has_own_gradient(param)) {
    target.data = entry.local.data_ptr();
    target.accumulate = true;
    return target;
  }
  if (sharded.grad().defined()) {
    target.foreign = at::empty({numel_of(place, sharded)}, memory_.dtype(grad_type_of(place, sharded)));
    target.data = target.foreign.data_ptr();
    target.is_new = true;
    return target;
  }
  if (!block_.defined() && sharded.requires_grad()) {
    open_block(current_layout());
    target.is_new = true;
  }
  const bool has_place = block_.defined() && places_->params()[param].shape.trainable;
  const bool is_held = entry.tensor.defined() && held_elsewhere(gil, entry);
  is_lent_ = is_lent_ || (is_held && entry.in_block);
  if (has_place && !entry.tensor.defined()) {
    make(gil, param, block_, places_->params()[param].gradient_offset, /*in_block=*/true);
  } else if (!entry.tensor.defined() || is_held || (entry.in_block && !has_place)) {
    // The parameter no longer trains, or the user still holds last step's gradient. That gradient keeps its memory.
    const size_t bytes = static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.grad());
    make(gil, param, allocate(std::max<size_t>(bytes, 1), memory_), 0, /*in_block=*/false);
    target.is_new = true;
  } else if (entry.in_block && entry.local.storage().data_ptr().get() == nullptr && place.shard_numel > 0) {
    point_storage_at_pool(*entry.local.storage().unsafeGetStorageImpl(), block_,
                          places_->params()[param].gradient_offset);
  }
  target.data = entry.local.data_ptr();
  return target;
}

void Gradients::attach(const Gil& gil, size_t param, const GradientTarget& target) {
  const at::Tensor& sharded = params_[param].sharded();
  Entry& entry = entries_[param];
  if (target.foreign.defined()) {
    const PyRef local = PyRef::steal(THPVariable_Wrap(target.foreign));
    ++num_python_calls_;
    call(gil, calls_.add_to_foreign.get(), params_[param].sharded_object(), local.get());
  } else if (!target.accumulate) {
    if (entry.alone.tensor == 0) entry.alone = count(gil, entry);
    sharded.mutable_grad() = entry.tensor;
  }
}

bool Gradients::release_if_unused(const Gil& gil) {
  if (!block_.defined() || is_taken_) return false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].tensor.defined() || !entries_[i].in_block) continue;
    if (has_own_gradient(i) || held_elsewhere(gil, entries_[i])) return false;
  }
  for (Entry& entry : entries_) {
    if (entry.tensor.defined() && entry.in_block) {
      point_storage(*entry.local.storage().unsafeGetStorageImpl(), nullptr, memory_.device());
    }
  }
  if (is_lent_ && block_.storage().use_count() > 1) {
    commons_->blocks.retire(std::move(block_));
  } else {
    commons_->blocks.give_back(std::move(block_), memory_, blocks_stay_);
  }
  block_ = at::Tensor();
  return true;
}

void Gradients::forget() {
  entries_.assign(params_.size(), Entry());
  is_taken_ = false;
  block_ = at::Tensor();
}

}  // namespace fsdp2x
