// The gather and reduction protocols of docs/engine/shared_memory.md on the records of shm_map.hpp.
#include "shm/shm_protocol.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/unit_settings.hpp"
#include "shm/shm_map.hpp"
#include "shm/shm_peers.hpp"

namespace fsdp2x::cpu {
namespace {

// Shows the peers, while it lives, the event that this rank waits for.
class Wish {
 public:
  Wish(Word& word, uint64_t value, const Peers& peers) : word_(word) {
    word_.store(value, std::memory_order_release);
    peers.ring();
  }
  ~Wish() { word_.store(0, std::memory_order_release); }
  Wish(const Wish&) = delete;
  Wish& operator=(const Wish&) = delete;

 private:
  Word& word_;
};

}  // namespace

struct ShmProtocol::Impl {
  Impl(const ShmOptions& given, const ShmMap& given_map, std::byte* given_control)
      : options(given),
        map(given_map),
        control(given_control),
        peers(options, map, control, [this](int rank) { return where(rank); }) {
    options.exchange = nullptr;  // the caller owns it, for the setup
  }

  ShmOptions options;
  ShmMap map;
  std::byte* control;
  Peers peers;
  std::vector<std::string> unit_names;
  uint64_t pass = 0;     // the running pass, as in RankState::left, 0: none
  uint64_t forward = 0;  // the last forward, likewise

  RankState& state(int rank) const { return map.state(control, rank); }
  RankState& own() const { return state(options.rank); }

  UnitRecord& record(uint32_t unit, int rank) const {
    if (unit >= kMaxUnits) {
      throw Error("shared memory: unit " + std::to_string(unit) + " is beyond the " + std::to_string(kMaxUnits) +
                  " that a group holds. Shard fewer modules.");
    }
    return map.unit(control, rank, unit);
  }
  Word& released(uint32_t slot, int rank) const {
    if (slot >= kMaxSlots) {
      throw Error("shared memory: slot " + std::to_string(slot) + " is beyond the " + std::to_string(kMaxSlots) +
                  " that a group holds. Reshard units after use.");
    }
    return map.released(control, rank, slot);
  }

  void enter(uint64_t new_pass, uint64_t of_forward) {
    pass = new_pass;
    peers.set_passes(pass, of_forward);
    if (own().left.load(std::memory_order_relaxed) != 0) own().left.store(0, std::memory_order_release);
  }

  // Returns whether `rank` cannot continue before this rank does.
  bool waits_for_me(int rank) const {
    if (state(rank).wanted_gather.load(std::memory_order_acquire) > own().num_posted.load()) return true;
    const uint64_t slot = state(rank).wanted_slot.load(std::memory_order_acquire);
    if (slot != 0 && released(wished_index(slot), options.rank).load() + 1 < wished_count(slot)) return true;
    const uint64_t reduction = state(rank).wanted_reduction.load(std::memory_order_acquire);
    if (reduction != 0 && record(wished_index(reduction), options.rank).posted.load() < wished_count(reduction)) {
      return true;
    }
    const uint64_t end = state(rank).wanted_end.load(std::memory_order_acquire);
    return end != 0 && record(wished_index(end), options.rank).consumed.load() < wished_count(end);
  }

  // Returns whether done(rank) holds for `rank`, at `position` of the backward order. A peer first acts, then publishes
  // its progress or its wishes. So these are read before the last check of the action. If units run in different order,
  // a peer may wait for this rank's next gather before it comes.
  template <class Done>
  Seen see(int rank, uint64_t position, const Done& done) const {
    if (done(rank)) return Seen::done;
    const bool elsewhere = state(rank).progress.load(std::memory_order_acquire) > position || waits_for_me(rank);
    if (done(rank)) return Seen::done;
    return elsewhere ? Seen::elsewhere : Seen::late;
  }

  std::string unit_text(uint64_t unit) const {
    if (unit < unit_names.size() && !unit_names[unit].empty()) return "unit '" + unit_names[unit] + "'";
    return "unit " + std::to_string(unit);
  }
  std::string gather_text(uint64_t sequence, uint64_t unit) const {
    return "all-gather #" + std::to_string(sequence) + " of " + unit_text(unit);
  }
  std::string gather_text(const GatherPost& post) const { return gather_text(post.sequence, post.unit); }
  std::string place_text(const GatherPost& post) const {
    return gather_text(post) + " (slot " + std::to_string(post.slot) + " at " + std::to_string(post.slot_offset) +
           ", " + std::to_string(post.bytes) + " bytes)";
  }
  std::string reduction_text(uint32_t unit, uint64_t epoch) const {
    return "reduction #" + std::to_string(epoch) + " of " + unit_text(unit);
  }
  std::string where(int rank) const {
    const uint64_t sequence = state(rank).num_posted.load(std::memory_order_acquire);
    if (sequence == 0) return "has not begun any all-gather yet";
    const uint64_t unit = packed_unit(map.entry(control, rank, sequence).unit_and_slot.load(std::memory_order_relaxed));
    return "began " + gather_text(sequence, unit) + " last";
  }

