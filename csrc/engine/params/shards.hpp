// This rank's shards of a group: the memory they lie in, and the storages of the tensors that look at it.
//
//                rest                    open
//   IN POOL -----------------> RESTING --------> OPEN
//      ^                        |    ^            |
//      +-----------------------+    +------------+
//               leave                   close
//
// IN POOL: a pool of this rank's own, packed as Layout::shard_offset says. RESTING: rows of the whole parameters, in
// the slot that all ranks gather in (docs/engine/resting_shards.md); what is written stays with this rank until the
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
  // What the shards lie in, a tensor of bytes, and where: a pool, or a slot as this rank's tensors see it.
  const at::Tensor& memory() const { return memory_; }
  size_t offset(size_t param) const { return offsets_[param]; }

  // A sharded local tensor, whose storage lies in memory() until somebody gives it other memory (share_memory_(), a
  // queue of torch.multiprocessing). Undefined: that shard does not lie there.
  void watch(size_t param, const at::Tensor& local);
  bool is_watched(size_t param) const { return storages_[param] != nullptr; }
  // Whether `local` is the watched tensor and still has the storage that it was watched with.
  bool is_watched(size_t param, const at::Tensor& local) const;
  // Where the shard is now; null: it is not watched.
  const void* address(size_t param) const;
  // Shards that have other memory stay there, for other processes see it: their values are copied into memory(). Those
  // whose storage has become too small keep the values that memory() has.
  void fetch_moved();
  // The first shard whose storage holds fewer bytes than the layout reads; none in general.
  std::optional<size_t> first_too_small() const;

  bool are_watched() const;  // all of them
  // Whether they may change their address: only their parameters hold them. Whoever else does may know an address, as
  // numpy's arrays do.
  bool may_move() const;
  // IN POOL -> RESTING, unless they may not move: the slot that `slot` shows has their values already. The pool goes
  // with its last user.
  void rest(std::shared_ptr<cpu::ShardViews> slot);
  // RESTING -> OPEN. What this rank has written to its view must have been published.
  void open();
  // OPEN -> RESTING; else nothing.
  void close();
  // -> IN POOL, a new one; else nothing.
  void leave();
  // Around a fork, see cpu::ShardViews: a child has the shards as they are now.
  void begin_fork();
  void end_fork() const;

 private:
  std::byte* at(const std::byte* base, size_t param) const;
  bool is_too_small(size_t param) const;
  // Storages that look at `from` look at `to`, in the same memory().
  void redirect(std::byte* from, std::byte* to);
  void move_to(const at::Tensor& memory, std::vector<size_t> offsets);
  void set_state(ShardState from, ShardState to);

  const Layout& layout_;
  ShardState state_ = ShardState::in_pool;
  at::Tensor memory_;
  std::vector<size_t> offsets_;
  std::shared_ptr<cpu::ShardViews> slot_;  // null: in a pool
  // By parameter; holding the tensor leaves the number of holders of its storage as it is.
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> locals_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace fsdp2x
