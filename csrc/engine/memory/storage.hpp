// Storages whose data pointer the engine moves: into a slot, into a pool, or to null with a message.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.hpp"

namespace fsdp2x {

// Returns the engine's dtype for a torch dtype. Types it cannot cast are `byte`.
DType engine_dtype(at::ScalarType type);

// Allocates `bytes` of uninitialized memory for long use as a whole, in huge pages of the host if possible.
at::Tensor pool_memory(int64_t bytes, const at::TensorOptions& memory);

// Returns elements of `type` over [offset, offset + num_bytes) of `memory`, which is contiguous.
at::Tensor typed(const at::Tensor& memory, DType type, size_t offset, size_t num_bytes);

// Returns a tensor with a separate StorageImpl over [offset, offset + its bytes) of `pool`, which it keeps alive.
at::Tensor tensor_in_pool(const at::Tensor& pool, size_t offset, at::IntArrayRef sizes, at::ScalarType dtype);

// Returns zero tensors, each with a separate storage, in one block of memory that lives as long as any of them.
std::vector<at::Tensor> pooled_zeros(const std::vector<std::pair<std::vector<int64_t>, at::ScalarType>>& shapes);

// Returns a contiguous tensor whose storage has its final size but no memory yet.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

// Returns all of `memory` through `storage`, which does not own it. Other tensors over `storage` see it too.
at::Tensor tensor_over_storage(const at::Storage& storage, const at::Tensor& memory);

// Points `storage` at memory that it does not own. The caller keeps the memory alive and detaches in time.
void point_storage(c10::StorageImpl& storage, void* data, at::Device device);

// Points `storage` at [offset ..) of `pool` and makes it an owner of the pool.
void point_storage_at_pool(c10::StorageImpl& storage, const at::Tensor& pool, size_t offset);

// Returns the pool that `storage` points into and owns. Null: it owns none.
const c10::StorageImpl* pool_of(c10::StorageImpl& storage);

// Changes the address within the memory of the same owner.
void redirect_storage(c10::StorageImpl& storage, void* data);

// Takes the memory of `tensor` away from any owner. A later access throws `message`. attach_to_pool undoes this.
void detach_memory(const at::Tensor& tensor, const std::string& message);

// Gives a detached tensor [offset ..) of `pool` and makes it an owner of the pool.
void attach_to_pool(const at::Tensor& tensor, const at::Tensor& pool, size_t offset);

// A message that moves between its owner and a poisoned storage without a copy, because poisoning and lifting are on
// the hot path.
class Poison {
 public:
  explicit Poison(std::string message) : message_(std::move(message)) {}
  // Sets a null pointer. Any access to the data throws the message.
  void apply(c10::StorageImpl& storage, at::Device device);
  // Undoes apply. The pointer stays null until point_storage.
  void lift(c10::StorageImpl& storage);

 private:
  std::optional<std::string> message_;
};

}  // namespace fsdp2x
