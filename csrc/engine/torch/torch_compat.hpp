// The only file with #if's on the torch version. Autograd nodes are intrusive_ptr from 2.13 on and shared_ptr before.
// The helper that attaches a node to outputs gained an argument in 2.14. A poisoned storage can be healed since 2.12.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11 || TORCH_VERSION_MINOR > 15
#error "fsdp2x supports torch 2.11 to 2.15"
#endif

namespace fsdp2x::compat {

#if TORCH_VERSION_MINOR >= 13
template <class T>
using NodePtr = c10::intrusive_ptr<T>;

template <class T, class... Args>
NodePtr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}
#else
template <class T>
using NodePtr = std::shared_ptr<T>;

template <class T, class... Args>
NodePtr<T> make_node(Args&&... args) {
  // deleteNode unwinds long chains of nodes without recursion.
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

using Node = torch::autograd::Node;

#if TORCH_VERSION_MINOR >= 12
// Makes a storage with an access error readable again. The data pointer stays as it is.
inline void clear_access_error(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#else
// 2.11 can set the error but not clear it. An explicit instantiation may name a private member, which gives a legal
// pointer to the flag.
template <bool c10::StorageImpl::*Flag>
struct AccessErrorFlag {
  friend bool c10::StorageImpl::*access_error_flag() { return Flag; }
};
bool c10::StorageImpl::*access_error_flag();
template struct AccessErrorFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

inline void clear_access_error(c10::StorageImpl& storage) {
  storage.*access_error_flag() = false;
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));  // recomputes what the flag implies
}
#endif

// Returns `inputs` as outputs of `node` the way torch's own custom functions return an input unchanged. They are views
// that reject in-place changes that autograd could not follow, and forward-mode tangents pass through.
inline torch::autograd::variable_list pass_through(const torch::autograd::variable_list& inputs,
                                                   const NodePtr<Node>& node) {
  // An output that is a view of its input needs a tangent that is a view of the input's tangent.
  const torch::autograd::_jvp_fn_t jvp = [](torch::autograd::variable_list, torch::autograd::variable_list tangents) {
    for (at::Tensor& tangent : tangents) {
      if (tangent.defined()) tangent = tangent.view_as(tangent);
    }
    return tangents;
  };
  const torch::autograd::_view_as_self_fn_t view_as_self = [](at::Tensor x) { return x.view_as(x); };
  std::vector<std::optional<at::Tensor>> raw(inputs.begin(), inputs.end());
#if TORCH_VERSION_MINOR >= 14
  NodePtr<Node> attached;
  auto wrapped =
      torch::autograd::_wrap_outputs(inputs, {}, {}, raw, node, jvp, {}, view_as_self, /*pure_view=*/false, attached);
#else
  auto wrapped = torch::autograd::_wrap_outputs(inputs, {}, {}, raw, node, jvp, {}, view_as_self, /*pure_view=*/false);
#endif
  torch::autograd::variable_list outputs;
  outputs.reserve(wrapped.size());
  for (auto& output : wrapped) outputs.push_back(std::move(*output));
  return outputs;
}

}  // namespace fsdp2x::compat
