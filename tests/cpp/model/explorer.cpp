// The explorer: fibers, memory with its clocks and buffers, depth-first search over schedules.
#include "model/explorer.hpp"

#include <cxxabi.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp2x::model {
namespace {

constexpr size_t kStackBytes = 256 << 10;
constexpr int kMaxWorld = 4;

using Clock = std::array<uint32_t, kMaxWorld>;

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}
uint64_t mix(uint64_t a, uint64_t b) { return mix(mix(a) ^ (b * 0xff51afd7ed558ccdULL)); }

uint64_t hash_of(const Clock& clock) {
  uint64_t hash = 0;
  for (const uint32_t count : clock) hash = mix(hash, count);
  return hash;
}

void join(Clock& into, const Clock& other) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool is_release(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_seq_cst || order == std::memory_order_acq_rel;
}
bool is_acquire(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_seq_cst ||
         order == std::memory_order_acq_rel || order == std::memory_order_consume;
}

// Thrown through a rank's program when a run is over for another reason than its end.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Place {  // a word, or a cell
  uint64_t value = 0;
  uint64_t base = 0;  // of a doorbell: only what it rang since its owner looked counts
  Clock released{};   // what an acquiring load learns
  // Its last write, and the last read of each rank; of words only where relaxed stores happen.
  int writer = -1;
  uint32_t written = 0;
  Clock reads{};
};

// What all runs so far have shown of a place. Accesses that cannot meet another rank's are no steps of their own; when
// a run shows that they can, the search begins again.
struct Knowledge {
  uint32_t stored_by = 0;  // sets of ranks
  uint32_t loaded_by = 0;
  bool is_bell = false;
  bool has_relaxed_stores = false;
  bool is_contended = false;  // a relaxed access was not ordered with another rank's

  bool is_shared() const {
    const uint32_t all = stored_by | loaded_by;
    return stored_by != 0 && (all & (all - 1)) != 0;
  }
};

struct Pending {  // a store in a rank's buffer
  int place = 0;
  uint64_t value = 0;
  Clock released{};
  bool releases = false;
  bool is_barrier = false;  // a release fence: nothing behind it may overtake what is before it
};

struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  jmp_buf place;
  std::array<char, 16> exceptions{};  // __cxa_eh_globals
};

struct Rank {
  bool is_done = false;
  int sleeps_on = -1;        // a place, while asleep
  bool drains = false;       // waits until its buffer is empty
  uint64_t history = 0;      // hash of all it has read since it forgot
  uint64_t base = 0;         // and what it was then
  Clock clock{};             // happens before what it does next
  Clock fence_released{};    // what its relaxed stores carry since its last release fence
  Clock fence_acquirable{};  // what its relaxed loads have seen, for its next acquire fence
  std::deque<Pending> buffer;
  std::string end;
};

class Explorer;
Explorer* current = nullptr;

class Explorer {
 public:
  Explorer(const Options& options, const std::function<void()>& begin, const std::function<void(int)>& program,
           const std::function<void(const Ends&)>& end)
      : options_(options), begin_(begin), program_(program), end_(end), fibers_(static_cast<size_t>(options.world)) {}

  Result explore() {
    current = this;
    Result result;
    while (true) {
      ++result.num_runs;
      if (getenv("DBG") && result.num_runs % 100000 == 0)
        fprintf(stderr, "%zu states %llu runs path %zu\n", seen_.size(), (unsigned long long)result.num_runs,
                path_.size());
      std::string wrong;
      try {
        if (run()) ++result.num_ends;
      } catch (const Violation& violation) {
        wrong = violation.what();
      }
      if (!wrong.empty()) {
        result.violation = wrong + trace_again();
        break;
      }
      if (std::exchange(has_learned_, false)) {
        if (getenv("DBG"))
          fprintf(stderr, "restart after %zu states %llu runs\n", seen_.size(), (unsigned long long)result.num_runs);
        seen_.clear();
        path_.clear();
        continue;
      }
      if (seen_.size() > options_.max_states) break;
      if (!next_branch()) {
        result.is_complete = true;
        break;
      }
    }
    result.num_states = seen_.size();
    current = nullptr;
    return result;
  }

