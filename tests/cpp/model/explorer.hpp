// Explores every order in which ranks may access shared words: an explicit-state model checker for code that is
// compiled against model/shm/shm_word.hpp.
//
// Each rank runs the real code on a stack of its own and gives way before every access. The explorer tries all orders
// depth first; a branch is taken by running the program again from the start, and left where a state is met that was
// seen before. A rank's state is what it has read since it last said what of it matters: the code is deterministic.
// Accesses that never meet another rank's, because only one rank uses the word or because happens-before orders them,
// are no steps; the search finds out which these are, and begins again when it was wrong.
//
// Two memory models:
//   in order  every access takes effect at once, and happens-before is kept by vector clocks as C++ defines it: a store
//             that should have been a release shows as a race on the plain data it publishes
//   buffered  stores wait in their rank's buffer and take effect in any order that fences and releases leave open: a
//             wake-up that is lost to that shows as a deadlock
// Loads take effect in the order of the program in both, and a relaxed load reads the newest value.
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

// Plain memory that several ranks use: every access is checked against the others' by happens-before. Accesses are no
// steps: two that are not ordered are a race in whatever order they come.
class Cell {
 public:
  void write(uint64_t value);
  uint64_t read() const;

 private:
  char place_ = 0;  // values are the explorer's
};

// What the running rank has read so far matters no more than `state` says: states that differ in nothing else are one.
// To be called before every call that may wait, and such a call waits in one place only.
void forget(uint64_t state);

// For checks inside a rank: ends the run as a violation.
void require(bool condition, const std::string& what);

// Planted: what the explored code would do wrong if a line of it were another.
struct Faults {
  std::function<bool(const void*)> relaxes;  // the word's loads and stores are relaxed
  std::function<bool(const void*)> mutes;    // after a store to the word nobody is woken
  bool no_full_fences = false;
  std::function<uint64_t(const void*, uint64_t)> changes;  // what is stored in a word instead of a value
};

struct Options {
  int world = 2;
  bool buffered = false;
  uint64_t max_states = 20'000'000;
  // How often a run may go on with another rank, or store that takes effect, than the one whose turn it is: ranks run
  // in turn, each until it waits. -1: as often as it likes. Few such delays show most of what goes wrong, and three
  // ranks have too many orders for all of them.
  int max_delays = -1;
  // How many sleeps of a rank end by themselves when everybody sleeps. 0: a wake-up that only the limit of a sleep
  // would make up for is a deadlock.
  int num_limits = 0;
  Faults faults;
  // Names a word in the trace of a violation.
  std::function<std::string(const void*)> name;
};

struct Result {
  uint64_t num_states = 0;
  uint64_t num_runs = 0;
  uint64_t num_ends = 0;  // runs in which all ranks came to an end, in one way or another
  bool is_complete = false;
  std::string violation;  // empty: none found
};

// How a rank ended: "" or what it threw.
using Ends = std::vector<std::string>;

// `begin` makes what the ranks share, anew for each run. `rank` is a rank's program; an exception that leaves it is its
// end. `end` looks at how all of them ended, and throws when that is a violation. Deadlocks, races and failed
// requirements are violations always.
Result explore(const Options& options, const std::function<void()>& begin, const std::function<void(int)>& rank,
               const std::function<void(const Ends&)>& end);

}  // namespace fsdp2x::model
