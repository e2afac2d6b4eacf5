// A group: fills and empties parameters, takes gradients from autograd, and says how to reduce them.
#include "engine/params/param_group.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/memory/local_tensor.hpp"
#include "engine/memory/storage.hpp"

namespace fsdp2x {

namespace {

void call_unless_null(const PyRef& function) {
  if (!function) return;
  const pybind11::gil_scoped_acquire gil;
  call(gil, function.get());
}

// Returns options for gradients next to the shards. is_pinned() asks the driver, so it is called only if the group
// offloads.
at::TensorOptions memory_like(const at::Tensor& pool, bool offloads) {
  return at::TensorOptions().device(pool.device()).pinned_memory(offloads && pool.is_pinned());
}

}  // namespace

ParamGroup::ParamGroup(Layout group_layout, at::Tensor shard_pool, std::vector<Param> group_params,
                       GroupCalls group_calls, int replicas, at::Device group_device, Offload group_offload)
    : layout_(std::move(group_layout)),
      shards_(layout_, std::move(shard_pool)),
      place_{group_device, group_offload, replicas},
      params_(std::move(group_params)),
      calls_(std::move(group_calls)),
      gradients_(layout_, params_, memory_like(pool(), offloads()), std::move(calls_.make_gradient),
                 std::move(calls_.add_to_foreign)) {
  if (pool().device().type() != (offloads() ? at::kCPU : place_.device.type())) {
    throw Error("fsdp2x: shards on " + pool().device().str() + " cannot be gathered on " + place_.device.str());
  }
  for (size_t i = 0; i < params_.size(); ++i) check_dtype(i, params_[i].sharded());
}

void ParamGroup::check_dtype(size_t i, const at::Tensor& tensor) const {
  const ParamShape& shape = layout_.params()[i].shape;
  if (!shape.in_slot || engine_dtype(c10::toRealValueType(tensor.scalar_type())) == shape.orig) return;
  throw Error("fsdp2x: parameter '" + params_[i].fqn() + "' has dtype " + c10::toString(tensor.scalar_type()) +
              ", but its unit stores shards of another dtype. Convert the model with its .to(dtype).");
}

const Param* ParamGroup::take_lost() {
  const Param* lost = nullptr;
  for (Param& param : params_) {
    if (param.take_lost()) lost = &param;
  }
  return lost;
}

void ParamGroup::check_sizes() const {
  if (const std::optional<size_t> small = shards_.first_too_small()) {
    throw Error("fsdp2x: the shard of parameter '" + params_[*small].fqn() + "' on rank " +
                std::to_string(layout_.rank()) +
                " has lost its memory: its storage was resized. Give it memory and values again, then run forward.");
  }
}

void ParamGroup::watch_shards(const std::vector<std::optional<at::Tensor>>& locals) {
  for (size_t i = 0; i < params_.size(); ++i) {
    const std::optional<at::Tensor>& local = locals.at(i);
    if (local) check_dtype(i, *local);
    shards_.watch(i, local.value_or(at::Tensor()));
  }
  check_sizes();
}

bool ParamGroup::has_replaced_shards(const Gil& /*gil*/) const {
  static PyObject* const local_name = interned("_local_tensor");
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].has_other_grad_dtype(layout_.params()[i])) return true;
    if (!shards_.is_watched(i)) continue;
    const at::Tensor& sharded = params_[i].sharded();
    PyRef local;
    if (sharded.unsafeGetTensorImpl()->is_python_dispatch()) {
      local = PyRef::steal(PyObject_GetAttr(params_[i].sharded_object(), local_name));
      if (!local) throw_python_error();
    }
    const at::Tensor& tensor = local ? THPVariable_Unpack(local.get()) : sharded;
    if (!shards_.is_watched(i, tensor) || sharded.scalar_type() != tensor.scalar_type()) return true;
  }
  return false;
}

void ParamGroup::rename(std::string new_name) {
  name_ = std::move(new_name);
  if (post_forward_.group) post_forward_.group->rename(name_ + " (after forward)");
}

void ParamGroup::set_unit(const UnitFacts* unit) {
  member_.unit = unit;
  if (post_forward_.group) post_forward_.group->member_.unit = unit;
}

void ParamGroup::join(std::shared_ptr<Transport> transport, std::shared_ptr<Commons> commons) {
  member_.transport = std::move(transport);
  member_.commons = std::move(commons);
  gradients_.use(member_.commons);
  gather_.kept = Slot();  // of the transport before
}

void ParamGroup::take_seats(AgreementSeat shards, AgreementSeat replicas) {
  member_.shard_seat = std::move(shards);
  member_.replica_seat = std::move(replicas);
}

// --- gathering ---

