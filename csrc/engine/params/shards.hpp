// This rank's shards of a group: their memory, and the storages of the tensors that view it.
//
//                rest                    open
//   IN POOL -----------------> RESTING --------> OPEN
//      ^                        |    ^            |
//      +-----------------------+    +------------+
//               leave                   close
//
// IN POOL: a separate pool of this rank, packed as Layout::shard_offset says. RESTING: rows of the full parameters in
// the slot that all ranks gather in (docs/engine/resting_shards.md). A write is visible only to this rank until the
// next gather. OPEN: the same rows, written where the peers will read them.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/layout.hpp"
#include "shm/shard_views.hpp"

namespace fsdp2x {

enum class ShardState : uint8_t { in_pool, resting, open };

// Every function that changes something needs the GIL.
class Shards {
 public:
  Shards(const Layout& layout, at::Tensor pool);

  ShardState state() const { return state_; }
  // Return the memory of the shards, a tensor of bytes, and their offsets. It is a pool, or a slot as this rank's
  // tensors see it.
  const at::Tensor& memory() const { return memory_; }
  size_t offset(size_t param) const { return offsets_[param]; }

  // Watches a sharded local tensor. Its storage lies in memory() until it gets other memory (share_memory_(), a queue
  // of torch.multiprocessing). Undefined: that shard does not lie there.
  void watch(size_t param, const at::Tensor& local);
  bool is_watched(size_t param) const { return storages_[param] != nullptr; }
  // Returns whether `local` is the watched tensor and still has the storage that it was watched with.
  bool is_watched(size_t param, const at::Tensor& local) const;
  // Returns where the shard is now, or null if it is not watched.
  const void* address(size_t param) const;
  // Copies the values of moved shards into memory(). The shards keep their new memory, because other processes see it.
  // If a storage has become too small, memory() keeps its old values.
  void fetch_moved();
  // Returns the first shard whose storage holds fewer bytes than the layout reads, usually none.
  std::optional<size_t> first_too_small() const;

  bool are_watched() const;  // whether all of them are
  // Returns whether they may change their address: only their parameters reference them. Any other holder, such as a
  // numpy array, may have stored an address.
  bool may_move() const;
  // IN POOL -> RESTING, unless they may not move. The slot that `slot` shows must already have their values. The pool
  // is freed with its last user.
  void rest(std::shared_ptr<cpu::ShardViews> slot);
  // RESTING -> OPEN. Publish what this rank has written to its view first.
  void open();
  // OPEN -> RESTING. Does nothing in the other states.
  void close();
  // Moves the shards to a new pool. Does nothing if they are IN POOL.
  void leave();
  // Called around a fork, see cpu::ShardViews. A child gets the shards as they are now.
  void begin_fork();
  void end_fork() const;

 private:
  std::byte* at(const std::byte* base, size_t param) const;
  bool is_too_small(size_t param) const;
  // Redirects storages that point into `from` to `to`, in the same memory().
  void redirect(std::byte* from, std::byte* to);
  void move_to(const at::Tensor& memory, std::vector<size_t> offsets);
  void set_state(ShardState from, ShardState to);

  const Layout& layout_;
  ShardState state_ = ShardState::in_pool;
  at::Tensor memory_;
  std::vector<size_t> offsets_;
  std::shared_ptr<cpu::ShardViews> slot_;  // null: in a pool
  // By parameter. Holding the TensorImpl does not change the number of holders of its storage.
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> locals_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace fsdp2x
