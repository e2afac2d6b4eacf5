// Borrowed memory and running reductions, in sizes: which buffer is chosen, what is counted, how many may run.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/buffers.hpp"
#include "core/error.hpp"
#include "core/layout.hpp"
#include "core/reduction_queue.hpp"

namespace fsdp2x {
namespace {

size_t as_asked(int /*id*/, size_t bytes) { return bytes; }

TEST(Buffers, SizesComeInStepsOfASixteenth) {
  EXPECT_EQ(size_class(1), kAlignBytes);
  EXPECT_EQ(size_class(8192), 8192u);
  EXPECT_EQ(size_class(8193), 8704u);
  for (size_t bytes = 1; bytes < 1 << 20; bytes += 977) {
    EXPECT_GE(size_class(bytes), bytes);
    EXPECT_LE(size_class(bytes), bytes + std::max(bytes / 16, kAlignBytes));
  }
}

// Compares with the rule written out plainly, buffer after buffer, over thousands of random calls.
TEST(Buffers, LikeAPlainModel) {
  struct Plain {
    size_t bytes;
    bool is_owned;
    int released_at;
  };
  for (const bool keeps : {false, true}) {
    std::mt19937 random(keeps ? 1 : 2);
    MemoryTally whole, tally(&whole);
    BufferLedger ledger(keeps, &tally);
    std::map<int, Plain> model;
    size_t peak = 0, peak_owned = 0;
    int num_releases = 0;
    for (int call = 0; call < 4000; ++call) {
      std::vector<int> owned;
      for (const auto& [id, buffer] : model) {
        if (buffer.is_owned) owned.push_back(id);
      }
      if (!owned.empty() && random() % 2 == 0) {
        const int id = owned[random() % owned.size()];
        ledger.release(id, [&](int unkept) { ledger.close(unkept); });
        if (keeps) {
          model[id] = {model[id].bytes, false, num_releases++};
        } else {
          model.erase(id);
        }
        continue;
      }
      const size_t bytes = random() % 4 == 0 ? random() % 3 : random() % 50000;
      std::optional<int> chosen;
      for (const auto& [id, buffer] : model) {
        if (buffer.is_owned || buffer.bytes < bytes || buffer.bytes > 2 * size_class(bytes)) continue;
        const auto rank = [&](int one) { return std::pair(model[one].bytes, model[one].released_at); };
        if (!chosen || rank(id) < rank(*chosen)) chosen = id;
      }
      const BufferLedger::Acquired found = ledger.acquire(bytes, as_asked);
      ASSERT_EQ(found.is_new, !chosen) << "call " << call;
      if (chosen) {
        ASSERT_EQ(found.id, *chosen) << "call " << call;
      }
      ASSERT_FALSE(found.is_new && model.contains(found.id)) << "a buffer with memory was given other memory";
      const size_t size = chosen ? model[found.id].bytes : keeps ? size_class(bytes) : bytes;
      model[found.id] = {size, true, 0};
      ASSERT_EQ(ledger.bytes_of(found.id), size);
      size_t total = 0, total_owned = 0;
      for (const auto& [id, buffer] : model) {
        total += buffer.bytes;
        total_owned += buffer.is_owned ? buffer.bytes : 0;
      }
      peak = std::max(peak, total);
      peak_owned = std::max(peak_owned, total_owned);
      ASSERT_EQ(ledger.bytes(), total);
      ASSERT_EQ(ledger.peak_owned_bytes(), peak_owned);
      ASSERT_EQ(ledger.standing_bytes(), keeps ? total : peak_owned);
      ASSERT_EQ(tally.peak_bytes(), peak);
      ASSERT_EQ(whole.peak_bytes(), peak);
    }
  }
}

TEST(Buffers, MemoryThatCannotBeHadChangesNothing) {
  MemoryTally tally;
  BufferLedger ledger(/*keeps=*/true, &tally);
  const auto full = [](int, size_t) -> size_t { throw std::runtime_error("out of memory"); };
  EXPECT_THROW(ledger.acquire(1000, full), std::runtime_error);
  EXPECT_EQ(ledger.num_owned(), 0u);
  EXPECT_EQ(tally.peak_bytes(), 0u);
  EXPECT_EQ(ledger.acquire(1000, as_asked).id, 0);
}

TEST(Buffers, NobodyReleasesTwice) {
  BufferLedger ledger(/*keeps=*/true, nullptr);
  const int id = ledger.acquire(10, as_asked).id;
  ledger.release(id, [](int) {});
  EXPECT_FALSE(ledger.is_owned(id));
  EXPECT_THROW(ledger.release(id, [](int) {}), Error);
}

TEST(ReductionQueue, TwoGoWhereThePeakStays) {
  ReductionQueue queue;
  EXPECT_EQ(queue.allowed_before(1000, std::nullopt), 1u);
  queue.begin(0, 600);
  EXPECT_EQ(queue.allowed_before(600, std::nullopt), 0u) << "more than the largest unit needs";
  EXPECT_EQ(queue.allowed_before(400, std::nullopt), 1u);
  EXPECT_EQ(queue.allowed_before(900, 800), 1u) << "in the place of the slot, flags and pads on top";
  EXPECT_EQ(queue.allowed_before(901, 800), 0u);
  EXPECT_EQ(queue.allowed_beside(), 1u);
}

TEST(ReductionQueue, AsManyAsWereAskedFor) {
  ReductionQueue queue;
  queue.set_max_buffers(3);
  queue.begin(0, 100000);
  EXPECT_EQ(queue.allowed_before(1000, std::nullopt), 2u);
  EXPECT_EQ(queue.allowed_beside(), 3u);
}

TEST(ReductionQueue, SegmentsGoWithTheirBuffer) {
  ReductionQueue queue;
  const uint64_t first = queue.begin(7, 10), second = queue.begin(8, 10);
  EXPECT_TRUE(queue.add_segment(second, 3));
  EXPECT_EQ(queue.pop().buffer, 7);
  EXPECT_FALSE(queue.add_segment(first, 4)) << "it is the caller's to give back";
  EXPECT_EQ(queue.pop().segments, std::vector<int>{3});
  EXPECT_EQ(queue.size(), 0u);
}

}  // namespace
}  // namespace fsdp2x
