// One parameter of a unit: registration in its modules and the memory of its unsharded tensor.
#include "engine/params/param.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include "core/error.hpp"

namespace fsdp2x {

namespace {

std::string poison_message(const std::string& fqn) {
  return "fsdp2x: the unsharded parameter '" + fqn +
         "' was used while it is resharded. In backward, start from a tensor that its unit's forward returned, or "
         "keep the parameters with reshard_after_forward=False (for second-order gradients, with "
         "set_reshard_after_backward(False)). Elsewhere, use it inside its unit's forward, or call unshard() on the "
         "unit's module first.";
}

}  // namespace

Param::Param(std::string fqn, PyRef sharded, PyRef unsharded, PyRef local, PyRef gradient_spec,
             std::vector<Owner> owners)
    : fqn_(std::move(fqn)),
      sharded_(std::move(sharded)),
      unsharded_(std::move(unsharded)),
      local_(std::move(local)),
      gradient_spec_(std::move(gradient_spec)),
      owners_(std::move(owners)),
      poison_(poison_message(fqn_)),
      device_(at::kCPU) {
  if (!unsharded_) return;
  const at::Tensor& tensor = this->local();
  memory_ = tensor.detach();
  storage_ = tensor.storage().getWeakStorageImpl().lock();
  device_ = tensor.device();
  poison_.apply(*storage_, device_);
}

void Param::rename(std::string fqn) {
  fqn_ = std::move(fqn);
  if (!storage_) return;
  poison_.lift(*storage_);
  poison_ = Poison(poison_message(fqn_));
  poison_.apply(*storage_, device_);
}

const at::Tensor& Param::sharded() const { return THPVariable_Unpack(sharded_.get()); }

const at::Tensor& Param::unsharded() const { return THPVariable_Unpack(unsharded_.get()); }

const at::Tensor& Param::local() const { return local_ ? THPVariable_Unpack(local_.get()) : unsharded(); }

void Param::set_unsharded_object(PyRef unsharded) {
  if (unsharded.get() != unsharded_.get()) accumulator = nullptr;
  unsharded_ = std::move(unsharded);
}

void Param::fill(void* data) {
  if (storage_) {
    poison_.lift(*storage_);
    point_storage(*storage_, data, device_);
  }
  give_requires_grad(unsharded());
}

void Param::empty(const Gil& gil) {
  if (unsharded_) take_requires_grad(unsharded());
  if (is_replaced(gil)) is_lost_ = true;
  if (!storage_) return;
  if (!has_own_memory()) {
    is_lost_ = true;
    accumulator = nullptr;
    local().set_data(memory_);
  }
  poison_.apply(*storage_, device_);
}

void Param::give_requires_grad(const at::Tensor& registered) {
  requires_grad_ = sharded().requires_grad();
  if (registered.requires_grad() != requires_grad_) registered.requires_grad_(requires_grad_);
}

void Param::take_requires_grad(const at::Tensor& registered) {
  if (registered.requires_grad() == requires_grad_) return;
  requires_grad_ = registered.requires_grad();
  if (sharded().requires_grad() != requires_grad_) sharded().requires_grad_(requires_grad_);
}

bool Param::has_other_grad_dtype(const ParamPlace& place) const {
  if (!place.shape.trainable) return false;
  if (storage_ && unsharded().is_floating_point() && unsharded().grad_dtype()) return true;
  const auto* const meta = torch::autograd::impl::get_autograd_meta(sharded());
  const bool is_set = meta != nullptr && (meta->grad_dtype_ || meta->allow_grad_dtype_mismatch_);
  if (!is_set || !place.shape.grad_override) return is_set != place.shape.grad_override.has_value();
  const std::optional<at::ScalarType> type = sharded().grad_dtype();
  return place.shape.takes_any_grad ? type.has_value()
                                    : !type || engine_dtype(c10::toRealValueType(*type)) != place.shape.grad();
}

bool Param::has_own_memory() const {
  return !storage_ || (local().storage().unsafeGetStorageImpl() == storage_.get() &&
                       local().scalar_type() == memory_.scalar_type() && local().sizes() == memory_.sizes());
}

// torch.func.functional_call registers tensors that are not parameters for a while.
bool Param::is_replaced(const Gil& gil) const {
  PyObject* const found = registered_instead_of(gil, unsharded_.get());
  return found != nullptr && found != sharded_.get() && THPVariable_Check(found) &&
         PyObject_IsInstance(found, ParameterClass) == 1;
}

PyObject* Param::registered_instead_of(const Gil& /*gil*/, PyObject* expected) const {
  for (const Owner& owner : owners_) {
    PyObject* const found = PyDict_GetItemWithError(owner.parameters.get(), owner.name.get());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw_python_error();
    if (found != expected) return found == nullptr ? Py_None : found;
  }
  return nullptr;
}

void Param::forget_missing_owners(const Gil& /*gil*/) {
  std::erase_if(owners_, [](const Owner& owner) {
    const int found = PyDict_Contains(owner.parameters.get(), owner.name.get());
    if (found < 0) throw_python_error();
    return found == 0;
  });
}

void Param::forbid() {
  if (!storage_) return;
  Poison("fsdp2x: the unsharded parameter '" + fqn_ +
         "' was used in a forked child of the process that gathered it. Its memory belongs to the parent. Copy what a "
         "child needs before the fork, or start children by 'spawn' or 'forkserver'.")
      .apply(*storage_, device_);
}

void Param::store(const Gil& /*gil*/, PyObject* parameter) const {
  for (const Owner& owner : owners_) {
    if (!owner.weak_module) {
      if (PyDict_SetItem(owner.parameters.get(), owner.name.get(), parameter) != 0) throw_python_error();
      continue;
    }
    PyObject* module = PyWeakref_GetObject(owner.weak_module.get());  // borrowed
    if (module == Py_None) continue;
    if (PyObject_SetAttr(module, owner.name.get(), parameter) != 0) throw_python_error();
  }
}

}  // namespace fsdp2x