  // Returns the entry that `rank` posted for `sequence`. Its num_posted must have reached it.
  GatherPost entry_of(int rank, uint64_t sequence) const {
    const RingEntry& entry = map.entry(control, rank, sequence);
    GatherPost post;
    const uint64_t before = entry.sequence.load(std::memory_order_acquire);
    post.sequence = sequence;
    const uint64_t unit_and_slot = entry.unit_and_slot.load(std::memory_order_relaxed);
    post.unit = packed_unit(unit_and_slot);
    post.slot = packed_slot(unit_and_slot);
    post.settings = entry.settings.load(std::memory_order_relaxed);
    post.slot_offset = entry.slot_offset.load(std::memory_order_relaxed);
    post.bytes = entry.bytes.load(std::memory_order_relaxed);
    fence(std::memory_order_acquire);
    const uint64_t after = entry.sequence.load(std::memory_order_relaxed);
    if (before != sequence || after != sequence) {
      throw Error("shared memory: " + options.name(rank) + " skipped all-gather #" + std::to_string(sequence) +
                  " or is more than " + std::to_string(kRingEntries) + " ahead of " + options.name(options.rank) +
                  ". It " + where(rank) + ". After an exception, every rank must call `reset_iter_state`.");
    }
    return post;
  }

  void compare_forwards(uint32_t unit, uint64_t epoch, int rank) const {
    const ForwardCounts own_counts = forwards_of(unit, options.rank), theirs = forwards_of(unit, rank);
    if (own_counts.num_raised == theirs.num_raised || own_counts.num_begun == theirs.num_begun) return;
    const auto text = [this](int who, const ForwardCounts& forwards) {
      return options.name(who) + " began " + std::to_string(forwards.num_begun) + " forwards, of which " +
             std::to_string(forwards.num_raised) + " raised";
    };
    throw Error(
        "shared memory: at " + reduction_text(unit, epoch) + ", " + text(options.rank, own_counts) + "; " +
        text(rank, theirs) +
        ". Their gradients belong to different steps. If a forward raises on one rank, all ranks must skip that "
        "batch (all-reduce a flag before backward) or restart from a checkpoint.");
  }
  ForwardCounts forwards_of(uint32_t unit, int rank) const {
    const UnitRecord& own = record(unit, rank);
    return {own.num_begun.load(std::memory_order_relaxed), own.num_raised.load(std::memory_order_relaxed)};
  }

