// The explorer: the effect of a rank's accesses, and the depth-first search over their orders.
#include "model/explorer.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "model/buffer.hpp"
#include "model/fibers.hpp"
#include "model/hashing.hpp"
#include "model/memory.hpp"

namespace fsdp2x::model {
namespace {

bool is_release(std::memory_order order) {
  return order == std::memory_order_release || order == std::memory_order_seq_cst || order == std::memory_order_acq_rel;
}
bool is_acquire(std::memory_order order) {
  return order == std::memory_order_acquire || order == std::memory_order_seq_cst ||
         order == std::memory_order_acq_rel || order == std::memory_order_consume;
}

// Thrown through a rank's program if a run is over before its end.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Rank {
  bool is_done = false;
  int sleeps_on = -1;            // a place, while asleep
  int num_limits = 0;            // sleeps that ended by their limit
  bool drains = false;           // waits until its buffer is empty
  uint64_t history = 0;          // hash of all that it has read since it forgot
  uint64_t base = 0;             // and its value then
  const void* stored = nullptr;  // the word of its last store
  uint64_t last_store = 0;       // hash of that word and the value
  Clock fence_released{};        // released by its relaxed stores since its last release fence
  Clock fence_acquirable{};      // seen by its relaxed loads, for its next acquire fence
  StoreBuffer buffer;
  std::string end;
};

class Explorer;
Explorer* current = nullptr;

class Explorer {
 public:
  Explorer(const Options& options, const std::function<void()>& begin, const std::function<void(int)>& program,
           const std::function<void(const Ends&)>& end)
      : options_(options),
        begin_(begin),
        program_(program),
        end_(end),
        fibers_(options.world, [this](int rank) { run_program(rank); }),
        memory_(options.world) {}

