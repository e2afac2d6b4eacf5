// The gather and reduction protocols of docs/engine/shared_memory.md on the records of shm_map.hpp: the communication
// of a group's ranks through shared memory during training. Not thread-safe: one thread of a rank at a time.
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

// One gather as every rank must see it. `unit` is the unit's index in its root, the same on every rank. `name` is only
// for messages.
struct GatherPost {
  uint64_t sequence = 0;  // 1, 2, 3 ...
  uint32_t unit = 0;
  uint32_t slot = 0;
  uint64_t slot_offset = 0;
  uint64_t bytes = 0;
  uint64_t settings = 0;  // packed UnitSettings, when it was posted
};

// later: a peer posts only after this rank has continued, at the latest in its root callback.
enum class Joined { ready, later };

// Every method throws Error in a forked child. Every wait throws if a peer is dead, closed, has failed or left the
// pass, and after the group's timeout.
class ShmProtocol {
 public:
  // `control` is the control area of `map`, zero when the first rank comes. It must outlive the protocol.
  ShmProtocol(const ShmOptions& options, const ShmMap& map, std::byte* control);
  ~ShmProtocol();
  ShmProtocol(const ShmProtocol&) = delete;
  ShmProtocol& operator=(const ShmProtocol&) = delete;

  bool is_here() const { return guard_.is_here(); }  // and not in a forked child
  int rank() const;
  int world() const;
  std::string rank_name() const;  // for messages

  // Opens the peers' processes by the pids in the control area. A dead one then ends a wait immediately.
  void watch_peers();
  // Marks this rank as gone and wakes the peers that wait for it.
  void close();
  // Ends every wait of every rank with the message `text`, because this rank cannot continue.
  void fail(const std::string& text);

  // Passes are the parts of a training step between two points where the ranks of a root may diverge. Forwards and
  // backwards are numbered from 1. A rank that raises in a pass calls leave(). Waits of ranks in the same pass then end
  // with the message `why`. It may then begin the next pass with all of them. `is_alone`: the backward is of the last
  // forward only, so a rank that has left that forward does not come to this backward either.
  void enter_forward(uint64_t number);
  void enter_backward(uint64_t number, bool is_alone);
  void end_pass();
  void leave(std::string_view why) noexcept;

  // Sets names for messages: unit index -> FQN. Grows the table as needed.
  void set_unit_name(uint32_t unit, const std::string& name);

  // Gather, see the protocol. `num_uses` is the slot's use count, this one included.
  void acquire_slot(const GatherPost& post, uint64_t num_uses);  // waits until all ranks released the use before
  void post_gather(const GatherPost& post);
  void join_gather(const GatherPost& post);               // waits for all peers, throws if a peer's entry differs
  bool gather_is_complete(const GatherPost& post) const;  // does not wait
  void release_slot(uint32_t slot, uint64_t num_uses);
  bool slot_is_released(uint32_t slot, uint64_t num_uses) const;  // that use, by every rank, does not wait

  // Reduction. `epoch` counts the reductions of this unit: 1, 2, 3 ... Ranks compare `tag` and `forwards`. A rank that
  // failed alone and began another forward is a step ahead, which raises. It does not raise if all ranks left out that
  // batch, or if ranks that never failed run different numbers of forwards.
  void post_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t scratch_offset,
                      ForwardCounts forwards = {});
  // Waits as the protocol says. `position` is this unit's position in the backward order (larger = later). `flush`:
  // called in the root callback, waits for every peer without exception.
  Joined join_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t position, bool flush);
  // Called at the end of a backward that has not reduced this unit and will not. Peers that wait for it raise.
  void skip_reduction(uint32_t unit);
  uint64_t peer_scratch_offset(uint32_t unit, int rank) const;
  void consume_reduction(uint32_t unit, uint64_t epoch);
  bool reduction_is_consumed(uint32_t unit, uint64_t epoch) const;  // by every rank, does not wait
  void wait_consumed(uint32_t unit, uint64_t epoch);
  // Waits for the same as long as it is sure to come. Returns false as soon as a rank that has not consumed waits for
  // this one, or is past `position`, the position of that reduction, and will consume only in its flush.
  bool wait_consumed_in_order(uint32_t unit, uint64_t epoch, uint64_t position);
  // Publishes progress, which is monotone over the life of the group. A rank that published p never again posts a
  // position < p before its next flush. begin_flush publishes values like UINT64_MAX.
  void publish_progress(uint64_t position);

 protected:
  void require_own_process() const { guard_.require("use memory that it shares with other ranks"); }

 private:
  struct Impl;
  ProcessGuard guard_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp2x::cpu