  [[noreturn]] void fail_mismatch(const GatherPost& own_post, int rank, const GatherPost& theirs) const {
    std::string text = "shared memory: rank " + std::to_string(options.rank) + " is in " + place_text(own_post) +
                       ", rank " + std::to_string(rank) + " in " + place_text(theirs) + ": ";
    if (own_post.unit != theirs.unit) {
      text += "the ranks ran their units in different order. Every rank must run the same modules in the same order.";
    } else {
      text +=
          "the ranks gather the same unit into different places. They must have the same parameters, dtypes, and "
          "history of unshard() and reshard() calls.";
    }
    throw Error(text);
  }
  [[noreturn]] void fail_settings(const GatherPost& post, uint64_t own_settings, int rank, uint64_t theirs) const {
    throw Error("shared memory: " + options.name(options.rank) + " and " + options.name(rank) +
                " have different settings at " + gather_text(post) + ": " +
                difference(UnitSettings::unpacked(own_settings), UnitSettings::unpacked(theirs)) +
                ". Use the same settings on every rank.");
  }
  // Returns whether the peer continues without this reduction while this rank ends its backward. Either the peer waits
  // for this rank's next gather, or it has ended more backwards without this reduction than this rank has.
  bool goes_on_without(uint32_t unit, int rank) const {
    return state(rank).wanted_gather.load(std::memory_order_acquire) > own().num_posted.load() ||
           record(unit, rank).num_skipped.load(std::memory_order_acquire) >
               record(unit, options.rank).num_skipped.load(std::memory_order_relaxed);
  }
  [[noreturn]] void fail_without_reduction(uint32_t unit, uint64_t epoch, int rank) const {
    const std::string who = options.name(rank);
    throw Error("shared memory: " + who + " continues without " + reduction_text(unit, epoch) + ", for which " +
                options.name(options.rank) + " waits. It " + where(rank) +
                ". Run the same modules, forwards, and backwards on every rank, with the same gradient synchronization "
                "(set_requires_gradient_sync, accumulate).");
  }
};

ShmProtocol::ShmProtocol(const ShmOptions& options, const ShmMap& map, std::byte* control)
    : impl_(std::make_unique<Impl>(options, map, control)) {}

ShmProtocol::~ShmProtocol() = default;

int ShmProtocol::rank() const { return impl_->options.rank; }
int ShmProtocol::world() const { return impl_->options.world; }
std::string ShmProtocol::rank_name() const { return impl_->options.name(rank()); }

void ShmProtocol::watch_peers() { impl_->peers.watch(); }

void ShmProtocol::close() {
  // A forked child inherits the group but is not the rank. Its end must not look like the rank's.
  if (!guard_.is_here()) return;
  impl_->own().closed.store(1, std::memory_order_release);
  impl_->peers.ring();
}

void ShmProtocol::fail(const std::string& text) {
  if (!guard_.is_here() || impl_->own().failed.load(std::memory_order_relaxed) != 0) return;
  const size_t bytes = std::min(text.size(), kSentenceBytes);
  std::memcpy(impl_->map.failure(impl_->control, impl_->options.rank), text.data(), bytes);
  impl_->own().failed.store(bytes, std::memory_order_release);
  impl_->peers.ring();
}

void ShmProtocol::enter_forward(uint64_t number) {
  if (!guard_.is_here()) return;
  Impl& impl = *impl_;
  const uint64_t num_posted = impl.own().num_posted.load(std::memory_order_relaxed);
  // Ranks may run different numbers of forwards while nothing is to be gathered.
  impl.forward = ((num_posted << 20 | (number & 0xfffff)) << 1) | 1;
  impl.enter(impl.forward, 0);
}

void ShmProtocol::enter_backward(uint64_t number, bool is_alone) {
  if (guard_.is_here()) impl_->enter(number << 1, is_alone ? impl_->forward : 0);
}

void ShmProtocol::end_pass() {
  impl_->pass = 0;
  impl_->peers.set_passes(0, 0);
}

void ShmProtocol::leave(std::string_view why) noexcept {
  Impl& impl = *impl_;
  if (!guard_.is_here() || impl.pass == 0) return;
  RankState& own = impl.own();
  const std::string_view text = impl.peers.followed().empty() ? why : impl.peers.followed();
  const size_t bytes = std::min(text.size(), kSentenceBytes);
  std::memcpy(impl.map.departure(impl.control, impl.options.rank), text.data(), bytes);
  own.left_bytes.store(bytes, std::memory_order_relaxed);
  own.left.store(impl.pass, std::memory_order_release);
  impl.peers.ring();
  impl.peers.note_left(impl.pass);
  end_pass();
}

void ShmProtocol::set_unit_name(uint32_t unit, const std::string& name) {
  impl_->record(unit, 0);  // throws for an index beyond the table
  if (impl_->unit_names.size() <= unit) impl_->unit_names.resize(size_t{unit} + 1);
  impl_->unit_names[unit] = name;
}

void ShmProtocol::acquire_slot(const GatherPost& post, uint64_t num_uses) {
  require_own_process();
  Impl& impl = *impl_;
  const auto is_released = [&](int rank) {
    return impl.released(post.slot, rank).load(std::memory_order_acquire) + 1 >= num_uses;
  };
  if (impl.peers.see_all(is_released) == Seen::done) return;
  const Wish wish(impl.own().wanted_slot, make_wish(post.slot, num_uses), impl.peers);
  impl.peers.wait(is_released, [&] {
    return "the release of slot " + std::to_string(post.slot) + " for " + impl.gather_text(post);
  });
}

void ShmProtocol::post_gather(const GatherPost& post) {
  require_own_process();
  Impl& impl = *impl_;
  impl.record(post.unit, 0);
  // Every peer that has come so far has read the entry that this post overwrites, see kRingEntries.
  impl.peers.wait(
      [&](int rank) {
        return impl.state(rank).num_posted.load(std::memory_order_acquire) + kRingEntries / 2 >= post.sequence;
      },
      [&] { return "the ring of " + impl.gather_text(post); });
  RingEntry& entry = impl.map.entry(impl.control, impl.options.rank, post.sequence);
  entry.sequence.store(0, std::memory_order_relaxed);
  fence(std::memory_order_release);
  entry.unit_and_slot.store(pack_unit_and_slot(post.unit, post.slot), std::memory_order_relaxed);
  entry.settings.store(post.settings, std::memory_order_relaxed);
  entry.slot_offset.store(post.slot_offset, std::memory_order_relaxed);
  entry.bytes.store(post.bytes, std::memory_order_relaxed);
  entry.sequence.store(post.sequence, std::memory_order_release);
  impl.own().num_posted.store(post.sequence, std::memory_order_release);
  impl.peers.ring();
}

bool ShmProtocol::gather_is_complete(const GatherPost& post) const {
  require_own_process();
  const auto posted = [&](int rank) {
    return impl_->state(rank).num_posted.load(std::memory_order_acquire) >= post.sequence;
  };
  return impl_->peers.see_all(posted) == Seen::done;
}

void ShmProtocol::join_gather(const GatherPost& post) {
  require_own_process();
  Impl& impl = *impl_;
  if (!gather_is_complete(post)) {
    const Wish wish(impl.own().wanted_gather, post.sequence, impl.peers);
    impl.peers.wait(
        [&](int rank) { return impl.state(rank).num_posted.load(std::memory_order_acquire) >= post.sequence; },
        [&] { return impl.gather_text(post); });
  }
  // Not the current ones, because users may have changed them since.
  const uint64_t posted_settings =
      impl.map.entry(impl.control, impl.options.rank, post.sequence).settings.load(std::memory_order_relaxed);
  for (int rank = 0; rank < impl.options.world; ++rank) {
    if (rank == impl.options.rank) continue;
    const GatherPost theirs = impl.entry_of(rank, post.sequence);
    const bool equal = theirs.unit == post.unit && theirs.slot == post.slot && theirs.slot_offset == post.slot_offset &&
                       theirs.bytes == post.bytes;
    if (!equal) impl.fail_mismatch(post, rank, theirs);
    if (theirs.settings != posted_settings) impl.fail_settings(post, posted_settings, rank, theirs.settings);
  }
}

bool ShmProtocol::slot_is_released(uint32_t slot, uint64_t num_uses) const {
  require_own_process();
  for (int rank = 0; rank < impl_->options.world; ++rank) {
    if (impl_->released(slot, rank).load(std::memory_order_acquire) < num_uses) return false;
  }
  return true;
}

void ShmProtocol::release_slot(uint32_t slot, uint64_t num_uses) {
  require_own_process();
  impl_->released(slot, impl_->options.rank).store(num_uses, std::memory_order_release);
  impl_->peers.ring();
}

void ShmProtocol::post_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t scratch_offset,
                                 ForwardCounts forwards) {
  require_own_process();
  Impl& impl = *impl_;
  impl.peers.wait(
      [&](int rank) { return impl.record(unit, rank).consumed.load(std::memory_order_acquire) + 1 >= epoch; },
      [&] { return "the end of " + impl.reduction_text(unit, epoch - 1) + " before the next"; });
  UnitRecord& record = impl.record(unit, impl.options.rank);
  record.tag.store(tag, std::memory_order_relaxed);
  record.scratch_offset.store(scratch_offset, std::memory_order_relaxed);
  record.num_begun.store(forwards.num_begun, std::memory_order_relaxed);
  record.num_raised.store(forwards.num_raised, std::memory_order_relaxed);
  record.posted.store(epoch, std::memory_order_release);
  impl.peers.ring();
}