ParamGroup& ParamGroup::begin_gather() {
  ++counters().gathers;
  noted_versions_.reset();
  call_unless_null(calls_.begin_extension_gather);  // before the pool is read, because it refreshes aliases
  gathered_from_ = keeps_rows() ? post_forward_.group.get() : this;
  if (gathered_from_ == this) {
    if (shards_.state() == ShardState::open) {
      const pybind11::gil_scoped_acquire gil;
      shards_.close();
    }
    fetch_reassigned();
    check_sizes();
    shards_.fetch_moved();
  }
  return *gathered_from_;
}

void ParamGroup::fetch_reassigned() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& param = params_[i].sharded();
    if (param.unsafeGetTensorImpl()->is_python_dispatch()) return;  // a sharded group: all of them are DTensors
    const ParamPlace& place = layout_.params()[i];
    if (shards_.address(i) == nullptr || shards_.is_watched(i, param)) continue;
    const DType type = engine_dtype(param.scalar_type());
    const bool is_alike = type == place.shape.orig || type == DType::byte;
    if (param.nbytes() != static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig) || !is_alike) {
      throw Error("fsdp2x: parameter '" + params_[i].fqn() + "' has another dtype or shape on rank " +
                  std::to_string(layout_.rank()) + " than when fsdp2x adopted it. Convert new parameters before " +
                  "their first forward.");
    }
    const at::NoGradGuard no_grad;
    const at::Tensor pooled = tensor_in_pool(pool(), shards_.offset(i), param.sizes(), param.scalar_type());
    pooled.copy_(param);
    param.set_data(pooled);
    shards_.watch(i, param);
  }
}

void ParamGroup::check_registered(const Gil& gil) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    PyObject* const found = params_[i].registered_instead_of(gil, registered_while_sharded(i));
    if (found == nullptr) continue;
    throw Error("fsdp2x: parameter '" + params_[i].fqn() + "' was replaced on its module: rank " +
                std::to_string(layout_.rank()) + " found a " + Py_TYPE(found)->tp_name +
                " where the sharded parameter is expected. Call torch.func.functional_call and similar functions "
                "inside `with fsdp2x.unsharded(model):`. To change a parameter permanently, write to it in place, or "
                "load full tensors with torch's set_model_state_dict(..., StateDictOptions(full_state_dict=True)) or "
                "fsdp2x.load_hf.");
  }
}

PyObject* ParamGroup::registered_while_sharded(size_t param) const {
  return keeps_rows() ? post_forward_.params[param].get() : params_[param].sharded_object();
}

void ParamGroup::register_again(const Gil& gil) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    PyObject* const found = params_[i].registered_instead_of(gil, params_[i].unsharded_object());
    if (found != nullptr && found == registered_while_sharded(i)) params_[i].register_unsharded(gil);
  }
}

bool ParamGroup::follow_gathered() {
  bool has_own_memory = true;
  for (Param& param : params_) {
    if (param.unsharded_object() == nullptr) continue;
    param.take_requires_grad(param.unsharded());
    has_own_memory = has_own_memory && param.has_own_memory();
  }
  return has_own_memory;
}

uint64_t ParamGroup::shard_versions(const Gil& /*gil*/) const {
  uint64_t sum = 0;
  const auto add = [&sum](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_inference()) sum += tensor._version();
  };
  for (const Param& param : params_) {
    add(param.sharded());
    const LocalTensor local = local_tensor(param.sharded_object());  // has a counter of its own
    if (local.spec) add(local.tensor);
  }
  return sum;
}

void ParamGroup::fill() {
  call_unless_null(calls_.finish_extension_gather);
  pybind11::gil_scoped_acquire gil;
  check_registered(gil);
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].fill(gathered_from_->gather_.read + gathered_from_->layout_.params()[i].slot_offset);
    params_[i].register_unsharded(gil);
  }
  counters().parameter_stores += params_.size();
}

void ParamGroup::empty(bool keeps_post_forward) {
  counters().parameter_stores += params_.size();
  pybind11::gil_scoped_acquire gil;
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].empty(gil);
    if (keeps_post_forward) params_[i].give_requires_grad(THPVariable_Unpack(post_forward_.params[i].get()));
    params_[i].register_object(gil, keeps_post_forward ? post_forward_.params[i].get() : params_[i].sharded_object());
  }
}

void ParamGroup::free_extensions() { call_unless_null(calls_.free_extension_gather); }

void ParamGroup::set_post_forward(std::shared_ptr<ParamGroup> group, std::vector<PyRef> sharded) {
  post_forward_.group = std::move(group);
  post_forward_.group->member_.unit = member_.unit;
  rename(name_);
  post_forward_.params = std::move(sharded);
}

void ParamGroup::clear_post_forward() {
  drop_post_forward();
  post_forward_.group.reset();
}

