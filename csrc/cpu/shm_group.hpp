// Shared memory between the ranks of one host: one sparse memfd, the windows mapped from it, and the gather and
// reduction protocols of csrc/README.md. Not thread-safe: one thread of a rank at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp2x::cpu {

struct ShmOptions {
  int rank = 0;
  int world = 1;
  // Name of the abstract unix socket, chosen at random by rank 0 and told to the others (no leading NUL).
  std::string socket_name;
  // 32 random bytes that a peer must show; told together with the name.
  std::string token;
  double timeout_s = 600.0;
  // Called every 50 ms of a long wait; may throw to end it (Ctrl-C).
  std::function<void()> on_wait;
};

// A gather slot seen twice: the engine writes `shared`, tensors look through `isolated`.
struct GatherWindow {
  std::byte* shared = nullptr;
  std::byte* isolated = nullptr;
};

// One gather as every rank must see it. `unit` is the unit's index in its root, the same on every rank;
// `name` is only for messages.
struct GatherPost {
  uint64_t sequence = 0;  // 1, 2, 3 ...
  uint32_t unit = 0;
  uint32_t slot = 0;
  uint64_t slot_offset = 0;
  uint64_t bytes = 0;
};

// later: a peer posts only after this rank has gone on, at the latest in its root callback.
enum class Joined { ready, later };

class ShmGroup {
 public:
  // Collective over the group's ranks: creates (rank 0) or receives the memfd, checks the peers, maps the control
  // area. Throws Error when a peer does not come within the timeout, has another user id or shows a wrong token.
  static std::unique_ptr<ShmGroup> create(const ShmOptions& options);
  ~ShmGroup();  // marks this rank closed, wakes the peers, unmaps everything
  ShmGroup(const ShmGroup&) = delete;
  ShmGroup& operator=(const ShmGroup&) = delete;

  int rank() const;
  int world() const;
  static size_t page_bytes();

  // Names for messages: unit index -> FQN. Grows the table as needed.
  void set_unit_name(uint32_t unit, const std::string& name);

  // Windows are mapped at the first call and kept; the same arguments give the same pointers.
  GatherWindow gather_window(uint64_t offset, size_t bytes);
  std::byte* scratch_window(int owner_rank, uint64_t offset, size_t bytes);
  size_t mapped_bytes() const;
  size_t num_windows() const;  // mapped so far; a steady step maps none

  // Gather, see the protocol. `num_uses` is the slot's use count, this one included.
  void acquire_slot(const GatherPost& post, uint64_t num_uses);  // waits until all ranks released the use before
  void post_gather(const GatherPost& post);
  void join_gather(const GatherPost& post);               // waits for all peers; throws when a peer's entry differs
  bool gather_is_complete(const GatherPost& post) const;  // does not wait
  void release_slot(uint32_t slot, uint64_t num_uses);

  // Reduction. `epoch` counts the reductions of this unit: 1, 2, 3 ...; `tag` is compared between ranks.
  void post_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t scratch_offset);
  // Waits as the protocol says. `position` is this unit's position in the backward order (larger = later). `flush`: in
  // the root callback, wait for every peer without exception.
  Joined join_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t position, bool flush);
  uint64_t peer_scratch_offset(uint32_t unit, int rank) const;
  void consume_reduction(uint32_t unit, uint64_t epoch);
  bool reduction_is_consumed(uint32_t unit, uint64_t epoch) const;  // by every rank; does not wait
  void wait_consumed(uint32_t unit, uint64_t epoch);
  // The same while that is sure to come: false as soon as a rank that has not consumed waits for this one, or is past
  // `position`, the position of that reduction, and will consume only in its flush.
  bool wait_consumed_in_order(uint32_t unit, uint64_t epoch, uint64_t position);
  // Monotone over the life of the group: a rank that published p never again posts a position < p before its next
  // flush. Publish UINT64_MAX-like values by begin_flush.
  void publish_progress(uint64_t position);

  // A plain barrier with the group's timeout, for tests and growth points.
  void barrier(const char* what);

 private:
  ShmGroup();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp2x::cpu