Joined ShmProtocol::join_reduction(uint32_t unit, uint64_t epoch, uint64_t tag, uint64_t position, bool flush) {
  require_own_process();
  Impl& impl = *impl_;
  const uint64_t own_epoch = impl.record(unit, impl.options.rank).posted.load(std::memory_order_relaxed);
  if (own_epoch != epoch) {
    throw Error("shared memory: rank " + std::to_string(impl.options.rank) + " joins " +
                impl.reduction_text(unit, epoch) + " but posted #" + std::to_string(own_epoch) + " last");
  }
  const auto posted = [&](int rank) { return impl.record(unit, rank).posted.load(std::memory_order_acquire) >= epoch; };
  const auto posted_in_flush = [&](int rank) {
    if (posted(rank)) return Seen::done;
    // The peer posts before it continues, so check again.
    if (!impl.goes_on_without(unit, rank) || posted(rank)) return seen(posted(rank));
    impl.fail_without_reduction(unit, epoch, rank);
  };
  if (impl.peers.see_all(posted) != Seen::done) {
    const Wish wish(impl.own().wanted_reduction, make_wish(unit, epoch), impl.peers);
    const bool all_posted =
        impl.peers.wait([&](int rank) { return flush ? posted_in_flush(rank) : impl.see(rank, position, posted); },
                        [&] { return impl.reduction_text(unit, epoch); });
    if (!all_posted) return Joined::later;
  }
  for (int rank = 0; rank < impl.options.world; ++rank) {
    if (rank == impl.options.rank) continue;
    const UnitRecord& record = impl.record(unit, rank);
    const uint64_t their_tag = record.tag.load(std::memory_order_relaxed);
    if (their_tag != tag) {
      throw Error(
          "shared memory: rank " + std::to_string(impl.options.rank) + " and rank " + std::to_string(rank) +
          " disagree about " + impl.reduction_text(unit, epoch) + " (tags " + std::to_string(tag) + " and " +
          std::to_string(their_tag) +
          "). Its parameters, dtypes, requires_grad, and gradient divide factor must be the same on every rank.");
    }
    impl.compare_forwards(unit, epoch, rank);
  }
  return Joined::ready;
}

