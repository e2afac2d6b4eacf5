// The only file with #if's on the torch version. Autograd nodes are intrusive_ptr from 2.13 on and shared_ptr before.
// A poisoned storage can be healed since 2.12.
#pragma once

#include <c10/core/StorageImpl.h>
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
  using torch::autograd::CreationMeta;
  const CreationMeta made_by = inputs.size() > 1 ? CreationMeta::MULTI_OUTPUT_NODE : CreationMeta::IN_CUSTOM_FUNCTION;
  const at::NoGradGuard no_grad;
  torch::autograd::variable_list outputs;
  outputs.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    at::Tensor output = input.view_as(input);
    torch::autograd::create_gradient_edge(output, node);
    if (output.is_view()) torch::autograd::impl::get_view_autograd_meta(output)->set_creation_meta(made_by);
    outputs.push_back(std::move(output));
  }
  return outputs;
}

}  // namespace fsdp2x::compat
