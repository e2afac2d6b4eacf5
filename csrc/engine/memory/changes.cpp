// Ranges are searched by one thread each and joined in their order.
#include "engine/memory/changes.hpp"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "core/error.hpp"
#include "cpu/changes.hpp"
#include "engine/torch/parallel.hpp"

namespace fsdp2x {

namespace {

constexpr int64_t kBlockNumel = 1 << 15;

}  // namespace

std::optional<std::pair<at::Tensor, at::Tensor>> find_changes(const at::Tensor& now, const at::Tensor& held,
                                                              int64_t max) {
  if (!now.is_cpu() || !held.is_cpu() || !now.is_contiguous() || !held.is_contiguous() || now.dim() != 1 ||
      held.dim() != 1 || now.numel() != held.numel()) {
    throw Error("fsdp2x: find_changes takes two flat, dense tensors of one size on the CPU");
  }
  const bool is_cast = now.scalar_type() != held.scalar_type();
  const auto* const before = static_cast<const std::byte*>(held.const_data_ptr());
  std::map<int64_t, cpu::Changes> found;  // by where the range begins
  std::mutex mutex;
  std::atomic<int64_t> total{0};
  run_parallel(held.numel(), kGrainNumel, [&](int64_t begin, int64_t end) {
    cpu::Changes mine;
    // By torch, whose NaNs are those of a push of everything, into memory that stays in the cache.
    const at::Tensor block = is_cast ? at::empty({std::min(end - begin, kBlockNumel)}, held.options()) : at::Tensor();
    for (int64_t i = begin; i < end && !mine.has_more; i += kBlockNumel) {
      const int64_t numel = std::min(end - i, kBlockNumel);
      at::Tensor values = now.narrow(0, i, numel);
      if (is_cast) values = block.narrow(0, 0, numel).copy_(values);
      cpu::find_changes(before + static_cast<size_t>(i) * held.itemsize(), values.const_data_ptr(), held.itemsize(), i,
                        numel, max, mine);
    }
    total += mine.has_more ? max + 1 : static_cast<int64_t>(mine.positions.size());
    const std::lock_guard lock(mutex);
    found.emplace(begin, std::move(mine));
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

}  // namespace fsdp2x
