// Slot ledger: which slot is chosen, what is counted, what is rejected.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "core/slots.hpp"

namespace fsdp2x {
namespace {

constexpr size_t kPage = 4096;

TEST(Slots, AnOwnerMayUseItsSlotAgain) {
  SlotLedger ledger(kPage);
  const Slot first = ledger.acquire(1, "kept");
  const Slot again = ledger.reuse(first.id);
  EXPECT_EQ(again.id, first.id);
  EXPECT_EQ(again.offset, first.offset);
  EXPECT_EQ(again.num_uses, 2u);
  EXPECT_EQ(ledger.num_owned(), 1u);
  ledger.release(first.id);
  EXPECT_THROW(ledger.reuse(first.id), Error);
  EXPECT_EQ(ledger.acquire(1, "next").num_uses, 3u);
}

TEST(Slots, ReusesTheSmallestFreeSlotThatFits) {
  SlotLedger ledger(kPage);
  const int large = ledger.acquire(4 * kPage, "large").id;
  const int middle = ledger.acquire(3 * kPage, "middle").id;
  const int second = ledger.acquire(3 * kPage, "second").id;
  ledger.release(large);
  ledger.release(second);
  ledger.release(middle);
  const Slot slot = ledger.acquire(2 * kPage + 1, "x");
  EXPECT_EQ(slot.id, middle) << "the lowest id among equals";
  EXPECT_EQ(slot.num_uses, 2u);
  EXPECT_EQ(ledger.acquire(2 * kPage + 1, "y").id, second);
  EXPECT_EQ(ledger.acquire(2 * kPage + 1, "z").id, large);
  EXPECT_EQ(ledger.num_slots(), 3u);
}

TEST(Slots, DoesNotWasteASlotMoreThanTwiceAsLarge) {
  SlotLedger ledger(kPage);
  ledger.release(ledger.acquire(4 * kPage, "large").id);
  EXPECT_EQ(ledger.acquire(kPage, "small").id, 1);
  EXPECT_EQ(ledger.acquire(2 * kPage, "half").id, 0);
}

TEST(Slots, AReservedOneIsNobodyElses) {
  SlotLedger ledger(kPage);
  const int free = ledger.acquire(kPage, "a").id;
  ledger.release(free);
  const Slot reserved = ledger.reserve(kPage + 1, "b", kPage);
  EXPECT_EQ(reserved.id, 1);
  EXPECT_EQ(reserved.offset, kPage);
  EXPECT_EQ(reserved.bytes, 2 * kPage);
  EXPECT_EQ(reserved.num_uses, 0u);
  EXPECT_EQ(ledger.reserved_bytes(), 2 * kPage);
  EXPECT_EQ(ledger.arena_bytes(), kPage);
  EXPECT_EQ(ledger.num_owned(), 0u);
  EXPECT_TRUE(ledger.owners().empty());
  EXPECT_EQ(ledger.acquire(2 * kPage, "c").offset, 3 * kPage);
  EXPECT_EQ(ledger.acquire(kPage, "d").id, free);
  EXPECT_THROW(ledger.release(reserved.id), Error);
  EXPECT_THROW(ledger.reserve(0, "e", kPage), Error);
  EXPECT_EQ(ledger.reserve(kPage, "f", 8 * kPage).offset, 8 * kPage);
  EXPECT_EQ(ledger.reserved_bytes(), 6 * kPage);  // including the gap before it
}

TEST(Slots, RefusesNonsense) {
  EXPECT_THROW(SlotLedger(0), Error);
  SlotLedger ledger(kPage);
  EXPECT_THROW(ledger.acquire(0, "a"), Error);
  EXPECT_THROW(ledger.release(0), Error);
  EXPECT_THROW(ledger.release(-1), Error);
  EXPECT_THROW(ledger.slot(0), Error);
  const int id = ledger.acquire(1, "layers.7").id;
  ledger.release(id);
  try {
    ledger.release(id);
    FAIL() << "released twice";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("layers.7"), std::string::npos) << error.what();
  }
}

// Two ledgers agree after the same calls, and live slots never overlap.
TEST(Slots, RandomHistoriesAreDeterministicAndDisjoint) {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    SlotLedger one(kPage);
    SlotLedger two(kPage);
    std::vector<Slot> live;
    for (int step = 0; step < 200; ++step) {
      if (live.empty() || random() % 2 == 0) {
        const size_t bytes = 1 + random() % (20 * kPage);
        const Slot a = one.acquire(bytes, "unit");
        const Slot b = two.acquire(bytes, "unit");
        ASSERT_EQ(a.id, b.id);
        ASSERT_EQ(a.offset, b.offset);
        ASSERT_EQ(a.bytes, b.bytes);
        ASSERT_EQ(a.num_uses, b.num_uses);
        ASSERT_GE(a.bytes, bytes);
        ASSERT_EQ(a.offset % kPage, 0u);
        for (const Slot& other : live) {
          ASSERT_TRUE(a.offset + a.bytes <= other.offset || other.offset + other.bytes <= a.offset);
        }
        live.push_back(a);
      } else {
        const size_t index = random() % live.size();
        one.release(live[index].id);
        two.release(live[index].id);
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(index));
      }
      ASSERT_EQ(one.num_owned(), live.size());
    }
    for (const Slot& slot : live) one.release(slot.id);
    EXPECT_TRUE(one.owners().empty());
  }
}

}  // namespace
}  // namespace fsdp2x