  // --- on a rank's stack ---

  uint64_t load(const void* word, std::memory_order order) {
    const int place = place_of(word);
    learn(place, &Knowledge::loaded_by);
    if (is_step(place, order)) give_way();
    note_read(place);
    Rank& rank = self();
    const uint64_t value = visible(place);
    if (is_acquire(order)) {
      join(rank.clock, places_[static_cast<size_t>(place)].released);
    } else {
      join(rank.fence_acquirable, places_[static_cast<size_t>(place)].released);
    }
    if (knowledge_[static_cast<size_t>(place)].is_bell) {
      unhash(place);
      places_[static_cast<size_t>(place)].base = value;
      rehash(place);
      note("load", place, 0);
    } else {
      note("load", place, value);
    }
    return value;
  }

  void store(void* word, uint64_t value, std::memory_order order) {
    const int place = place_of(word);
    learn(place, &Knowledge::stored_by);
    if (order == std::memory_order_relaxed) learn(place, &Knowledge::has_relaxed_stores);
    if (!options_.buffered && is_step(place, order)) give_way();
    note_write(place);
    Rank& rank = self();
    Pending pending;
    pending.place = place;
    pending.value = value;
    pending.releases = is_release(order);
    pending.released = pending.releases ? rank.clock : rank.fence_released;
    note("store", place, value);
    if (options_.buffered) {
      rank.buffer.push_back(pending);
    } else {
      apply(pending);
    }
  }

  uint64_t fetch_add(void* word, uint64_t value) {
    const int place = place_of(word);
    learn(place, &Knowledge::stored_by);
    learn(place, &Knowledge::is_bell);
    drain();
    give_way();
    Rank& rank = self();
    const uint64_t before = places_[static_cast<size_t>(place)].value;
    join(rank.clock, places_[static_cast<size_t>(place)].released);
    Clock released = rank.clock;
    join(released, places_[static_cast<size_t>(place)].released);  // a release sequence goes on
    set(place, before + value, released);
    note("ring", place, 0);
    return before;
  }

  void fence(std::memory_order order, const std::array<uintptr_t, 2>& site) {
    Rank& rank = self();
    if (is_acquire(order)) join(rank.clock, rank.fence_acquirable);
    if (is_release(order)) rank.fence_released = rank.clock;
    if (order == std::memory_order_seq_cst) self().history = mix(self().base, mix(site[0], site[1]));
    if (!options_.buffered) return;
    if (order == std::memory_order_seq_cst) {
      drain();
    } else if (is_release(order) && !rank.buffer.empty()) {
      Pending barrier;
      barrier.is_barrier = true;
      rank.buffer.push_back(barrier);
    }
  }

  void sleep_on(void* word, uint64_t value) {
    const int place = place_of(word);
    drain();  // a system call
    give_way();
    note("sleep on", place, 0);
    if (places_[static_cast<size_t>(place)].value != value) return;
    self().sleeps_on = place;
    // Asleep, a rank knows no more than that it waits in this call.
    self().history = mix(self().base, static_cast<uint64_t>(place));
    give_way();
    note("woken at", place, 0);
  }

  void forget(uint64_t state) { self().history = self().base = mix(state); }

  void wake(void* word) {
    const int place = place_of(word);
    drain();
    give_way();
    note("wake", place, 0);
    for (Rank& rank : ranks_) {
      if (rank.sleeps_on == place) rank.sleeps_on = -1;
    }
  }

