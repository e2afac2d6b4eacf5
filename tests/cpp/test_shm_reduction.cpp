// The reduction protocol with real processes: sums over the scratches, units in different order, and late posts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/slots.hpp"
#include "kernels/cpu/kernels.hpp"
#include "ranks.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {
namespace {

using cpu::Joined;
using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::expect_all_ok;
using ranks::expect_error;
using ranks::fresh_options;
using ranks::require;

constexpr int64_t kNumel = 3000;

float gradient(int rank, uint32_t unit, uint64_t epoch) {
  return static_cast<float>(rank + 1) * 0.5f + static_cast<float>(unit) + static_cast<float>(epoch % 16);
}

// The engine's side of one rank: scratches from a private ledger, closed after all ranks have read them.
class Reducer {
 public:
  explicit Reducer(ShmGroup& group) : group_(group), ledger_(ShmGroup::page_bytes()) {}

  void post(uint32_t unit, uint64_t epoch) {
    sweep();
    const Slot slot = ledger_.acquire(kNumel * sizeof(float), "unit");
    auto* data = reinterpret_cast<float*>(group_.scratch_window(group_.rank(), slot.offset, slot.bytes));
    std::fill_n(data, kNumel, gradient(group_.rank(), unit, epoch));
    group_.post_reduction(unit, epoch, 1000 + unit, slot.offset);
    open_.push_back({unit, epoch, slot.id});
  }
  bool join(uint32_t unit, uint64_t epoch, uint64_t position, bool flush) {
    if (group_.join_reduction(unit, epoch, 1000 + unit, position, flush) == Joined::later) return false;
    std::vector<const void*> sources;
    float expected = 0;
    for (int rank = 0; rank < group_.world(); ++rank) {
      const uint64_t offset = group_.peer_scratch_offset(unit, rank);
      sources.push_back(group_.scratch_window(rank, offset, kNumel * sizeof(float)));
      expected += gradient(rank, unit, epoch);
    }
    std::vector<float> sum(kNumel);
    cpu::ReducePiece piece;
    piece.sources = sources.data();
    piece.num_sources = group_.world();
    piece.dst = sum.data();
    piece.numel = kNumel;
    piece.divisor = group_.world();
    cpu::reduce(piece);
    expected /= static_cast<float>(group_.world());
    require(std::all_of(sum.begin(), sum.end(), [&](float x) { return x == expected; }),
            "the mean of unit " + std::to_string(unit) + " in epoch " + std::to_string(epoch));
    group_.consume_reduction(unit, epoch);
    return true;
  }
  void sweep() {
    std::erase_if(open_, [&](const Open& open) {
      if (!group_.reduction_is_consumed(open.unit, open.epoch)) return false;
      ledger_.release(open.slot);
      return true;
    });
  }
  void finish() {
    for (const Open& open : open_) group_.wait_consumed(open.unit, open.epoch);
    sweep();
    require(ledger_.num_owned() == 0, "every scratch is closed");
  }
  size_t num_slots() const { return ledger_.num_slots(); }

 private:
  struct Open {
    uint32_t unit;
    uint64_t epoch;
    int slot;
  };
  ShmGroup& group_;
  SlotLedger ledger_;
  std::vector<Open> open_;
};

class ShmReduction : public testing::TestWithParam<int> {};

TEST_P(ShmReduction, SumsTheScratchesOfAllRanksManyTimes) {
  expect_all_ok(ranks::run(fresh_options(GetParam()), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    Reducer reducer(*group);
    std::mt19937 random(static_cast<unsigned>(options.rank));
    for (uint64_t step = 1; step <= 100; ++step) {
      for (uint32_t unit = 0; unit < 4; ++unit) {
        if (random() % 16 == 0) ranks::sleep_ms(random() % 3);
        reducer.post(unit, step);
        const uint64_t position = step << 32 | unit;
        group->publish_progress(position);
        // One unit behind, as in the engine. All ranks keep the order, so the flush has nothing to do.
        if (unit > 0) require(reducer.join(unit - 1, step, position - 1, false), "in order");
      }
      group->publish_progress(step << 32 | 0xffffffffu);
      require(reducer.join(3, step, step << 32 | 3, true), "a flush waits");
    }
    reducer.finish();
    require(reducer.num_slots() <= 9, "scratches are used again");
  }));
}

