// Model checking of the shared-memory protocol: its real code, compiled against words whose every access is a step. 2
// and 3 ranks run it in every order. In all orders, no rank reads what is being written, reads give the intended
// values, no rank waits forever, and a rank that diverges from its peers gets an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "model/explorer.hpp"
#include "model/shm_ranks.hpp"
#include "shm/shm_map.hpp"

namespace fsdp2x {
namespace {

using model::Ends;
using model::require;
using model::World;
using Rank = model::ModelRank;

using Program = std::function<void(Rank&)>;
using Judge = std::function<void(const Ends&)>;

// The longest searches (three programs over buffered stores) only run in full runs and under sanitizers, where time
// matters less.
bool searches_all() {
#ifdef __SANITIZE_ADDRESS__
  return true;
#else
  return std::getenv("FSDP2X_FULL") != nullptr;
#endif
}

// Ranks, and how they are explored.
struct Setting {
  int num_ranks = 2;
  bool buffered = false;
  int max_delays = -1;
  int num_limits = 0;
};
std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.num_ranks << (setting.buffered ? "buffered" : "");
}

void all_end_well(const Ends& ends) {
  for (const std::string& end : ends) require(end.empty(), "no error, got: " + end);
}
Judge all_hear_of(const std::string& text) {
  return [text](const Ends& ends) {
    for (const std::string& end : ends) require(end.find(text) != end.npos, "'" + text + "' on every rank: " + end);
  };
}

// `faults` may name words, so it is made after they have addresses.
model::Result explore(const Setting& setting, const Program& program, const Judge& end = all_end_well,
                      const std::function<model::Faults(const World&)>& faults = nullptr) {
  const auto world = std::make_unique<World>(setting.num_ranks);
  std::vector<std::unique_ptr<Rank>> ranks;
  model::Options options;
  options.world = setting.num_ranks;
  options.buffered = setting.buffered;
  options.max_delays = setting.max_delays;
  options.num_limits = setting.num_limits;
  options.max_states = 3'000'000;
  options.name = [&](const void* address) { return model::name_of(*world, setting.num_ranks, address); };
  if (faults) options.faults = faults(*world);
  const auto begin = [&] {
    ranks.clear();
    for (int rank = 0; rank < setting.num_ranks; ++rank) {
      ranks.push_back(std::make_unique<Rank>(*world, rank, setting.num_ranks));
    }
  };
  model::Result result = model::explore(
      options, begin, [&](int rank) { program(*ranks[static_cast<size_t>(rank)]); }, end);
  testing::Test::RecordProperty("states", std::to_string(result.num_states));
  std::printf("[          ] %llu states, %llu runs\n", static_cast<unsigned long long>(result.num_states),
              static_cast<unsigned long long>(result.num_runs));
  return result;
}

class ShmModel : public testing::TestWithParam<Setting> {
 protected:
  static void holds(const Program& program, const Judge& end = all_end_well, int num_limits = 0, int max_delays = 2) {
    Setting setting = GetParam();
    if (setting.buffered && max_delays == 1 && !searches_all()) GTEST_SKIP() << "seconds; runs with FSDP2X_FULL=1";
    setting.num_limits = num_limits;
    setting.max_delays = std::min(setting.max_delays, max_delays);
    const model::Result result = explore(setting, program, end);
    EXPECT_EQ(result.violation, "");
    EXPECT_TRUE(result.is_complete) << "more than " << result.num_states << " states";
    EXPECT_GT(result.num_ends, 0U);
  }
};

// --- programs ---

// One slot, used again by each gather.
void gather_in_turn(Rank& rank) {
  for (uint32_t unit = 0; unit < 2; ++unit) rank.gather(unit);
}
// The next gather begins before this one ends, and entries of the ring are used again.
void gather_ahead(Rank& rank) {
  Rank::Gather last = rank.begin_gather(0);
  for (uint32_t unit = 1; unit < 5; ++unit) {
    const Rank::Gather next = rank.begin_gather(unit);
    rank.finish_gather(last);
    rank.release_gather(last);
    last = next;
  }
  rank.finish_gather(last);
  rank.release_gather(last);
}
// A prefetched gather is canceled without a check, and its slot is used again.
void cancel_gather(Rank& rank) {
  rank.release_gather(rank.begin_gather(0));
  rank.gather(1);
}
// A step reduces unit 1, then unit 0. The second reduction is posted before the first is joined. After `num_steps`,
// scratches and records are used again.
void reduce(Rank& rank, int num_steps) {
  uint64_t position = 0;
  for (int step = 0; step < num_steps; ++step) {
    std::deque<Rank::Reduction> pending;
    for (const uint32_t unit : {1U, 0U}) {
      const Rank::Reduction reduction = rank.post_reduction(unit, ++position);
      if (!pending.empty() && rank.finish_reduction(pending.back(), false)) pending.pop_back();
      pending.push_back(reduction);
    }
    rank.flush(++position, pending);
  }
}
// Rank 0 does not use unit 1 in its backward. It posts it in its flush, and no rank waits for it before.
void reduce_without_a_unit(Rank& rank) {
  std::deque<Rank::Reduction> pending;
  if (rank.rank() != 0) {
    pending.push_back(rank.post_reduction(1, 1));
    if (rank.finish_reduction(pending.back(), false)) pending.pop_back();
  }
  pending.push_back(rank.post_reduction(0, 2));
  if (rank.rank() == 0) pending.push_back(rank.post_reduction(1, 2));
  rank.flush(3, pending);
}

// Ranks give up a step after the same posts, as reset does: a gather that was begun, and a reduction that
// some ranks join and rank 0 does not. The next step takes slot, scratch, and record again.
void reset_and_go_on(Rank& rank) {
  rank.release_gather(rank.begin_gather(0));
  const Rank::Reduction given_up = rank.post_reduction(1, 1);
  if (rank.rank() == 0) {
    rank.consume(given_up);
  } else {
    rank.finish_reduction(given_up, true);
  }
  std::deque<Rank::Reduction> pending = {rank.post_reduction(1, 2)};
  rank.flush(3, pending);
}

// Gathers of resting rows. Each is read, a step changes the rows, and the next one shows the new rows. A rank that is
// ahead keeps its step private until then.
void gather_and_step(Rank& rank) {
  for (int step = 0; step < 3; ++step) {
    const Rank::Gather gather = rank.begin_resting_gather(0);
    rank.finish_resting_gather(gather);
    rank.release_resting_gather(gather);
    rank.step();
  }
}
// Rank 0 alone cancels a prefetched gather after its peers have it. Then all step and gather.
void give_up_and_step(Rank& rank) {
  const Rank::Gather gather = rank.begin_resting_gather(0);
  if (rank.rank() != 0) rank.finish_resting_gather(gather);
  rank.release_resting_gather(gather);
  rank.step();
  const Rank::Gather next = rank.begin_resting_gather(0);
  rank.finish_resting_gather(next);
  rank.release_resting_gather(next);
}

TEST_P(ShmModel, RowsThatRestAreStepped) { holds(gather_and_step, all_end_well, 0, 1); }

TEST_P(ShmModel, RowsThatRestAreGivenUp) { holds(give_up_and_step); }

TEST_P(ShmModel, ASlotIsUsedAgain) { holds(gather_in_turn); }

TEST_P(ShmModel, TheRingGoesRound) { holds(gather_ahead, all_end_well, 0, 1); }

TEST_P(ShmModel, AGatherIsCanceled) { holds(cancel_gather); }

TEST_P(ShmModel, UnitsAreReduced) {
  holds([](Rank& rank) { reduce(rank, 1); });
}

TEST_P(ShmModel, AUnitIsReducedInTheFlush) { holds(reduce_without_a_unit); }

TEST_P(ShmModel, AStepIsReset) { holds(reset_and_go_on, all_end_well, 0, 1); }

// Rank 0 cannot continue in the middle of a gather that the others wait for. They only check for that after each sleep,
// so the limit of a sleep (50 ms) may have to end it.
TEST_P(ShmModel, ARankFails) {
  holds(
      [](Rank& rank) {
        if (rank.rank() != 0) return rank.gather(0);
        rank.protocol().fail("no memory");
        throw Error("no memory");
      },
      all_hear_of("no memory"), 2);
}

TEST_P(ShmModel, ARankLeaves) {
  holds(
      [](Rank& rank) {
        if (rank.rank() != 0) return rank.gather(0);
        rank.protocol().close();
        throw Error("it has closed its shared-memory group");
      },
      all_hear_of("closed its shared-memory group"), 2);
}

TEST_P(ShmModel, UnitsRunInDifferentOrder) {
  holds([](Rank& rank) { rank.gather(static_cast<uint32_t>(rank.rank())); }, all_hear_of("in different order"));
}

// All orders of two ranks under both memory models. Three ranks run in order and with two delays only (the ring: one),
// because all orders of three are millions of states for a single gather.
INSTANTIATE_TEST_SUITE_P(Ranks, ShmModel, testing::Values(Setting{2, false}, Setting{2, true}, Setting{3, false, 2}),
                         testing::PrintToStringParamName());

// --- planted faults: each must be found ---

class ShmModelFault : public testing::TestWithParam<int> {
 protected:
  static Setting in_order() { return {GetParam(), false, GetParam() == 2 ? -1 : 2}; }
};

template <class Get>
std::function<bool(const void*)> words(const World& world, const Get& get) {
  return [&world, get](const void* address) {
    auto* const control = world.bytes();
    for (int rank = 0; rank < cpu::kMaxRanks && rank < world.num_ranks; ++rank) {
      if (get(world.map, control, rank) == address) return true;
    }
    return false;
  };
}
std::function<bool(const void*)> num_posted(const World& world) {
  return words(world, [](const auto& map, auto* control, int rank) { return &map.state(control, rank).num_posted; });
}
std::function<bool(const void*)> released(const World& world) {
  return words(world, [](const auto& map, auto* control, int rank) { return &map.released(control, rank, 0); });
}
std::function<bool(const void*)> posted(const World& world) {
  return words(world, [](const auto& map, auto* control, int rank) { return &map.unit(control, rank, 1).posted; });
}
std::function<bool(const void*)> consumed(const World& world) {
  return words(world, [](const auto& map, auto* control, int rank) { return &map.unit(control, rank, 1).consumed; });
}
model::Faults relaxing(std::function<bool(const void*)> words) {
  model::Faults faults;
  faults.relaxes = std::move(words);
  return faults;
}
model::Faults muting(std::function<bool(const void*)> words) {
  model::Faults faults;
  faults.mutes = std::move(words);
  return faults;
}
model::Faults one_early(std::function<bool(const void*)> words) {
  model::Faults faults;
  faults.changes = [words = std::move(words)](const void* word, uint64_t value) {
    return words(word) ? value + 1 : value;
  };
  return faults;
}
void expect_found(const model::Result& result, const std::string& text) {
  EXPECT_NE(result.violation.find(text), result.violation.npos) << "got: " << result.violation;
}

// Rank 0 releases its use of the slot, including rows, before it has read the peers' rows.
void release_before_reading(Rank& rank) {
  const Rank::Gather gather = rank.begin_gather(0);
  if (rank.rank() == 0) rank.release_gather(gather);
  rank.finish_gather(gather);
  if (rank.rank() != 0) rank.release_gather(gather);
  rank.gather(1);
}

TEST_P(ShmModelFault, AReleaseOfASlotIsNoRelease) {
  expect_found(explore(in_order(), gather_in_turn, all_end_well, [](const World& w) { return relaxing(released(w)); }),
               "race: rank");
}
TEST_P(ShmModelFault, APostOfAReductionIsNoRelease) {
  const auto program = [](Rank& rank) { reduce(rank, 1); };
  expect_found(explore(in_order(), program, all_end_well, [](const World& w) { return relaxing(posted(w)); }),
               "race: rank");
}
// A later ring would make up for a missing wake-up, so the programs end at that point.
TEST_P(ShmModelFault, APostWakesNobody) {
  const auto program = [](Rank& rank) { rank.finish_gather(rank.begin_gather(0)); };
  expect_found(explore(in_order(), program, all_end_well, [](const World& w) { return muting(num_posted(w)); }),
               "deadlock");
}
TEST_P(ShmModelFault, AReleaseOfASlotWakesNobody) {
  const auto program = [](Rank& rank) {
    rank.gather(0);
    if (rank.rank() == 0) rank.begin_gather(1);
  };
  expect_found(explore(in_order(), program, all_end_well, [](const World& w) { return muting(released(w)); }),
               "deadlock");
}
TEST_P(ShmModelFault, AConsumedReductionWakesNobody) {
  const auto program = [](Rank& rank) {
    const Rank::Reduction reduction = rank.post_reduction(1, 1);
    rank.finish_reduction(reduction, true);
    rank.forget();
    rank.protocol().wait_consumed(reduction.unit, reduction.epoch);
  };
  expect_found(explore(in_order(), program, all_end_well, [](const World& w) { return muting(consumed(w)); }),
               "deadlock");
}
TEST_P(ShmModelFault, ASlotIsReleasedOneUseEarly) {
  const auto program = [](Rank& rank) {
    for (uint32_t unit = 0; unit < 3; ++unit) rank.gather(unit);
  };
  expect_found(explore(in_order(), program, all_end_well, [](const World& w) { return one_early(released(w)); }),
               "rows");
}
TEST_P(ShmModelFault, AStepDoesNotAskWhoReads) {
  const auto program = [](Rank& rank) {
    const Rank::Gather gather = rank.begin_resting_gather(0);
    rank.finish_resting_gather(gather);
    rank.release_resting_gather(gather);
    rank.step(/*asks=*/false);
  };
  expect_found(explore(in_order(), program), "race: rank");
}
TEST_P(ShmModelFault, RowsThatRestAreReleasedOneUseEarly) {
  expect_found(
      explore(in_order(), gather_and_step, all_end_well, [](const World& w) { return one_early(released(w)); }),
      "rows");
}
TEST_P(ShmModelFault, ASlotIsReleasedBeforeItIsRead) {
  expect_found(explore(in_order(), release_before_reading), "rows");
}
// Only numbers pair reductions. A rank that leaves one out, for example by an exception before its post, never matches
// its peers again. Therefore Root keeps exceptions of hooks until every rank has posted.
TEST_P(ShmModelFault, AReductionIsLeftOut) {
  const auto program = [](Rank& rank) {
    if (rank.rank() != 0) rank.consume(rank.post_reduction(1, 1));
    std::deque<Rank::Reduction> pending = {rank.post_reduction(1, 2)};
    rank.flush(3, pending);
  };
  expect_found(explore(in_order(), program), "deadlock");
}
TEST_P(ShmModelFault, AnEpochIsConsumedOneEarly) {
  const auto program = [](Rank& rank) {
    for (uint64_t step = 1; step <= 3; ++step) {
      std::deque<Rank::Reduction> pending = {rank.post_reduction(1, 2 * step)};
      rank.flush(2 * step + 1, pending);
    }
  };
  expect_found(explore(in_order(), program, all_end_well, [](const World& w) { return one_early(consumed(w)); }),
               "of rank");
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmModelFault, testing::Values(2, 3),
                         [](const auto& info) { return std::to_string(info.param); });

// Only the buffered model shows these: the ring's entries are no cells, and stores overtake reads.
TEST(ShmModelBuffer, APostIsNoRelease) {
  expect_found(explore({2, true}, gather_in_turn, all_end_well, [](const World& w) { return relaxing(num_posted(w)); }),
               "no error, got: shared memory: rank");
}

TEST(ShmModelBuffer, NoFullFenceLosesAWakeUp) {
  const auto faults = [](const World&) {
    model::Faults none;
    none.no_full_fences = true;
    return none;
  };
  const auto program = [](Rank& rank) { rank.finish_gather(rank.begin_gather(0)); };
  expect_found(explore({2, true, 2}, program, all_end_well, faults), "deadlock");
}

}  // namespace
}  // namespace fsdp2x

#if defined(__SANITIZE_ADDRESS__)
// A run that meets a known state is dropped in place, together with what its stacks own.
extern "C" const char* __asan_default_options() { return "detect_leaks=0:detect_stack_use_after_return=0"; }
#endif
