// On the CPU, one thread searches each range, and ranges are joined in their order. On a device, torch adds up the
// counts of tiles between two kernels.
#include "engine/memory/changes.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <mutex>

#include "core/error.hpp"
#include "engine/memory/device_kernels.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/changes.hpp"

namespace fsdp2x {

namespace {

constexpr int64_t kBlockNumel = 1 << 15;

using Found = std::optional<std::pair<at::Tensor, at::Tensor>>;

Found take_on_device(const at::Tensor& now, const at::Tensor& held, int64_t max, const cuda::Kernels& kernels) {
  const DeviceScope scope(held.device());
  const at::Tensor values = now.to(held.scalar_type());  // cast by torch, as on the CPU
  cuda::ChangesArgs args;
  args.now = values.const_data_ptr();
  args.held = held.mutable_data_ptr();
  args.numel = held.numel();
  args.element_bytes = static_cast<int>(held.itemsize());
  args.element_shift = std::countr_zero(static_cast<unsigned>(args.element_bytes));
  const at::Tensor masks = at::empty({args.num_masks()}, held.options().dtype(at::kShort));
  const at::Tensor counts = at::empty({args.num_tiles()}, held.options().dtype(at::kLong));
  args.masks = reinterpret_cast<uint16_t*>(masks.mutable_data_ptr<int16_t>());
  args.tile_counts = counts.mutable_data_ptr<int64_t>();
  kernels.mark_changes(args, scope.stream());
  const at::Tensor ends = counts.cumsum(0);
  const int64_t total = args.numel == 0 ? 0 : ends[-1].item<int64_t>();
  if (total > max) return std::nullopt;
  at::Tensor positions = at::empty({total}, held.options().dtype(at::kLong));
  at::Tensor changed = at::empty({total}, held.options());
  if (total == 0) return std::pair(std::move(positions), std::move(changed));
  args.tile_ends = ends.const_data_ptr<int64_t>();
  args.positions = positions.mutable_data_ptr<int64_t>();
  args.values = changed.mutable_data_ptr();
  kernels.list_changes(args, scope.stream());
  return std::pair(std::move(positions), std::move(changed));
}

Found take_on_cpu(const at::Tensor& now, const at::Tensor& held, int64_t max) {
  const bool is_cast = now.scalar_type() != held.scalar_type();
  auto* const before = static_cast<std::byte*>(held.mutable_data_ptr());
  std::map<int64_t, cpu::Changes> found;  // by where the range begins
  std::mutex mutex;
  std::atomic<int64_t> total{0};
  run_parallel(held.numel(), kGrainNumel, [&](int64_t begin, int64_t end) {
    cpu::Changes part;
    // torch casts, so that NaNs have the same bits as in a full push. The block stays in the cache.
    const at::Tensor block = is_cast ? at::empty({std::min(end - begin, kBlockNumel)}, held.options()) : at::Tensor();
    for (int64_t i = begin; i < end && !part.has_more; i += kBlockNumel) {
      const int64_t numel = std::min(end - i, kBlockNumel);
      at::Tensor values = now.narrow(0, i, numel);
      if (is_cast) values = block.narrow(0, 0, numel).copy_(values);
      cpu::take_changes(before + static_cast<size_t>(i) * held.itemsize(), values.const_data_ptr(), held.itemsize(), i,
                        numel, max, part);
    }
    total += part.has_more ? max + 1 : static_cast<int64_t>(part.positions.size());
    const std::lock_guard lock(mutex);
    found.emplace(begin, std::move(part));
  });
  if (total > max) return std::nullopt;
  at::Tensor positions = at::empty({total}, at::kLong);
  at::Tensor changed = at::empty({total}, held.options());
  auto* position = positions.mutable_data_ptr<int64_t>();
  auto* value = static_cast<std::byte*>(changed.mutable_data_ptr());
  for (const auto& [begin, range] : found) {
    position = std::copy(range.positions.begin(), range.positions.end(), position);
    value = std::copy(range.values.begin(), range.values.end(), value);
  }
  return std::pair(std::move(positions), std::move(changed));
}

}  // namespace

Found take_changes(const at::Tensor& now, const at::Tensor& held, int64_t max, const cuda::Kernels* kernels) {
  if (now.device() != held.device() || !(kernels != nullptr || held.is_cpu()) || !now.is_contiguous() ||
      !held.is_contiguous() || now.dim() != 1 || held.dim() != 1 || now.numel() != held.numel()) {
    throw Error(
        "fsdp2x: take_changes: expected two flat, dense tensors of one size, on the CPU or on a device with kernels");
  }
  return kernels == nullptr ? take_on_cpu(now, held, max) : take_on_device(now, held, max, *kernels);
}

}  // namespace fsdp2x
