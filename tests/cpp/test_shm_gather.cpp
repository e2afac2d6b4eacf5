// The gather protocol with real processes: data, isolation, and every failure of a peer.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/slots.hpp"
#include "ranks.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {
namespace {

using cpu::GatherPost;
using cpu::GatherWindow;
using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::expect_all_ok;
using ranks::expect_error;
using ranks::fresh_options;
using ranks::require;

// Uses a unit as the engine does: slots from a ledger, writes through the shared view, reads through the isolated one.
class Unit {
 public:
  Unit(ShmGroup& group, SlotLedger& ledger, uint32_t index, size_t rows_bytes)
      : group_(group), ledger_(ledger), index_(index), rows_bytes_(rows_bytes) {
    group.set_unit_name(index, "layers." + std::to_string(index));
  }
  void begin(uint64_t sequence) {
    const size_t bytes = rows_bytes_ * static_cast<size_t>(group_.world());
    slot_ = ledger_.acquire(bytes, "unit");
    window_ = group_.gather_window(slot_.offset, slot_.bytes);
    post_ = {sequence, index_, static_cast<uint32_t>(slot_.id), slot_.offset, bytes};
    group_.acquire_slot(post_, slot_.num_uses);
    uint8_t* rows = reinterpret_cast<uint8_t*>(window_.shared) + rows_bytes_ * static_cast<size_t>(group_.rank());
    std::memset(rows, value(group_.rank()), rows_bytes_);
    group_.post_gather(post_);
  }
  void finish() {
    group_.join_gather(post_);
    for (int rank = 0; rank < group_.world(); ++rank) {
      const auto* rows = reinterpret_cast<const uint8_t*>(window_.isolated) + rows_bytes_ * static_cast<size_t>(rank);
      for (size_t i = 0; i < rows_bytes_; i += 61) {
        require(rows[i] == value(rank), "gather #" + std::to_string(post_.sequence) + " byte " + std::to_string(i) +
                                            " of rank " + std::to_string(rank));
      }
    }
  }
  void release() {
    group_.release_slot(static_cast<uint32_t>(slot_.id), slot_.num_uses);
    ledger_.release(slot_.id);
  }

 private:
  uint8_t value(int rank) const {
    return static_cast<uint8_t>(post_.sequence * 31 + index_ * 7 + static_cast<uint64_t>(rank) * 101);
  }

  ShmGroup& group_;
  SlotLedger& ledger_;
  uint32_t index_;
  size_t rows_bytes_;
  Slot slot_;
  GatherWindow window_;
  GatherPost post_;
};

class ShmGather : public testing::TestWithParam<int> {};

// Four units of different size, the next one gathered ahead, and random delays of ranks.
TEST_P(ShmGather, GivesTheRowsOfEveryRankManyTimes) {
  expect_all_ok(ranks::run(fresh_options(GetParam()), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    SlotLedger ledger(ShmGroup::page_bytes());
    std::vector<Unit> units;
    for (uint32_t i = 0; i < 4; ++i) units.emplace_back(*group, ledger, i, 3000 + 9000 * i);
    std::mt19937 random(static_cast<unsigned>(options.rank));
    uint64_t sequence = 0;
    units[0].begin(++sequence);
    for (int step = 0; step < 150; ++step) {
      for (size_t i = 0; i < units.size(); ++i) {
        if (random() % 32 == 0) ranks::sleep_ms(random() % 3);
        units[(i + 1) % units.size()].begin(++sequence);
        units[i].finish();
        if (random() % 32 == 0) ranks::sleep_ms(random() % 3);
        units[i].release();
      }
    }
    units[0].finish();
    units[0].release();
    require(ledger.num_owned() == 0, "every slot is released");
    require(ledger.num_slots() <= 6, "slots are used again");
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmGather, testing::Values(2, 3, 4));

TEST(ShmGatherProtocol, ThousandsOfGathersMayBeOpen) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    for (int round = 0; round < 3; ++round) {
      const uint64_t first = static_cast<uint64_t>(round) * 2000 + 1;
      for (uint64_t i = 0; i < 2000; ++i) group->post_gather({first + i, static_cast<uint32_t>(i), 0, 0, first + i});
      for (uint64_t i = 0; i < 2000; ++i) group->join_gather({first + i, static_cast<uint32_t>(i), 0, 0, first + i});
    }
  }));
}

TEST(ShmGatherProtocol, CompletenessIsSeenWithoutWaiting) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const GatherPost post = {1, 0, 0, 0, 64};
    if (options.rank == 0) {
      group->post_gather(post);
      require(!group->gather_is_complete(post), "the peer has not posted");
      ranks::meet_all(options);
      ranks::meet_all(options);
      require(group->gather_is_complete(post), "the peer has posted");
    } else {
      ranks::meet_all(options);
      group->post_gather(post);
      ranks::meet_all(options);
    }
  }));
}

