// The gather and reduction protocols of docs/engine/shared_memory.md on the records of shm_map.hpp: what the ranks of a
// group tell each other through shared memory while they train. Not thread-safe: one thread of a rank at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "core/forward_counts.hpp"
#include "shm/process_guard.hpp"
#include "shm/shm_options.hpp"

namespace fsdp2x::cpu {

class ShmMap;

// One gather as every rank must see it. `unit` is the unit's index in its root, the same on every rank;
// `name` is only for messages.
struct GatherPost {
  uint64_t sequence = 0;  // 1, 2, 3 ...
  uint32_t unit = 0;
  uint32_t slot = 0;
  uint64_t slot_offset = 0;
  uint64_t bytes = 0;
  uint64_t settings = 0;  // packed UnitSettings, when it was posted
};

// later: a peer posts only after this rank has gone on, at the latest in its root callback.
enum class Joined { ready, later };

// Every method throws Error in a forked child, and every wait throws when a peer is dead, closed, has failed or left
// the pass, and after the group's timeout.
class ShmProtocol {
 public:
  // `control` is the control area of `map`, zero when the first rank comes. It outlives the protocol.
  ShmProtocol(const ShmOptions& options, const ShmMap& map, std::byte* control);
  ~ShmProtocol();
  ShmProtocol(const ShmProtocol&) = delete;
  ShmProtocol& operator=(const ShmProtocol&) = delete;

  bool is_here() const { return guard_.is_here(); }  // and not in a forked child
  int rank() const;
  int world() const;
  std::string rank_name() const;  // for messages

  // Opens the peers' processes by the pids in the control area: a dead one ends a wait at once.
  void watch_peers();
  // This rank leaves: who waits for it is told.
  void close();
  // This rank cannot go on, for the reason `text`: every wait of every rank ends with that sentence.
  void fail(const std::string& text);

  // Passes: what a root runs between two points where its ranks may part. Forwards and backwards are numbered from 1.
  // A rank that raises in one says so by leave(), and waits of the ranks that are in the same pass end with the
  // sentence `why`; it may then begin the next pass with all of them. `is_alone`: the backward is of the last forward
  // only, so that who has left that forward does not come to this backward either.
  void enter_forward(uint64_t number);
  void enter_backward(uint64_t number, bool is_alone);
  void end_pass();
  void leave(std::string_view why) noexcept;

  // Names for messages: unit index -> FQN. Grows the table as needed.
  void set_unit_name(uint32_t unit, const std::string& name);

  // Gather, see the protocol. `num_uses` is the slot's use count, this one included.
  void acquire_slot(const GatherPost& post, uint64_t num_uses);  // waits until all ranks released the use before
  void post_gather(const GatherPost& post);
  void join_gather(const GatherPost& post);               // waits for all peers; throws when a peer's entry differs
  bool gather_is_complete(const GatherPost& post) const;  // does not wait
  void release_slot(uint32_t slot, uint64_t num_uses);
  bool slot_is_released(uint32_t slot, uint64_t num_uses) const;  // that use, by every rank; does not wait

  // Reduction. `epoch` counts the reductions of this unit: 1, 2, 3 ...; `tag` is compared between ranks, and
  // so are `forwards`: a rank that failed alone and began another forward is a step ahead. Who failed alone and left
  // out the batch together with all ranks is not, nor who runs more forwards than others and never failed.
  void post_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t scratch_offset,
                      ForwardCounts forwards = {});
  // Waits as the protocol says. `position` is this unit's position in the backward order (larger = later). `flush`: in
  // the root callback, wait for every peer without exception.
  Joined join_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t position, bool flush);
  // At the end of a backward that has not reduced this unit and will not: peers that wait for it raise.
  void skip_reduction(uint32_t unit);
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

 protected:
  void require_own_process() const { guard_.require("use memory that it shares with other ranks"); }

 private:
  struct Impl;
  ProcessGuard guard_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp2x::cpu