const CopyProgram& ParamGroup::rows_to_keep() {
  CopyProgram& program = post_forward_.rows_to_keep[gathered_from_];
  if (!program.empty()) return program;
  // Both slots hold full parameters, but not always at the same offsets.
  for (size_t i = 0; i < params_.size(); ++i) {
    const ParamPlace& place = post_forward_.group->layout_.params()[i];
    if (place.shard_numel == 0) continue;
    Copy copy = shard_to_whole(place.shape, place.rows, place.shard_offset, place.shape.compute,
                               gathered_from_->layout_.params()[i].slot_offset, place.shape.compute);
    std::swap(copy.src_offset, copy.dst_offset);
    std::swap(copy.src_stride, copy.dst_stride);
    program.copies.push_back(copy);
  }
  return program;
}

const Slot& ParamGroup::open_slot(SlotLedger& ledger) {
  gather_.slot = gather_.kept.id >= 0 ? ledger.reuse(gather_.kept.id)
                                      : ledger.acquire(std::max<size_t>(layout_.slot_bytes(), 1), name_);
  return gather_.slot;
}

bool ParamGroup::close_slot(SlotLedger& ledger) {
  const Slot slot = gather_.slot;
  gather_ = GatherSlot();
  if (options().keep_unsharded_storage) {
    gather_.kept = slot;
    return false;
  }
  ledger.release(slot.id);
  return true;
}

void ParamGroup::drop_post_forward() {
  if (!stop_keeping_rows()) return;
  pybind11::gil_scoped_acquire gil;
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].take_requires_grad(THPVariable_Unpack(post_forward_.params[i].get()));
    params_[i].register_sharded(gil);
  }
}

// --- gradients ---

at::Tensor ParamGroup::plain(const at::Tensor& gradient, size_t param) const {
  pybind11::gil_scoped_acquire gil;
  const PyRef object = PyRef::steal(THPVariable_Wrap(gradient));
  const PyRef local = call(gil, calls_.plain_gradient.get(), params_[param].gradient_spec(), object.get());
  ++counters().python_calls;
  return THPVariable_Unpack(local.get());
}

bool ParamGroup::has_unpacked_gradient(size_t i) const {
  return params_[i].unsharded_object() != nullptr && params_[i].unsharded().grad().defined();
}

at::Tensor ParamGroup::take_gradient(size_t i) {
  return std::exchange(params_[i].unsharded().mutable_grad(), at::Tensor());
}

at::Tensor ParamGroup::packable(at::Tensor gradient, size_t i) const {
  if (gradient.layout() != at::kStrided) {
    throw Error("fsdp2x: the gradient of '" + params_[i].fqn() +
                "' is sparse, but fsdp2x only shards dense gradients. Use sparse=False in the embedding.");
  }
  const ParamShape& shape = layout_.params()[i].shape;
  const at::ScalarType reduce = torch_dtype(shape.reduce), made = gradient.scalar_type();
  if (shape.takes_any_grad && made != torch_dtype(shape.compute) && at::promote_types(made, reduce) != reduce) {
    throw Error("fsdp2x: the gradient of '" + params_[i].fqn() + "' has dtype " + c10::toString(made) +
                ", but its unit reduces in " + c10::toString(reduce) +
                ", and its grad_dtype is None. Pass "
                "MixedPrecisionPolicy(reduce_dtype=...) with the dtype that gradients have, or a grad_dtype.");
  }
  if (gradient.unsafeGetTensorImpl()->is_python_dispatch()) gradient = plain(gradient, i);
  if (gradient.is_complex()) gradient = at::view_as_real(gradient.resolve_conj());
  return gradient;
}

void ParamGroup::drop_unpacked() {
  for (const Param& param : params_) {
    if (param.unsharded_object() != nullptr) param.unsharded().mutable_grad() = at::Tensor();
  }
}

// --- how it is reduced ---

bool ParamGroup::reduces_unused() const { return options().reduce_unused_params && has_trainable(); }

bool ParamGroup::has_trainable() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].trains(layout_.params()[i])) return true;
  }
  return false;
}

bool ParamGroup::gathers_alone() const { return layout_.world() == 1 || layout_.gather_segment_bytes() == 0; }

DType ParamGroup::reduce_type() const {
  for (const ParamPlace& place : layout_.params()) {
    if (place.shape.reduce != DType::byte) return place.shape.reduce;
  }
  return DType::f32;
}

bool ParamGroup::averages() const {
  // fp16 sums overflow early, so the divisor is split around the collective.
  if (options().force_sum_reduction || reduce_type() == DType::f16) return false;
  return divisor() == static_cast<double>(layout_.world() * place_.replicas);
}

double ParamGroup::divisor() const {
  return options().divide_factor.value_or(static_cast<double>(layout_.world() * place_.replicas));
}

double ParamGroup::pre_divisor() const {
  if (reduce_type() != DType::f16) return 1.0;
  const double factor = divisor();
  double before = 1.0;
  while (std::fmod(factor, before) == 0.0 && factor / before > before) before *= 2.0;
  return before;
}

}  // namespace fsdp2x
