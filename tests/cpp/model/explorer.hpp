// Explores every order in which ranks may access shared words. It is an explicit-state model checker for code that is
// compiled against model/shm/shm_word.hpp.
//
// Each rank runs the real code on a separate stack and gives way before every access. The explorer tries all orders
// depth first. To take a branch, it runs the program again from the start. It leaves a branch at a state that it has
// seen before. A rank's state is what it has read since it last called forget(): the code is deterministic. Some
// accesses never meet another rank's, because only one rank uses the word or because happens-before orders them. These
// are no steps. The search finds out which they are, and starts again if it was wrong.
//
// Two memory models:
//   in order  every access takes effect at once, and happens-before is kept by vector clocks as C++ defines it: a store
//             that should have been a release shows as a race on the plain data it publishes
//   buffered  stores wait in their rank's buffer and take effect in any order that fences and releases leave open: a
//             wake-up that is lost to that shows as a deadlock
// In both models, loads take effect in program order, and a relaxed load reads the newest value.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp2x::model {

// --- what checked words call, on a rank's stack ---
uint64_t load(const void* word, std::memory_order order);
void store(const void* word, uint64_t value, std::memory_order order);
uint64_t fetch_add(const void* word, uint64_t value);
void fence(std::memory_order order);
void sleep_on(const void* word, uint64_t value);
void wake(const void* word);

// Plain memory that several ranks use. Every access is checked against the others' by happens-before. Accesses are no
// steps: two accesses without an order are a race, whichever comes first.
class Cell {
 public:
  void write(uint64_t value);
  uint64_t read() const;

 private:
  char place_ = 0;  // the explorer has the values
};

// Reduces what the running rank has read so far to `state`, so that states with no other difference are equal. Call it
// before every call that may wait. Such a call must wait in only one place.
void forget(uint64_t state);

// For checks inside a rank: ends the run as a violation.
void require(bool condition, const std::string& what);

// Planted faults: mistakes that the explored code would make if a line of it were different.
struct Faults {
  std::function<bool(const void*)> relaxes;  // the word's loads and stores are relaxed
  std::function<bool(const void*)> mutes;    // a store to the word wakes no rank
  bool no_full_fences = false;
  std::function<uint64_t(const void*, uint64_t)> changes;  // replaces the value of a store to a word
};

struct Options {
  int world = 2;
  bool buffered = false;
  uint64_t max_states = 20'000'000;
  // How often a run may continue with another rank or store than the one whose turn it is. Ranks run in turn, each
  // until it waits. -1: unlimited. A few delays find most errors, and three ranks have too many orders to try all of
  // them.
  int max_delays = -1;
  // How many sleeps of a rank end by themselves when all ranks sleep. 0: a lost wake-up is a deadlock, even if the
  // limit of the sleep would end it.
  int num_limits = 0;
  Faults faults;
  // Names a word in the trace of a violation.
  std::function<std::string(const void*)> name;
};

struct Result {
  uint64_t num_states = 0;
  uint64_t num_runs = 0;
  uint64_t num_ends = 0;  // runs in which all ranks ended, normally or not
  bool is_complete = false;
  std::string violation;  // empty: none found
};

// How a rank ended: "" or what it threw.
using Ends = std::vector<std::string>;

// `begin` makes the shared state for each run. `rank` is a rank's program. An exception that leaves it is its end.
// `end` checks how all of them ended, and throws for a violation. Deadlocks, races, and failed requirements are always
// violations.
Result explore(const Options& options, const std::function<void()>& begin, const std::function<void(int)>& rank,
               const std::function<void(const Ends&)>& end);

}  // namespace fsdp2x::model