void ShmProtocol::skip_reduction(uint32_t unit) {
  require_own_process();
  impl_->record(unit, impl_->options.rank).num_skipped.fetch_add(1);
  impl_->peers.ring();
}

uint64_t ShmProtocol::peer_scratch_offset(uint32_t unit, int rank) const {
  require_own_process();
  return impl_->record(unit, rank).scratch_offset.load(std::memory_order_relaxed);
}

void ShmProtocol::consume_reduction(uint32_t unit, uint64_t epoch) {
  require_own_process();
  impl_->record(unit, impl_->options.rank).consumed.store(epoch, std::memory_order_release);
  impl_->peers.ring();
}

bool ShmProtocol::reduction_is_consumed(uint32_t unit, uint64_t epoch) const {
  require_own_process();
  for (int rank = 0; rank < impl_->options.world; ++rank) {
    if (impl_->record(unit, rank).consumed.load(std::memory_order_acquire) < epoch) return false;
  }
  return true;
}

bool ShmProtocol::wait_consumed_in_order(uint32_t unit, uint64_t epoch, uint64_t position) {
  require_own_process();
  Impl& impl = *impl_;
  const auto consumed = [&](int rank) {
    return impl.record(unit, rank).consumed.load(std::memory_order_acquire) >= epoch;
  };
  if (impl.peers.see_all(consumed) == Seen::done) return true;
  const Wish wish(impl.own().wanted_end, make_wish(unit, epoch), impl.peers);
  return impl.peers.wait(
      [&](int rank) { return impl.see(rank, position, consumed); },
      [&] { return "the end of " + impl.reduction_text(unit, epoch) + ", whose scratch is to be used again"; });
}

void ShmProtocol::wait_consumed(uint32_t unit, uint64_t epoch) {
  require_own_process();
  Impl& impl = *impl_;
  if (impl.record(unit, impl.options.rank).consumed.load(std::memory_order_relaxed) < epoch) {
    throw Error("shared memory: rank " + std::to_string(impl.options.rank) + " waits for the end of " +
                impl.reduction_text(unit, epoch) + " before it has read it itself");
  }
  impl.peers.wait([&](int rank) { return impl.record(unit, rank).consumed.load(std::memory_order_acquire) >= epoch; },
                  [&] { return "the end of " + impl.reduction_text(unit, epoch); });
}

void ShmProtocol::publish_progress(uint64_t position) {
  require_own_process();
  Word& progress = impl_->own().progress;
  const uint64_t before = progress.load(std::memory_order_relaxed);
  if (position < before) {
    throw Error("shared memory: the progress of rank " + std::to_string(impl_->options.rank) + " decreases from " +
                std::to_string(before) + " to " + std::to_string(position));
  }
  if (position == before) return;
  progress.store(position, std::memory_order_release);
  impl_->peers.ring();
}

}  // namespace fsdp2x::cpu
