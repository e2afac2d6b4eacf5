// Checks which tensors the kernels can take, looks up gradients and state, and allocates states.
#include "engine/optim/step_jobs.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "engine/memory/storage.hpp"

namespace fsdp2x {

bool Pair::fits() const {
  return is_plain_memory(param.tensor, device) && is_plain_memory(grad.tensor, device) &&
         same_layout(param.tensor, grad.tensor) && param.tensor.scalar_type() == grad.tensor.scalar_type() &&
         same_placements(param.spec.get(), grad.spec.get());
}

bool Pair::fits(const LocalTensor& state, at::ScalarType type) const {
  return is_plain_memory(state.tensor, device) && state.tensor.scalar_type() == type &&
         same_layout(param.tensor, state.tensor) && same_placements(param.spec.get(), state.spec.get());
}

void Pair::bump_versions() const {
  THPVariable_Unpack(object).unsafeGetTensorImpl()->bump_version();
  if (param.spec) param.tensor.unsafeGetTensorImpl()->bump_version();
}

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

PyObject* look_up(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw_python_error();
  return value;
}

void call_maker(PyObject* function, size_t group, size_t index) {
  const PyRef result = PyRef::steal(PyObject_CallFunction(function, "nn", group, index));
  if (!result) throw_python_error();
}

PyObject* state_of(PyObject* state, PyObject* param) {
  PyObject* own = look_up(state, param);
  if (own != nullptr && !PyDict_Check(own)) throw Error("optimizer: the state of a parameter is not a dict");
  return own;
}

LocalTensor local_item(PyObject* dict, PyObject* key) {
  PyObject* value = look_up(dict, key);
  return value == nullptr ? LocalTensor() : local_tensor(value);
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

}  // namespace fsdp2x