// Every rank has a different order. The flush joins what cannot be joined in time, and no rank hangs.
TEST_P(ShmReduction, UnitsInDifferentOrderMeetInTheFlush) {
  expect_all_ok(ranks::run(fresh_options(GetParam()), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    Reducer reducer(*group);
    std::mt19937 random(static_cast<unsigned>(options.rank) + 5);
    std::vector<uint32_t> order(5);
    std::iota(order.begin(), order.end(), 0u);
    for (uint64_t step = 1; step <= 60; ++step) {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<uint32_t> pending;
      uint64_t progress = step << 32;
      for (const uint32_t unit : order) {
        const uint64_t position = step << 32 | unit;
        reducer.post(unit, step);
        progress = std::max(progress, position);
        group->publish_progress(progress);
        if (!reducer.join(unit, step, position, false)) pending.push_back(unit);
        if (random() % 8 == 0) ranks::sleep_ms(1);
      }
      group->publish_progress(step << 32 | 0xffffffffu);
      for (const uint32_t unit : pending) require(reducer.join(unit, step, step << 32 | unit, true), "a flush waits");
    }
    reducer.finish();
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmReduction, testing::Values(2, 3, 4));

// Ranks in different order: each wants a reduction that the other posts only when it has gone on.
TEST(ShmReductionProtocol, APeerThatWaitsForAReductionOfThisRankIsNotWaitedFor) {
  const auto outcomes = ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const auto first = static_cast<uint32_t>(options.rank);
    group->post_reduction(first, 1, 7, 0);
    group->join_reduction(first, 1, 7, 3, false);
    group->post_reduction(1 - first, 1, 7, 4096);
    require(group->join_reduction(first, 1, 7, 3, true) == Joined::ready, "the flush waits");
  });
  expect_all_ok(outcomes);
  for (const auto& outcome : outcomes) EXPECT_LT(outcome.seconds, 5.0);
}

// Units in different order: the peer needs this rank's next gather before it can post, so waiting would never end.
TEST(ShmReductionProtocol, APeerThatWaitsForThisRankIsNotWaitedFor) {
  const auto outcomes = ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const cpu::GatherPost gather = {1, 1, 0, 0, 64};
    const cpu::GatherPost again = {2, 2, 0, 0, 64};
    if (options.rank == 0) {
      group->post_reduction(0, 1, 7, 0);
      require(group->join_reduction(0, 1, 7, 3, false) == Joined::later, "the peer waits for the gather");
      group->post_gather(gather);
      require(group->join_reduction(0, 1, 7, 3, false) == Joined::later, "the peer waits for the slot");
      group->release_slot(0, 1);
      require(group->join_reduction(0, 1, 7, 3, false) == Joined::ready, "the peer goes on");
    } else {
      group->post_gather(gather);
      group->join_gather(gather);
      group->release_slot(0, 1);
      group->acquire_slot(again, 2);
      group->post_reduction(0, 1, 7, 0);
    }
  });
  expect_all_ok(outcomes);
  for (const auto& outcome : outcomes) EXPECT_LT(outcome.seconds, 5.0);
}

TEST(ShmReductionProtocol, DifferentTagsAreAnErrorThatNamesBothSides) {
  const auto outcomes = ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    group->set_unit_name(0, "layers.0");
    const auto tag = static_cast<uint64_t>(40 + options.rank);
    group->post_reduction(0, 1, tag, 0);
    group->join_reduction(0, 1, tag, 0, true);
  });
  expect_error(outcomes[0], {"rank 0 and rank 1 disagree", "reduction #1 of unit 'layers.0'", "40 and 41"});
  expect_error(outcomes[1], {"rank 1 and rank 0 disagree", "reduction #1 of unit 'layers.0'"});
}

TEST(ShmReductionProtocol, MisuseIsRefused) {
  const auto group = ranks::enter(ShmOptions());
  EXPECT_THROW(group->join_reduction(0, 1, 7, 0, true), Error) << "joined before posted";
  group->post_reduction(0, 1, 7, 0);
  EXPECT_THROW(group->wait_consumed(0, 1), Error) << "its own part is not read";
  group->publish_progress(5);
  EXPECT_THROW(group->publish_progress(4), Error) << "progress goes back";
  EXPECT_THROW(group->post_reduction(1u << 20, 1, 7, 0), Error) << "no such unit";
}

TEST(ShmReductionProtocol, WaitingForReadersEndsInOrderOnly) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    for (uint32_t unit = 0; unit < 3; ++unit) group->post_reduction(unit, 1, 7, 0);
    for (uint32_t unit = 0; unit < 3; ++unit) group->join_reduction(unit, 1, 7, 0, true);
    group->consume_reduction(0, 1);
    if (options.rank == 0) {
      for (uint32_t unit = 1; unit < 3; ++unit) group->consume_reduction(unit, 1);
      require(group->wait_consumed_in_order(0, 1, 5), "rank 1 reads unit 0 without more ado");
      require(!group->wait_consumed_in_order(1, 1, 5), "rank 1 is past unit 1");
      require(!group->wait_consumed_in_order(2, 1, 9), "rank 1 waits for a gather of this rank");
      group->post_gather({1, 0, 0, 0, 64});
    } else {
      group->publish_progress(6);
      group->post_gather({1, 0, 0, 0, 64});
      group->join_gather({1, 0, 0, 0, 64});
      for (uint32_t unit = 1; unit < 3; ++unit) group->consume_reduction(unit, 1);
    }
    ranks::meet_all(options);
  }));
}

}  // namespace
}  // namespace fsdp2x
