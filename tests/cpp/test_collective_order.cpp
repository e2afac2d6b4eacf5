// The order of collectives: which ones a rank may post without asking its peers.
#include "core/collective_order.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fsdp2x {
namespace {

Collective gather(uint64_t subject, PassKind kind = PassKind::forward) {
  Collective collective;
  collective.subject = subject;
  collective.operation = Operation::all_gather;
  collective.pass.kind = kind;
  collective.segment_bytes = 64;
  return collective;
}

// Posts them in order and returns how many were not expected.
int post(CollectiveOrder& order, const std::vector<uint64_t>& subjects) {
  int num_asked = 0;
  for (const uint64_t subject : subjects) {
    if (!order.expects(gather(subject))) ++num_asked;
    order.add(gather(subject));
  }
  return num_asked;
}

TEST(CollectiveOrder, ExpectsWhatIsRepeated) {
  CollectiveOrder order;
  const std::vector<uint64_t> step{1, 2, 3, 3, 2, 1};
  EXPECT_EQ(post(order, step), 6);
  for (int i = 0; i < 3; ++i) post(order, step);
  EXPECT_EQ(post(order, step), 0);
  EXPECT_EQ(order.num_posted(), 30U);
}

TEST(CollectiveOrder, AUnitThatRunsTwiceIsToldApartByWhatCameBefore) {
  CollectiveOrder order;
  for (int i = 0; i < 4; ++i) post(order, {1, 9, 2, 9, 3, 9});
  EXPECT_EQ(post(order, {1, 9, 2, 9, 3, 9}), 0);
}

TEST(CollectiveOrder, AccumulationIsLearned) {
  std::vector<uint64_t> step;
  for (int micro_batch = 0; micro_batch < 4; ++micro_batch) step.insert(step.end(), {1, 2, 2, 1});
  step.insert(step.end(), {5, 6});
  CollectiveOrder order;
  for (int i = 0; i < 16; ++i) post(order, step);  // longer than the memory
  EXPECT_EQ(post(order, step), 0);
}

// The protocol relies on this property: whatever was posted before, at most one collective is expected next.
TEST(CollectiveOrder, AtMostOneCollectiveIsExpected) {
  std::mt19937 random(0);
  for (int round = 0; round < 50; ++round) {
    CollectiveOrder order, peer;
    for (int i = 0; i < 400; ++i) {
      int num_expected = 0;
      for (uint64_t subject = 0; subject < 4; ++subject) {
        EXPECT_EQ(order.expects(gather(subject)), peer.expects(gather(subject)));
        num_expected += order.expects(gather(subject)) ? 1 : 0;
      }
      EXPECT_LE(num_expected, 1);
      const uint64_t next = random() % 8 < 6 ? static_cast<uint64_t>(i % 3) : random() % 4;
      order.add(gather(next));
      peer.add(gather(next));
    }
  }
}

TEST(CollectiveOrder, EverythingThatRanksMustShareIsInTheTag) {
  const Collective plain = gather(1);
  std::vector<Collective> others(9, plain);
  others[0].subject = 2;
  others[1].operation = Operation::reduce_scatter;
  others[2].pass.kind = PassKind::backward;
  others[3].settings.unit.flags = 4;
  others[4].settings.unit.divide_factor = 2.0;
  others[5].settings.wire_weights = WireFormat::int8;
  others[6].settings.trained = 7;
  others[7].segment_bytes = 128;
  others[8].type = DType::bf16;
  for (size_t i = 0; i < others.size(); ++i) EXPECT_NE(others[i].tag(), plain.tag()) << i;
  EXPECT_EQ(gather(1, PassKind::evaluation).tag(), plain.tag());
}

TEST(CollectiveOrder, PassesAreCountedWhenTheyPostOrLeave) {
  CollectiveOrder order;
  Collective first = gather(1);
  first.pass.number = 1;
  EXPECT_EQ(order.num_passes(first.pass), 1U);
  order.add(first);
  order.add(first);
  EXPECT_EQ(order.recent().back().num_passes, 1U);
  Pass second = first.pass;
  second.number = 2;
  order.leave(second);
  EXPECT_EQ(order.num_passes(second), 2U);
  order.restart();
  EXPECT_EQ(order.num_posted(), 0U);
  EXPECT_FALSE(order.expects(first));
}

}  // namespace
}  // namespace fsdp2x