  void write_cell(const void* cell, uint64_t value) {
    const int at = place_of(cell);
    if (const int other = unordered_write(at); other >= 0) throw Violation(race("writes", at, "wrote", other));
    if (const int other = unordered_read(at); other >= 0) throw Violation(race("writes", at, "read", other));
    record_write(at);
    unhash(at);
    places_[static_cast<size_t>(at)].value = value;
    rehash(at);
    note("write", at, value);
  }

  uint64_t read_cell(const void* cell) {
    const int at = place_of(cell);
    if (const int other = unordered_write(at); other >= 0) throw Violation(race("reads", at, "wrote", other));
    record_read(at);
    note("read", at, places_[static_cast<size_t>(at)].value);
    return places_[static_cast<size_t>(at)].value;
  }

  static void enter() { current->main_of_fiber(); }

 private:
  // A step of the search: which actor goes, and which others could have.
  struct Choice {
    int actor;
    std::vector<int> others;
  };
  // Actors: rank r is r; entry i of rank r's buffer is world + 64 * r + i.
  int flush_actor(int rank, size_t entry) const { return options_.world + 64 * rank + static_cast<int>(entry); }

  Rank& self() { return ranks_[static_cast<size_t>(running_)]; }
  uint32_t own_count() { return self().clock[static_cast<size_t>(running_)]; }
  // Accesses are counted where somebody asks about their order, and nowhere else: states differ by their clocks.
  void tick() { ++self().clock[static_cast<size_t>(running_)]; }

  void learn(int place, uint32_t Knowledge::*ranks) {
    Knowledge& known = knowledge_[static_cast<size_t>(place)];
    const bool was_shared = known.is_shared();
    known.*ranks |= 1U << running_;
    if (known.is_shared() != was_shared) has_learned_ = true;
  }
  void learn(int place, bool Knowledge::*fact) {
    bool& known = knowledge_[static_cast<size_t>(place)].*fact;
    if (!known) has_learned_ = true;
    known = true;
  }

  bool is_step(int place, std::memory_order order) const {
    const Knowledge& known = knowledge_[static_cast<size_t>(place)];
    return known.is_shared() && (order != std::memory_order_relaxed || known.is_contended);
  }
  bool counts(int place) const {
    const Knowledge& known = knowledge_[static_cast<size_t>(place)];
    return known.has_relaxed_stores && !known.is_contended;
  }
  void note_read(int place) {
    if (!counts(place)) return;
    if (unordered_write(place) >= 0) return learn(place, &Knowledge::is_contended);
    record_read(place);
  }
  void note_write(int place) {
    if (!counts(place)) return;
    if (unordered_write(place) >= 0 || unordered_read(place) >= 0) return learn(place, &Knowledge::is_contended);
    record_write(place);
  }
  // Another rank whose last access does not happen before the running rank's next; -1: there is none.
  int unordered_write(int at) {
    const Place& place = places_[static_cast<size_t>(at)];
    if (place.writer < 0 || place.writer == running_) return -1;
    return place.written > self().clock[static_cast<size_t>(place.writer)] ? place.writer : -1;
  }
  int unordered_read(int at) {
    const Place& place = places_[static_cast<size_t>(at)];
    for (int other = 0; other < options_.world; ++other) {
      if (other == running_) continue;
      if (place.reads[static_cast<size_t>(other)] > self().clock[static_cast<size_t>(other)]) return other;
    }
    return -1;
  }
  void record_write(int at) {
    tick();
    unhash(at);
    Place& place = places_[static_cast<size_t>(at)];
    place.writer = running_;
    place.written = own_count();
    place.reads = {};
    rehash(at);
  }
  void record_read(int at) {
    tick();
    unhash(at);
    places_[static_cast<size_t>(at)].reads[static_cast<size_t>(running_)] = own_count();
    rehash(at);
  }

  int place_of(const void* address) {
    const auto [found, is_new] = index_.try_emplace(address, static_cast<int>(index_.size()));
    if (static_cast<size_t>(found->second) >= places_.size()) places_.resize(static_cast<size_t>(found->second) + 1);
    if (is_new) {
      addresses_.push_back(address);
      knowledge_.emplace_back();
    }
    return found->second;
  }

