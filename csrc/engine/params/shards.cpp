// Shards: watched, and moved between a pool and the slot.
#include "engine/params/shards.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "engine/memory/storage.hpp"

namespace fsdp2x {

namespace {

// Holders of the storage of an unshared shard: the local tensor, `ShardedParam.storage` in Python, and this object.
// tests/dist/engine/test_resting_shards.py guards the number.
constexpr size_t kNumHolders = 3;

const char* to_string(ShardState state) {
  static constexpr std::array kNames = {"IN POOL", "RESTING", "OPEN"};
  return kNames.at(static_cast<size_t>(state));
}

size_t shard_bytes(const ParamPlace& place) {
  return static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig);
}

std::vector<size_t> offsets_in_pool(const Layout& layout) {
  std::vector<size_t> offsets;
  for (const ParamPlace& place : layout.params()) offsets.push_back(place.shard_offset);
  return offsets;
}

std::byte* begin_of(const at::Tensor& memory) { return static_cast<std::byte*>(memory.data_ptr()); }

}  // namespace

Shards::Shards(const Layout& layout, at::Tensor pool)
    : layout_(layout),
      memory_(std::move(pool)),
      offsets_(offsets_in_pool(layout)),
      locals_(layout.params().size()),
      storages_(layout.params().size()) {
  if (memory_.scalar_type() != at::kByte || !memory_.is_contiguous() || memory_.nbytes() < layout.shard_pool_bytes()) {
    throw Error("fsdp2x: a pool of " + std::to_string(memory_.nbytes()) + " bytes cannot hold shards of " +
                std::to_string(layout.shard_pool_bytes()) + " bytes");
  }
}

void Shards::watch(size_t param, const at::Tensor& local) {
  locals_.at(param) = local.defined() ? local.getIntrusivePtr() : nullptr;
  storages_.at(param) = local.defined() ? local.storage().getWeakStorageImpl().lock() : nullptr;
}

bool Shards::is_watched(size_t param, const at::Tensor& local) const {
  return local.unsafeGetTensorImpl() == locals_[param].get() &&
         local.storage().unsafeGetStorageImpl() == storages_[param].get();
}

const void* Shards::address(size_t param) const {
  return storages_[param] == nullptr ? nullptr : storages_[param]->data();
}

std::byte* Shards::at(const std::byte* base, size_t param) const {
  return const_cast<std::byte*>(base) + offsets_[param];
}

void Shards::fetch_moved() {
  if (!memory_.is_cpu()) return;  // only CPU memory can be shared this way
  for (size_t i = 0; i < storages_.size(); ++i) {
    const ParamPlace& place = layout_.params()[i];
    if (storages_[i] == nullptr || place.shard_numel == 0) continue;
    std::byte* const expected = at(begin_of(memory_), i);
    if (address(i) != expected && !is_too_small(i)) std::memcpy(expected, address(i), shard_bytes(place));
  }
}

bool Shards::is_too_small(size_t param) const {
  const size_t bytes = shard_bytes(layout_.params()[param]);
  return storages_[param] != nullptr && bytes > 0 && (storages_[param]->nbytes() < bytes || address(param) == nullptr);
}

std::optional<size_t> Shards::first_too_small() const {
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (is_too_small(i)) return i;
  }
  return std::nullopt;
}

bool Shards::are_watched() const {
  return std::all_of(storages_.begin(), storages_.end(), [](const auto& storage) { return storage != nullptr; });
}

bool Shards::may_move() const {
  return are_watched() && std::all_of(storages_.begin(), storages_.end(),
                                      [](const auto& storage) { return storage.use_count() <= kNumHolders; });
}

void Shards::rest(std::shared_ptr<cpu::ShardViews> slot) {
  if (!may_move()) return;
  set_state(ShardState::in_pool, ShardState::resting);
  slot_ = std::move(slot);
  const auto forget = [keeps = slot_](void*) {};
  move_to(at::from_blob(slot_->isolated(), {static_cast<int64_t>(slot_->bytes())}, forget, at::kByte),
          layout_.offsets_in_slot());
}

void Shards::open() {
  set_state(ShardState::resting, ShardState::open);
  redirect(begin_of(memory_), slot_->shared());
}

void Shards::close() {
  if (state_ != ShardState::open) return;
  set_state(ShardState::open, ShardState::resting);
  redirect(slot_->shared(), begin_of(memory_));
}

void Shards::begin_fork() {
  close();
  if (slot_ == nullptr || slot_->keep_for_child()) return;
  throw Error(
      "fsdp2x: the system refused to pass shards to a forked child (madvise). Start children by 'spawn' instead.");
}

void Shards::end_fork() const {
  if (slot_ != nullptr) slot_->end_fork();
}

void Shards::leave() {
  close();
  if (state_ == ShardState::in_pool) return;
  fetch_moved();
  const size_t num_bytes = std::max<size_t>(layout_.shard_pool_bytes(), 1);
  const at::Tensor pool = pool_memory(static_cast<int64_t>(num_bytes), at::TensorOptions()).zero_();
  for (size_t i = 0; i < storages_.size(); ++i) {
    const ParamPlace& place = layout_.params()[i];
    if (place.shard_numel == 0) continue;
    std::memcpy(begin_of(pool) + place.shard_offset, at(begin_of(memory_), i), shard_bytes(place));
  }
  set_state(ShardState::resting, ShardState::in_pool);
  move_to(pool, offsets_in_pool(layout_));
  slot_ = nullptr;
}

void Shards::move_to(const at::Tensor& memory, std::vector<size_t> offsets) {
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (address(i) == at(begin_of(memory_), i)) point_storage_at_pool(*storages_[i], memory, offsets[i]);
  }
  memory_ = memory;
  offsets_ = std::move(offsets);
}

void Shards::redirect(std::byte* from, std::byte* to) {
  for (size_t i = 0; i < storages_.size(); ++i) {
    if (address(i) == at(from, i)) redirect_storage(*storages_[i], at(to, i));
  }
}

void Shards::set_state(ShardState from, ShardState to) {
  if (state_ != from) {
    throw Error(std::string("fsdp2x: shards cannot become ") + to_string(to) + ". Expected " + to_string(from) +
                ", got " + to_string(state_));
  }
  state_ = to;
}

}  // namespace fsdp2x