// A weight written in place: only the writer sees it, until its pages are dropped.
TEST(ShmGatherProtocol, WritesThroughTheIsolatedViewStayPrivate) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const size_t page = ShmGroup::page_bytes();
    const GatherWindow window = group->gather_window(0, 4 * page);
    const std::byte gathered{10};
    const std::byte written{20};
    const std::byte gathered_again{30};
    if (options.rank == 0) std::memset(window.shared, 10, 4 * page);
    ranks::meet_all(options);
    require(window.isolated[page] == gathered && window.isolated[3 * page] == gathered, "the gathered bytes");
    ranks::meet_all(options);
    if (options.rank == 0) window.isolated[page + 5] = written;
    ranks::meet_all(options);
    if (options.rank == 0) require(window.isolated[page + 5] == written, "the writer sees its write");
    if (options.rank == 1) require(window.isolated[page + 5] == gathered, "the peer does not");
    require(window.shared[page + 5] == gathered, "the shared view does not");
    ranks::meet_all(options);
    if (options.rank == 1) std::memset(window.shared, 30, 4 * page);
    ranks::meet_all(options);
    if (options.rank == 0) {
      require(window.isolated[page + 5] == written, "a private page is stale");
      require(window.isolated[0] == gathered_again, "an untouched page is fresh");
      group->discard_private_pages(window.isolated, 4 * page);
    }
    require(window.isolated[page + 5] == gathered_again, "fresh after the pages were dropped");
  }));
}

TEST(ShmGatherProtocol, PeersMayNotWriteAScratch) {
  const auto outcomes = ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    if (options.rank == 1) {
      ::signal(SIGSEGV, [](int) { ::_exit(9); });
      group->scratch_window(0, 0, 4096)[0] = std::byte{1};
    }
    ranks::sleep_ms(100);
  });
  EXPECT_EQ(outcomes[1].exit_code, 9);
}

TEST(ShmGatherProtocol, AnotherOrderOfUnitsIsAnErrorThatNamesBothSides) {
  const auto outcomes = ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    group->set_unit_name(0, "encoder");
    group->set_unit_name(1, "decoder");
    const GatherPost post = {1, static_cast<uint32_t>(options.rank), 0, 0, 4096};
    group->post_gather(post);
    group->join_gather(post);
  });
  expect_error(outcomes[0], {"rank 0 is in all-gather #1 of unit 'encoder'",
                             "rank 1 in all-gather #1 of unit 'decoder'", "slot 0", "4096 bytes", "different order"});
  expect_error(outcomes[1],
               {"rank 1 is in all-gather #1 of unit 'decoder'", "rank 0 in all-gather #1 of unit 'encoder'"});
}

TEST(ShmGatherProtocol, WhatAPeerPostedBeforeItLeftStillCounts) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    auto group = ranks::enter(options);
    const GatherPost post = {1, 0, 0, 0, 64};
    group->post_gather(post);
    if (options.rank == 1) return;
    ranks::sleep_ms(200);
    group->join_gather(post);
  }));
}

TEST(ShmGatherProtocol, EveryWaitHasATimeout) {
  const auto outcome = ranks::run_alone(0.3, [](ShmGroup& group) {
    group.set_unit_name(2, "head");
    group.post_gather({1, 2, 0, 0, 64});
    group.join_gather({1, 2, 0, 0, 64});
  });
  expect_error(outcome,
               {"rank 0 waited 0.3 s for rank 1 (pid ", "all-gather #1 of unit 'head'", "has not begun", "`timeout`"});
}

TEST(ShmGatherProtocol, ASlotThatIsNotReleasedTimesOut) {
  const auto outcome = ranks::run_alone(0.3, [](ShmGroup& group) { group.acquire_slot({2, 0, 5, 0, 64}, 2); });
  expect_error(outcome, {"the release of slot 5", "all-gather #2"});
}

// A sleeper checks by itself every 50 ms, but it must not need to.
TEST(ShmGatherProtocol, ASleepingRankIsWoken) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    double shortest_s = 1.0;
    for (uint64_t sequence = 1; sequence <= 20; ++sequence) {
      const GatherPost post = {sequence, 0, 0, 0, 64};
      ranks::meet_all(options);
      const auto start = std::chrono::steady_clock::now();
      if (options.rank == 1) ranks::sleep_ms(8);  // long enough for the other one to fall asleep
      group->post_gather(post);
      group->join_gather(post);
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      shortest_s = std::min(shortest_s, waited.count());
    }
    if (options.rank == 0) require(shortest_s < 0.04, "woken after " + std::to_string(shortest_s) + " s");
  }));
}

TEST(ShmGatherProtocol, AWaitCanBeInterrupted) {
  const ranks::Gate told;
  const auto outcomes = ranks::run(fresh_options(2), [&](const ShmOptions& options) {
    ShmOptions mine = options;
    int calls = 0;
    bool armed = false;
    mine.on_wait = [&] {
      if (armed && ++calls == 3) throw Error("interrupted");
    };
    const auto group = ranks::enter(mine);
    if (options.rank == 1) {
      told.wait();
      return;
    }
    const auto opening = told.open_at_end();
    armed = true;
    group->join_gather({1, 0, 0, 0, 64});
  });
  expect_error(outcomes[0], {"interrupted"});
}

}  // namespace
}  // namespace fsdp2x