  uint64_t hash_of_place(int at) const {
    const Place& place = places_[static_cast<size_t>(at)];
    const uint64_t cell = mix(hash_of(place.reads), mix(static_cast<uint64_t>(place.writer + 1), place.written));
    return mix(mix(static_cast<uint64_t>(at), place.value - place.base), mix(hash_of(place.released), cell));
  }
  void unhash(int at) { memory_hash_ ^= hash_of_place(at) ^ empty_hash(at); }
  void rehash(int at) { memory_hash_ ^= hash_of_place(at) ^ empty_hash(at); }
  static uint64_t empty_hash(int at) {
    static const uint64_t cell = mix(hash_of(Clock{}), mix(0, 0));
    return mix(mix(static_cast<uint64_t>(at), 0), mix(hash_of(Clock{}), cell));
  }

  void set(int at, uint64_t value, const Clock& released) {
    unhash(at);
    places_[static_cast<size_t>(at)].value = value;
    places_[static_cast<size_t>(at)].released = released;
    rehash(at);
  }
  void apply(const Pending& pending) { set(pending.place, pending.value, pending.released); }

  // What this rank sees: its own store, if one is still in the buffer.
  uint64_t visible(int place) {
    const auto& buffer = self().buffer;
    const auto found = std::find_if(buffer.rbegin(), buffer.rend(), [place](const Pending& pending) {
      return !pending.is_barrier && pending.place == place;
    });
    return found != buffer.rend() ? found->value : places_[static_cast<size_t>(place)].value;
  }

  void drain() {
    if (self().buffer.empty()) return;
    self().drains = true;
    give_way();
    self().drains = false;
  }

  std::string race(const char* does, int at, const char* did, int other) const {
    return "race: rank " + std::to_string(running_) + " " + does + " " + name(at) + ", which rank " +
           std::to_string(other) + " " + did + " without happening before";
  }
  std::string name(int at) const {
    const std::string text = options_.name ? options_.name(addresses_[static_cast<size_t>(at)]) : "";
    return text.empty() ? "place " + std::to_string(at) : text;
  }

  // The running rank has seen `value`.
  void note(const char* what, int place, uint64_t value) {
    Rank& rank = self();
    rank.history = mix(rank.history, mix(static_cast<uint64_t>(place), value));
    if (is_tracing_) {
      trace_.push_back("rank " + std::to_string(running_) + " " + what + " " + name(place) + " = " +
                       std::to_string(value));
    }
  }

  // --- fibers ---

  // From a rank to the search, which resumes it when it is its turn. Within the replayed prefix a rank whose turn comes
  // next as well just goes on.
  void give_way() {
    if (position_ < path_.size() && path_[position_].actor == running_ && can_run(running_)) {
      ++position_;
    } else {
      Fiber& fiber = fibers_[static_cast<size_t>(running_)];
      if (_setjmp(fiber.place) == 0) {
        swap_exceptions(fiber);
        _longjmp(search_, 1);
      }
    }
    advance();
  }

  // The running rank has gone a step further, whatever it reads there.
  void advance() { self().history = mix(self().history, 1); }

  void resume(int rank) {
    running_ = rank;
    Fiber& fiber = fibers_[static_cast<size_t>(rank)];
    if (_setjmp(search_) == 0) {
      swap_exceptions(fiber);
      _longjmp(fiber.place, 1);
    }
  }

  // Exceptions in flight belong to a stack.
  static void swap_exceptions(Fiber& fiber) {
    std::array<char, 16> other;
    void* const globals = abi::__cxa_get_globals();
    std::memcpy(other.data(), globals, other.size());
    std::memcpy(globals, fiber.exceptions.data(), other.size());
    fiber.exceptions = other;
  }