  Result explore() {
    current = this;
    Result result;
    while (true) {
      ++result.num_runs;
      std::string wrong;
      try {
        if (run()) ++result.num_ends;
      } catch (const Violation& violation) {
        wrong = violation.what();
      }
      if (memory_.has_learned()) {  // steps have changed, so a violation must be found again
        seen_.clear();
        path_.clear();
        result.num_ends = 0;
        continue;
      }
      if (!wrong.empty()) {
        result.violation = wrong + trace_again();
        break;
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
    const int place = memory_.place_of(word);
    if (options_.faults.relaxes && options_.faults.relaxes(word)) order = std::memory_order_relaxed;
    memory_.learn(place, &Knowledge::loaded_by, running());
    if (is_step(place, order)) give_way();
    note_read(place);
    const uint64_t value = visible(place);
    join(is_acquire(order) ? clock() : self().fence_acquirable, memory_[place].released);
    if (memory_.known(place).is_bell) memory_[place].base = value;
    note("load", place, memory_.known(place).is_bell ? 0 : value);
    return value;
  }

  void store(const void* word, uint64_t value, std::memory_order order) {
    const int place = memory_.place_of(word);
    if (options_.faults.relaxes && options_.faults.relaxes(word)) order = std::memory_order_relaxed;
    if (options_.faults.changes) value = options_.faults.changes(word, value);
    memory_.learn(place, &Knowledge::stored_by, running());
    if (order == std::memory_order_relaxed) memory_.learn(place, &Knowledge::has_relaxed_stores);
    if (!options_.buffered && is_step(place, order)) give_way();
    note_write(place);
    Rank& rank = self();
    Pending pending;
    pending.place = place;
    pending.value = value;
    pending.releases = is_release(order);
    pending.released = pending.releases ? clock() : rank.fence_released;
    rank.stored = word;
    rank.last_store = mix(static_cast<uint64_t>(place), value);
    note("store", place, value);
    if (options_.buffered) {
      rank.buffer.push(pending);
    } else {
      apply(pending);
    }
  }

  uint64_t fetch_add(const void* word, uint64_t value) {
    const int place = memory_.place_of(word);
    if (is_mute()) return memory_[place].value;
    memory_.learn(place, &Knowledge::stored_by, running());
    memory_.learn(place, &Knowledge::is_bell);
    drain();
    give_way();
    const uint64_t before = memory_[place].value;
    join(clock(), memory_[place].released);
    join(memory_[place].released, clock());  // continues a release sequence
    memory_[place].value = before + value;
    note("ring", place, 0);
    return before;
  }

  void fence(std::memory_order order) {
    Rank& rank = self();
    const bool is_full = order == std::memory_order_seq_cst;
    // A full fence separates a store from a check: earlier reads only mattered for the store.
    if (is_full) rank.history = mix(rank.base, rank.last_store);
    if (is_full && options_.faults.no_full_fences) return;
    if (is_acquire(order)) join(clock(), rank.fence_acquirable);
    if (is_release(order)) rank.fence_released = clock();
    if (!options_.buffered) return;
    if (is_full) {
      drain();
    } else if (is_release(order)) {
      Pending barrier;
      barrier.is_barrier = true;
      rank.buffer.push(barrier);
    }
  }

  void sleep_on(const void* word, uint64_t value) {
    const int place = memory_.place_of(word);
    drain();  // a system call
    give_way();
    note("sleep on", place, 0);
    if (memory_[place].value != value) return;
    self().sleeps_on = place;
    // An asleep rank only knows that it waits in this call.
    self().history = mix(self().base, static_cast<uint64_t>(place));
    give_way();
    note("woken at", place, 0);
  }

  void forget(uint64_t state) {
    self().history = self().base = mix(state);
    memory_.forget_rings(running());
  }

  void wake(const void* word) {
    const int place = memory_.place_of(word);
    if (is_mute()) return;
    drain();
    give_way();
    note("wake", place, 0);
    for (Rank& rank : ranks_) {
      if (rank.sleeps_on == place) rank.sleeps_on = -1;
    }
  }

  void write_cell(const void* cell, uint64_t value) {
    const int at = memory_.place_of(cell);
    refuse_race("writes", at, "wrote", memory_.unordered_write(at, running()));
    refuse_race("writes", at, "read", memory_.unordered_read(at, running()));
    memory_.record_write(at, running());
    memory_[at].value = value;
    note("write", at, value);
  }

  uint64_t read_cell(const void* cell) {
    const int at = memory_.place_of(cell);
    refuse_race("reads", at, "wrote", memory_.unordered_write(at, running()));
    memory_.record_read(at, running());
    note("read", at, memory_[at].value);
    return memory_[at].value;
  }

 private:
  // A step of the search: the chosen actor, and the alternatives.
  struct Choice {
    int actor;
    std::vector<int> others;
  };
  // Actors: rank r is r; entry i of rank r's buffer is world + 64 * r + i.
  int flush_actor(int rank, size_t entry) const { return options_.world + 64 * rank + static_cast<int>(entry); }

  int running() const { return fibers_.running(); }
  Rank& self() { return ranks_[static_cast<size_t>(running())]; }
  Clock& clock() { return memory_.clock(running()); }
  bool is_mute() { return options_.faults.mutes && options_.faults.mutes(self().stored); }

  bool is_step(int place, std::memory_order order) const {
    const Knowledge& known = memory_.known(place);
    return known.is_shared() && (order != std::memory_order_relaxed || known.is_contended);
  }
  bool counts(int place) const { return memory_.known(place).has_relaxed_stores && !memory_.known(place).is_contended; }
  void note_read(int place) {
    if (!counts(place)) return;
    if (memory_.unordered_write(place, running()) >= 0) return memory_.learn(place, &Knowledge::is_contended);
    memory_.record_read(place, running());
  }
  void note_write(int place) {
    if (!counts(place)) return;
    if (memory_.unordered_write(place, running()) >= 0 || memory_.unordered_read(place, running()) >= 0) {
      return memory_.learn(place, &Knowledge::is_contended);
    }
    memory_.record_write(place, running());
  }

  void apply(const Pending& pending) {
    memory_[pending.place].value = pending.value;
    memory_[pending.place].released = pending.released;
  }

  // Returns the value that this rank sees: its own store, if one is still in the buffer.
  uint64_t visible(int place) {
    const Pending* const own = self().buffer.find(place);
    return own != nullptr ? own->value : memory_[place].value;
  }

  void drain() {
    if (self().buffer.empty()) return;
    self().drains = true;
    give_way();
    self().drains = false;
  }

  void refuse_race(const char* does, int at, const char* did, int other) {
    if (other < 0) return;
    throw Violation("race: rank " + std::to_string(running()) + " " + does + " " + name(at) + ", which rank " +
                    std::to_string(other) + " " + did + " without happening before");
  }
  std::string name(int at) const {
    const std::string text = options_.name ? options_.name(memory_.address(at)) : "";
    return text.empty() ? "place " + std::to_string(at) : text;
  }

  // Notes that the running rank has seen `value`.
  void note(const char* what, int place, uint64_t value) {
    Rank& rank = self();
    rank.history = mix(rank.history, mix(static_cast<uint64_t>(place), value));
    if (is_tracing_) {
      trace_.push_back("rank " + std::to_string(running()) + " " + what + " " + name(place) + " = " +
                       std::to_string(value));
    }
  }

  // Switches from a rank to the search, which resumes it at its turn. Within the replayed prefix, a rank continues
  // directly if the next turn is also its own.
  void give_way() {
    if (position_ < path_.size() && path_[position_].actor == running() && can_run(running())) {
      ++position_;
    } else {
      fibers_.give_way();
    }
    advance();
  }

  // Advances the running rank by a step, whatever it reads there.
  void advance() { self().history = mix(self().history, 1); }

  void run_program(int rank) {
    advance();
    try {
      program_(rank);
    } catch (const Violation& violation) {
      violation_ = violation.what();
    } catch (const std::exception& error) {
      ranks_[static_cast<size_t>(rank)].end = error.what();
    }
    ranks_[static_cast<size_t>(rank)].is_done = true;
  }

  // --- the search ---

  bool can_run(int rank) const {
    const Rank& it = ranks_[static_cast<size_t>(rank)];
    return !it.is_done && it.sleeps_on < 0 && !(it.drains && !it.buffer.empty());
  }

  // Returns actors in the order of the search: the rank that ran last, then the following ranks.
  std::vector<int> enabled() const {
    std::vector<int> actors;
    for (int i = 0; i < options_.world; ++i) {
      const int rank = (last_rank_ + i) % options_.world;
      if (can_run(rank)) actors.push_back(rank);
    }
    for (int rank = 0; rank < options_.world; ++rank) {
      for (const size_t i : ranks_[static_cast<size_t>(rank)].buffer.ready()) actors.push_back(flush_actor(rank, i));
    }
    for (int rank = 0; rank < options_.world && actors.empty(); ++rank) {
      const Rank& it = ranks_[static_cast<size_t>(rank)];
      if (it.sleeps_on >= 0 && it.num_limits < options_.num_limits) actors.push_back(rank);
    }
    if (options_.max_delays >= 0 && num_delays_ >= options_.max_delays && !actors.empty()) actors.resize(1);
    return actors;
  }

  void act(int actor) {
    if (options_.max_delays >= 0 && enabled().front() != actor) ++num_delays_;
    if (actor < options_.world) {
      Rank& rank = ranks_[static_cast<size_t>(actor)];
      if (rank.sleeps_on >= 0) ++rank.num_limits;
      rank.sleeps_on = -1;
      last_rank_ = actor;
      fibers_.resume(actor);
      if (!violation_.empty()) throw Violation(std::exchange(violation_, ""));
      return;
    }
    const int rank = (actor - options_.world) / 64;
    const Pending entry =
        ranks_[static_cast<size_t>(rank)].buffer.take(static_cast<size_t>(actor - options_.world) % 64);
    if (entry.is_barrier) return;
    apply(entry);
    if (is_tracing_) {
      trace_.push_back("rank " + std::to_string(rank) + "'s store to " + name(entry.place) + " = " +
                       std::to_string(entry.value) + " takes effect");
    }
  }

  uint64_t state_hash() {
    memory_.begin_hash();
    uint64_t hash = memory_.hash_of_all();
    for (const Rank& rank : ranks_) {
      uint64_t own = mix(mix(rank.history, rank.last_store), memory_.hash(rank.fence_released));
      own = mix(own, memory_.hash(rank.fence_acquirable));
      own = mix(own, (rank.is_done ? 1U : 0U) + (rank.sleeps_on >= 0 ? 2 : 0) + (rank.drains ? 4 : 0) +
                         8 * static_cast<uint64_t>(rank.num_limits));
      own = mix(own, rank.buffer.hash(memory_));
      hash = mix(hash, own);
    }
    // If delays are counted, states with fewer remaining delays are different states.
    return options_.max_delays < 0 ? hash : mix(hash, static_cast<uint64_t>(last_rank_ * 1000 + num_delays_));
  }

  // Runs the path, then continues until the end or a known state. Returns true if all ranks ended.
  bool run() {
    memory_.clear();
    ranks_.assign(static_cast<size_t>(options_.world), Rank());
    position_ = 0;
    last_rank_ = 0;
    num_delays_ = 0;
    trace_.clear();
    begin_();
    for (int rank = 0; rank < options_.world; ++rank) fibers_.make(rank);
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

  // Returns the last steps of the run that failed.
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
  Fibers fibers_;
  Memory memory_;
  std::vector<Rank> ranks_;
  std::string violation_;

  std::vector<Choice> path_;
  size_t position_ = 0;
  int last_rank_ = 0;
  int num_delays_ = 0;  // choices of another actor than the first
  std::unordered_set<uint64_t> seen_;
  bool is_tracing_ = false;
  std::vector<std::string> trace_;
};

}  // namespace

uint64_t load(const void* word, std::memory_order order) { return current->load(word, order); }
void store(const void* word, uint64_t value, std::memory_order order) { current->store(word, value, order); }
uint64_t fetch_add(const void* word, uint64_t value) { return current->fetch_add(word, value); }
void fence(std::memory_order order) { current->fence(order); }
void sleep_on(const void* word, uint64_t value) { current->sleep_on(word, value); }
void wake(const void* word) { current->wake(word); }
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
