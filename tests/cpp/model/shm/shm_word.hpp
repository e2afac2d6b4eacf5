// Replaces csrc/shm/shm_word.hpp: every access to a word is a step of the explorer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "model/explorer.hpp"

namespace fsdp2x::cpu {

template <class T>
class CheckedWord {
 public:
  T load(std::memory_order order = std::memory_order_seq_cst) const { return static_cast<T>(model::load(this, order)); }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) { model::store(this, value, order); }
  T fetch_add(T value) { return static_cast<T>(model::fetch_add(this, value)); }

 private:
  T place_;  // for the size, the explorer has the values
};

using Word = CheckedWord<uint64_t>;
using Doorbell = CheckedWord<uint32_t>;

inline void fence(std::memory_order order) { model::fence(order); }
// The explorer sets the limit: Options::num_limits.
inline void sleep_on(Doorbell& bell, uint32_t value, std::chrono::nanoseconds) { model::sleep_on(&bell, value); }
inline void wake(Doorbell& bell) { model::wake(&bell); }

}  // namespace fsdp2x::cpu
