// The collectives that a rank posts to a process group.
#include "core/collective_order.hpp"

#include <array>

namespace fsdp2x {

namespace {

constexpr uint64_t kHashBase = 0x9e3779b97f4a7c15U;  // odd

// The finalizer of splitmix64 (Steele, Lea, and Flood, 2014).
uint64_t mixed(uint64_t hash, uint64_t value) {
  uint64_t z = hash + value + 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return z ^ (z >> 31);
}

}  // namespace

const char* to_string(Operation operation) {
  static constexpr std::array kNames = {"all_gather", "reduce_scatter", "all_to_all", "all_reduce", "other"};
  return kNames.at(static_cast<size_t>(operation));
}

const char* to_string(PassKind kind) {
  static constexpr std::array kNames = {"outside of forward and backward", "in forward",
                                        "in a forward without gradients", "in backward"};
  return kNames.at(static_cast<size_t>(kind));
}

uint64_t Collective::tag() const {
  uint64_t hash = mixed(subject, static_cast<uint64_t>(operation));
  hash = mixed(hash, pass.kind == PassKind::evaluation ? static_cast<uint64_t>(PassKind::forward)
                                                       : static_cast<uint64_t>(pass.kind));
  hash = mixed(hash, settings.unit.packed());
  hash =
      mixed(hash, static_cast<uint64_t>(settings.wire_weights) << 8 | static_cast<uint64_t>(settings.wire_gradients));
  hash = mixed(hash, settings.trained);
  hash = mixed(hash, segment_bytes);
  return mixed(hash, static_cast<uint64_t>(type) << 2 | static_cast<uint64_t>(is_in_place) << 1 |
                         static_cast<uint64_t>(averages));
}

CollectiveOrder::Memory CollectiveOrder::make_memory(size_t length) {
  uint64_t power = 1;
  for (size_t i = 0; i < length; ++i) power *= kHashBase;
  return {length, power, 0, {}};
}

bool CollectiveOrder::expects(const Collective& next) const {
  for (const Memory& memory : memories_) {
    const auto found = memory.next.find(memory.hash);
    if (found != memory.next.end()) return found->second == next.tag();
  }
  return false;
}

uint64_t CollectiveOrder::num_passes(const Pass& pass) const { return num_passes_ + (pass == last_pass_ ? 0 : 1); }

void CollectiveOrder::leave(const Pass& pass) {
  num_passes_ = num_passes(pass);
  last_pass_ = pass;
}

void CollectiveOrder::add(Collective next) {
  const uint64_t tag = next.tag();
  for (Memory& memory : memories_) {
    // All ranks have seen the same tags, so they forget at the same moment.
    if (memory.next.size() >= kMaxKnown) memory.next.clear();
    memory.next[memory.hash] = tag;
    memory.hash = memory.hash * kHashBase + tag;
    if (tags_.size() >= memory.length) memory.hash -= tags_[tags_.size() - memory.length] * memory.power;
  }
  leave(next.pass);
  next.num_passes = num_passes_;
  ++num_posted_;
  if (recent_.size() == kNumRecent) {
    recent_.pop_front();
    tags_.pop_front();
  }
  recent_.push_back(next);
  tags_.push_back(tag);
}

void CollectiveOrder::restart() { *this = CollectiveOrder(); }

}  // namespace fsdp2x