  void main_of_fiber() {
    Fiber& fiber = fibers_[static_cast<size_t>(running_)];
    if (_setjmp(fiber.place) == 0) _longjmp(search_, 1);  // made, not run
    const int rank = running_;
    advance();
    try {
      program_(rank);
    } catch (const Violation& violation) {
      violation_ = violation.what();
    } catch (const std::exception& error) {
      ranks_[static_cast<size_t>(rank)].end = error.what();
    }
    ranks_[static_cast<size_t>(rank)].is_done = true;
    swap_exceptions(fiber);
    _longjmp(search_, 1);
  }

  void make_fiber(int rank) {
    running_ = rank;
    Fiber& fiber = fibers_[static_cast<size_t>(rank)];
    fiber.exceptions = {};
    ucontext_t context, back;
    ::getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    ::makecontext(&context, &Explorer::enter, 0);
    if (_setjmp(search_) == 0) ::swapcontext(&back, &context);
  }

  // --- the search ---

  bool can_run(int rank) const {
    const Rank& it = ranks_[static_cast<size_t>(rank)];
    return !it.is_done && it.sleeps_on < 0 && !(it.drains && !it.buffer.empty());
  }

  void add_flushes(int rank, std::vector<int>& actors) const {
    const auto& buffer = ranks_[static_cast<size_t>(rank)].buffer;
    for (size_t i = 0; i < buffer.size(); ++i) {
      const Pending& entry = buffer[i];
      bool may = true;
      for (size_t before = 0; before < i && may; ++before) {
        may = !entry.releases && !entry.is_barrier && !buffer[before].is_barrier && buffer[before].place != entry.place;
      }
      if (may) actors.push_back(flush_actor(rank, i));
    }
  }

  std::vector<int> enabled() const {
    std::vector<int> actors;
    for (int rank = 0; rank < options_.world; ++rank) {
      if (can_run(rank)) actors.push_back(rank);
    }
    for (int rank = 0; rank < options_.world; ++rank) add_flushes(rank, actors);
    return actors;
  }

  void act(int actor) {
    if (actor < options_.world) {
      resume(actor);
      if (!violation_.empty()) throw Violation(std::exchange(violation_, ""));
      return;
    }
    const int rank = (actor - options_.world) / 64;
    auto& buffer = ranks_[static_cast<size_t>(rank)].buffer;
    const auto entry = buffer.begin() + (actor - options_.world) % 64;
    if (!entry->is_barrier) apply(*entry);
    if (is_tracing_ && !entry->is_barrier) {
      trace_.push_back("rank " + std::to_string(rank) + "'s store to " + name(entry->place) + " = " +
                       std::to_string(entry->value) + " takes effect");
    }
    buffer.erase(entry);
    while (!buffer.empty() && buffer.front().is_barrier) buffer.pop_front();
  }

  uint64_t state_hash() const {
    uint64_t hash = memory_hash_;
    for (const Rank& rank : ranks_) {
      uint64_t own = mix(rank.history, hash_of(rank.clock));
      own = mix(own, mix(hash_of(rank.fence_released), hash_of(rank.fence_acquirable)));
      own = mix(own, (rank.is_done ? 1 : 0) + (rank.sleeps_on >= 0 ? 2 : 0) + (rank.drains ? 4 : 0));
      for (const Pending& pending : rank.buffer) {
        own = mix(own, mix(mix(static_cast<uint64_t>(pending.place), pending.value),
                           (pending.is_barrier ? 1 : 0) + (pending.releases ? 2 : 0)));
      }
      hash = mix(hash, own);
    }
    return hash;
  }

