// The collectives that a rank posts to a process group, and the one that its ranks expect next. Ranks that posted the
// same collectives so far expect the same next one. So a rank that is about to post another one knows this in advance.
// It can compare with its peers before anything is sent: backends react to unequal collectives with an abort or wrong
// data.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <unordered_map>

#include "core/dtype.hpp"
#include "core/unit_settings.hpp"
#include "core/wire_format.hpp"

namespace fsdp2x {

enum class Operation : uint8_t { all_gather, reduce_scatter, all_to_all, all_reduce, other };

const char* to_string(Operation operation);

// The part of a training step in which a collective is posted.
enum class PassKind : uint8_t { outside, forward, evaluation, backward };

const char* to_string(PassKind kind);

struct Pass {
  PassKind kind = PassKind::outside;
  const void* root = nullptr;  // only used as an identity
  uint64_t number = 0;         // counts the passes of that root
  bool odd_steps = false;      // of that root's optimizers
  bool operator==(const Pass&) const = default;
};

// Settings that must be equal on all ranks when a unit is gathered or reduced.
struct CollectiveSettings {
  UnitSettings unit;
  WireFormat wire_weights = WireFormat::plain;
  WireFormat wire_gradients = WireFormat::plain;
  uint64_t trained = 0;  // hash of which parameters are trained
};

struct Collective {
  uint64_t subject = 0;  // the unit's number on this process group, or a hash of the posted operation
  Operation operation = Operation::other;
  Pass pass;
  CollectiveSettings settings;
  uint64_t segment_bytes = 0;  // of one rank
  DType type = DType::byte;
  bool averages = false;
  bool is_custom = false;    // the user's function posts it
  bool is_separate = false;  // over the group of set_separate_reduce_scatter_group
  bool is_in_place = false;  // a gather by messages, or of several outputs
  uint64_t num_passes = 0;   // passes of this rank that posted something here, this one included

  // Returns a number that is equal for collectives that fit together. Passes are compared by kind only. A forward may
  // run without gradients on some ranks, because the collectives of their backwards are compared.
  uint64_t tag() const;
};

class CollectiveOrder {
 public:
  // Returns whether all ranks that posted the same collectives as this rank expect this one next.
  bool expects(const Collective& next) const;
  // Notes that the collective is posted now.
  void add(Collective next);
  // Returns the number of passes that have posted something, if `pass` posts or leaves now.
  uint64_t num_passes(const Pass& pass) const;
  // Notes that this rank leaves `pass`. Its next collective belongs to another pass.
  void leave(const Pass& pass);
  // Returns how many were posted since the last restart.
  uint64_t num_posted() const { return num_posted_; }
  // Returns the last ones, the newest at the end.
  const std::deque<Collective>& recent() const { return recent_; }
  // Forgets everything: the ranks begin again together.
  void restart();

 private:
  // Remembers the collective that last followed the same `length` collectives. Long memories distinguish the
  // micro-batches of an accumulation. Short ones recover after a change.
  struct Memory {
    size_t length;
    uint64_t power;     // of the rolling hash's base, for the oldest collective of the window
    uint64_t hash = 0;  // of the last `length` tags
    std::unordered_map<uint64_t, uint64_t> next;
  };
  static Memory make_memory(size_t length);

  static constexpr size_t kNumRecent = 256;
  static constexpr size_t kMaxKnown = size_t{1} << 16;

  std::array<Memory, 3> memories_{make_memory(kNumRecent), make_memory(8), make_memory(1)};
  std::deque<uint64_t> tags_;  // of recent_
  std::deque<Collective> recent_;
  uint64_t num_posted_ = 0;
  uint64_t num_passes_ = 0;
  Pass last_pass_;
};

}  // namespace fsdp2x
