// Storages whose data pointer the engine moves.
#include "engine/memory/storage.hpp"

#include "core/error.hpp"
#include "core/layout.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/torch/torch_compat.hpp"
#include "shm/huge_pages.hpp"

namespace fsdp2x {

namespace {

void release_owner(void* owner) { delete static_cast<c10::intrusive_ptr<c10::StorageImpl>*>(owner); }

at::DataPtr owning_pointer(const at::Tensor& pool, size_t offset) {
  auto owner = pool.storage().getWeakStorageImpl().lock();
  void* data = static_cast<std::byte*>(pool.data_ptr()) + offset;
  return at::DataPtr(data, new c10::intrusive_ptr<c10::StorageImpl>(std::move(owner)), &release_owner, pool.device());
}

at::Tensor tensor_over(at::DataPtr data, at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const size_t numel = static_cast<size_t>(c10::multiply_integers(sizes));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
                                                       numel * c10::elementSize(dtype), std::move(data),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  tensor.set_(at::Storage(std::move(storage)), 0, sizes);
  return tensor;
}

}  // namespace

DType engine_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::f32;
    case at::kDouble:
      return DType::f64;
    case at::kBFloat16:
      return DType::bf16;
    case at::kHalf:
      return DType::f16;
    default:
      return DType::byte;
  }
}

at::Tensor pool_memory(int64_t bytes, const at::TensorOptions& memory) {
  at::Tensor pool = at::empty({bytes}, memory.dtype(at::kByte));
  if (pool.is_cpu() && !memory.pinned_memory()) cpu::prefer_huge_pages(pool.data_ptr(), pool.nbytes());
  return pool;
}

at::Tensor typed(const at::Tensor& memory, DType type, size_t offset, size_t num_bytes) {
  const at::ScalarType dtype = torch_dtype(type);
  const size_t element = c10::elementSize(dtype);
  const size_t start = static_cast<size_t>(memory.storage_offset()) * memory.itemsize() + offset;
  if (offset + num_bytes > memory.nbytes() || start % element != 0) {
    throw Error("fsdp2x: " + std::to_string(num_bytes) + " bytes at " + std::to_string(offset) +
                " are not in a buffer of " + std::to_string(memory.nbytes()) +
                ", or not aligned for their dtype. This is a bug in fsdp2x.");
  }
  // Not narrow() and view(): their dispatch takes microseconds, several times per unit.
  const c10::DispatchKeySet keys(memory.options().computeDispatchKey());  // plain, also for memory of a user's subclass
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory.storage()), keys, c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  impl.set_storage_offset(static_cast<int64_t>(start / element));
  impl.set_sizes_contiguous({static_cast<int64_t>(num_bytes / element)});
  return tensor;
}

at::Tensor tensor_in_pool(const at::Tensor& pool, size_t offset, at::IntArrayRef sizes, at::ScalarType dtype) {
  return tensor_over(owning_pointer(pool, offset), sizes, dtype, pool.device());
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

at::Tensor tensor_without_memory(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return tensor_over(at::DataPtr(nullptr, device), sizes, dtype, device);
}

at::Tensor tensor_over_storage(const at::Storage& storage, const at::Tensor& memory) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  impl.set_nbytes(memory.nbytes());
  point_storage(impl, memory.data_ptr(), memory.device());
  at::Tensor tensor = at::empty({0}, memory.options());
  tensor.set_(storage, 0, memory.sizes());
  return tensor;
}

void point_storage(c10::StorageImpl& storage, void* data, at::Device device) {
  storage.set_data_ptr_noswap(at::DataPtr(data, device));
}

void point_storage_at_pool(c10::StorageImpl& storage, const at::Tensor& pool, size_t offset) {
  storage.set_data_ptr_noswap(owning_pointer(pool, offset));
}

const c10::StorageImpl* pool_of(c10::StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();  // the _no_checks variant, since it may be poisoned
  if (data.get_deleter() != &release_owner) return nullptr;
  return static_cast<c10::intrusive_ptr<c10::StorageImpl>*>(data.get_context())->get();
}

void redirect_storage(c10::StorageImpl& storage, void* data) {
  auto owner = storage.mutable_data_ptr().move_context();
  const auto release = owner.get_deleter();
  storage.set_data_ptr_noswap(at::DataPtr(data, owner.release(), release, storage.device()));
}

void detach_memory(const at::Tensor& tensor, const std::string& message) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void attach_to_pool(const at::Tensor& tensor, const at::Tensor& pool, size_t offset) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
  compat::clear_access_error(storage);
  point_storage_at_pool(storage, pool, offset);
}

void Poison::apply(c10::StorageImpl& storage, at::Device device) {
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, device));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message_));
}

void Poison::lift(c10::StorageImpl& storage) {
  message_ = std::move(storage.get_extra_meta().custom_data_ptr_error_msg_);
  compat::clear_access_error(storage);
}

}  // namespace fsdp2x