  // Runs the path, then goes on until the end or a known state. True when all ranks ended.
  bool run() {
    for (Place& place : places_) place = Place();
    memory_hash_ = 0;
    ranks_.assign(static_cast<size_t>(options_.world), Rank());
    position_ = 0;
    trace_.clear();
    begin_();
    for (int rank = 0; rank < options_.world; ++rank) make_fiber(rank);
    while (true) {
      if (position_ < path_.size()) {
        act(path_[position_++].actor);
        continue;
      }
      std::vector<int> actors = enabled();
      if (actors.empty()) {
        Ends ends;
        for (const Rank& rank : ranks_) {
          if (!rank.is_done) throw Violation(deadlock());
          ends.push_back(rank.end);
        }
        try {
          end_(ends);
        } catch (const std::exception& error) {
          throw Violation(error.what());
        }
        return true;
      }
      if (is_tracing_ || !seen_.insert(state_hash()).second) return false;
      const int actor = actors.front();
      actors.erase(actors.begin());
      path_.push_back({actor, std::move(actors)});
      ++position_;
      act(actor);
    }
  }

  std::string deadlock() const {
    std::string text = "deadlock:";
    for (int rank = 0; rank < options_.world; ++rank) {
      const Rank& it = ranks_[static_cast<size_t>(rank)];
      text += " rank " + std::to_string(rank) +
              (it.is_done          ? " has ended" + (it.end.empty() ? "" : " (" + it.end + ")")
               : it.sleeps_on >= 0 ? " sleeps on " + name(it.sleeps_on)
                                   : " waits") +
              ";";
    }
    return text;
  }

  bool next_branch() {
    while (!path_.empty()) {
      Choice& last = path_.back();
      if (last.others.empty()) {
        path_.pop_back();
        continue;
      }
      last.actor = last.others.front();
      last.others.erase(last.others.begin());
      return true;
    }
    return false;
  }

  // The last steps of the run that went wrong.
  std::string trace_again() {
    is_tracing_ = true;
    try {
      run();
    } catch (const Violation&) {
    }
    is_tracing_ = false;
    std::string text;
    const size_t first = trace_.size() > 60 ? trace_.size() - 60 : 0;
    for (size_t i = first; i < trace_.size(); ++i) text += "\n  " + trace_[i];
    return text;
  }

  const Options& options_;
  const std::function<void()>& begin_;
  const std::function<void(int)>& program_;
  const std::function<void(const Ends&)>& end_;
  std::vector<Fiber> fibers_;
  jmp_buf search_;
  int running_ = 0;

  std::unordered_map<const void*, int> index_;
  std::vector<const void*> addresses_;
  std::vector<Place> places_;
  std::vector<Knowledge> knowledge_;
  bool has_learned_ = false;
  uint64_t memory_hash_ = 0;
  std::vector<Rank> ranks_;
  std::string violation_;

  std::vector<Choice> path_;
  size_t position_ = 0;
  std::unordered_set<uint64_t> seen_;
  bool is_tracing_ = false;
  std::vector<std::string> trace_;
};

}  // namespace

uint64_t load(const void* word, std::memory_order order) { return current->load(word, order); }
void store(void* word, uint64_t value, std::memory_order order) { current->store(word, value, order); }
uint64_t fetch_add(void* word, uint64_t value) { return current->fetch_add(word, value); }
void fence(std::memory_order order) {
  current->fence(order, {reinterpret_cast<uintptr_t>(__builtin_return_address(0)),
                         reinterpret_cast<uintptr_t>(__builtin_return_address(1))});
}
void sleep_on(void* word, uint64_t value) { current->sleep_on(word, value); }
void wake(void* word) { current->wake(word); }
void forget(uint64_t state) { current->forget(state); }

void Cell::write(uint64_t value) { current->write_cell(this, value); }
uint64_t Cell::read() const { return current->read_cell(this); }

void require(bool condition, const std::string& what) {
  if (!condition) throw Violation("not true: " + what);
}

Result explore(const Options& options, const std::function<void()>& begin, const std::function<void(int)>& rank,
               const std::function<void(const Ends&)>& end) {
  return Explorer(options, begin, rank, end).explore();
}

}  // namespace fsdp2x::model
