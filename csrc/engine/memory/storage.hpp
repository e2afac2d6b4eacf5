// Storages whose data pointer the engine moves: into a slot, into a pool, or to null with a message.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>

#include "core/dtype.hpp"

namespace fsdp2x {

// The engine's dtype for a torch dtype; types it cannot cast are `byte`.
DType engine_dtype(at::ScalarType type);

// Memory that is used whole and for long: `bytes` of it, with any values; in huge pages of the host, where it may be.
at::Tensor pool_memory(int64_t bytes, const at::TensorOptions& memory);

// Elements of `type` over [offset, offset + num_bytes) of `memory`, a tensor of bytes.
at::Tensor typed(const at::Tensor& memory, DType type, size_t offset, size_t num_bytes);

// A tensor with a StorageImpl of its own over [offset, offset + its bytes) of `pool`, which it keeps alive.
at::Tensor tensor_in_pool(const at::Tensor& pool, size_t offset, at::IntArrayRef sizes, at::ScalarType dtype);

// A contiguous tensor whose storage has its final size but no memory yet.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// All of `memory`, through `storage`, which does not own it: other tensors over `storage` see it, too.
at::Tensor tensor_over_storage(const at::Storage& storage, const at::Tensor& memory);

// Points `storage` at memory it does not own: whoever calls this keeps the memory alive and detaches in time.
void point_storage(c10::StorageImpl& storage, void* data, at::Device device);

// Points `storage` at [offset ..) of `pool` and makes it an owner of the pool.
void point_storage_at_pool(c10::StorageImpl& storage, const at::Tensor& pool, size_t offset);

// The pool that `storage` points into and owns; null: it does not.
const c10::StorageImpl* pool_of(c10::StorageImpl& storage);

// The same owner, another address of its memory.
void redirect_storage(c10::StorageImpl& storage, void* data);

// Takes the memory of `tensor` away, whoever owned it; a later access throws `message`. Undone by attach_to_pool.
void detach_memory(const at::Tensor& tensor, const std::string& message);

// Gives a tensor that was detached [offset ..) of `pool`, and makes it an owner of the pool.
void attach_to_pool(const at::Tensor& tensor, const at::Tensor& pool, size_t offset);

// A message that travels between its owner and a poisoned storage without being copied: poisoning and healing are on
// the hot path.
class Poison {
 public:
  explicit Poison(std::string message) : message_(std::move(message)) {}
  // Null pointer; any access to the data throws the message.
  void apply(c10::StorageImpl& storage, at::Device device);
  // Undoes apply; the pointer stays null until point_storage.
  void lift(c10::StorageImpl& storage);

 private:
  std::optional<std::string> message_;
};

}  // namespace fsdp2x
