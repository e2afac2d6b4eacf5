// Gather plans over worlds of any size. With memory copies in place of collectives, the full tensors come out, and
// every rank's start is aligned.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/gather_plan.hpp"
#include "whole_tensors.hpp"

namespace fsdp2x {
namespace {

// Shapes whose chunks are aligned only at some worlds: all dtypes, uneven, empty, and sharded along dim 1.
std::vector<ParamShape> shapes() {
  std::vector<ParamShape> all(11);
  all[0] = {.outer = 1, .dim = 64, .inner = 96, .compute = DType::bf16};
  all[1] = {.outer = 1, .dim = 50, .inner = 24, .compute = DType::bf16};
  all[2] = {.outer = 1, .dim = 50, .inner = 7, .compute = DType::bf16};
  all[3] = {.outer = 4, .dim = 210, .inner = 3, .compute = DType::bf16, .reduce = DType::bf16};
  all[4] = {.outer = 1, .dim = 2, .inner = 512};
  all[5] = {.outer = 1, .dim = 0, .inner = 9};
  all[6] = {.outer = 1, .dim = 33, .inner = 4, .orig = DType::f64, .compute = DType::f64, .reduce = DType::f64};
  all[7] = {.outer = 1, .dim = 31, .inner = 8, .in_slot = false};
  all[8] = {.outer = 1, .dim = 105, .inner = 1};
  all[9] = {.outer = 3, .dim = 60, .inner = 8, .compute = DType::bf16, .reduce = DType::bf16};
  all[10] = {.outer = 5, .dim = 64, .inner = 12, .reduce = DType::bf16};
  return all;
}

class GatherWorld : public testing::TestWithParam<std::tuple<int, size_t>> {};

// Simulates collectives: every rank's chunk and segment appears at all ranks.
TEST_P(GatherWorld, WholeTensorsComeOut) {
  const auto [world, pack_below] = GetParam();
  std::vector<Layout> layouts;
  std::vector<Bytes> slots;
  std::vector<Bytes> stagings;
  for (int rank = 0; rank < world; ++rank) {
    layouts.emplace_back(shapes(), world, rank, /*whole_chunks=*/true);
    const GatherPlan plan = plan_gather(layouts.back(), pack_below);
    const Bytes pool = shard_pool(layouts.back());
    slots.emplace_back(layouts.back().slot_bytes(), std::byte{0xEE});
    stagings.emplace_back(plan.segment_bytes * static_cast<size_t>(world), std::byte{0xEE});
    cpu::run_copies(plan.shard_to_slot, pool.data(), slots.back().data());
    cpu::run_copies(plan.shard_to_segment, pool.data(),
                    stagings.back().data() + static_cast<size_t>(rank) * plan.segment_bytes);
  }
  const GatherPlan plan = plan_gather(layouts[0], pack_below);
  for (int from = 0; from < world; ++from) {
    for (const DirectGather& one : plan.direct) {
      const size_t at = one.slot_offset + static_cast<size_t>(from) * one.chunk_bytes;
      ASSERT_LE(at + one.chunk_bytes, slots[0].size());
      if (from > 0) std::memcpy(slots[0].data() + at, slots[static_cast<size_t>(from)].data() + at, one.chunk_bytes);
    }
    const size_t at = static_cast<size_t>(from) * plan.segment_bytes;
    if (from > 0)
      std::memcpy(stagings[0].data() + at, stagings[static_cast<size_t>(from)].data() + at, plan.segment_bytes);
  }
  cpu::run_copies(plan.staging_to_slot, stagings[0].data(), slots[0].data());
  expect_whole(layouts[0], slots[0]);
}

// At worlds of 3, 5, 6, and 7, most row counts leave odd chunks.
TEST_P(GatherWorld, EveryRankStartsAligned) {
  const auto [world, pack_below] = GetParam();
  const Layout layout(shapes(), world, world - 1, /*whole_chunks=*/true);
  const GatherPlan plan = plan_gather(layout, pack_below);
  EXPECT_EQ(plan.segment_bytes % kAlignBytes, 0U);
  EXPECT_EQ(plan_gather(layout, kPackEverything).segment_bytes, layout.gather_segment_bytes());
  for (const DirectGather& one : plan.direct) {
    const ParamPlace& place = layout.params()[one.param];
    EXPECT_TRUE(place.shape.outer == 1 || place.shape.dim % world == 0);
    const auto block = static_cast<size_t>(place.shape.dim * place.shape.inner);
    EXPECT_GE(block * dtype_bytes(place.shape.compute), pack_below);
    for (int rank = 0; rank < world; ++rank) {
      const size_t start = one.slot_offset + static_cast<size_t>(rank) * one.chunk_bytes;
      EXPECT_EQ(start % kCollectiveAlignBytes, 0U) << "parameter " << one.param << ", rank " << rank;
      // A short or empty rank's chunk ends inside the parameter's own place.
      const size_t next = one.param + 1 < layout.params().size() ? layout.params()[one.param + 1].slot_offset : 0;
      if (next > one.slot_offset) {
        EXPECT_LE(start + one.chunk_bytes, next);
      }
    }
  }
  for (const Layout* one : {&layout}) {
    EXPECT_EQ(one->reduce_segment_bytes() % kAlignBytes, 0U);
    for (const ParamPlace& place : one->params()) EXPECT_EQ(place.reduce_segment_offset % kAlignBytes, 0U);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, GatherWorld,
                         testing::Combine(testing::Values(1, 2, 3, 4, 5, 6, 7, 8, 64),
                                          testing::Values(size_t{0}, size_t{2048}, kPackEverything)));

// A device's plan for a unit of many experts must not grow with the ranks.
TEST(GatherPlan, RowsOfAllRanksAreOneCopyAndThoseOfAShortOneAnother) {
  const std::vector<ParamShape> experts(384, {.outer = 1, .dim = 769, .inner = 16, .compute = DType::bf16});
  for (const int world : {2, 8, 512}) {
    const GatherPlan plan = plan_gather(Layout(experts, world, 0, /*whole_chunks=*/true), size_t{1} << 40);
    EXPECT_LE(plan.staging_to_slot.size(), 2 * experts.size()) << world << " ranks";
  }
}

TEST(GatherPlan, LargeAlignedParametersGoStraightIntoTheSlot) {
  const GatherPlan all = plan_gather(Layout(shapes(), 5, 0, true), 0);
  std::vector<size_t> direct;
  for (const DirectGather& one : all.direct) direct.push_back(one.param);
  // 1: 10 rows of 48 bytes. 2: 10 rows of 14 bytes, no multiple of 16. 3: cut along dim 1. 4: 1 row of 2048 bytes,
  // three ranks have none. 6: 7 rows of 32 bytes. 8: 21 rows of 4 bytes. 9: of each block 12 rows of 16 bytes. 10: cut
  // along dim 1 unevenly.
  EXPECT_EQ(direct, (std::vector<size_t>{0, 1, 4, 6, 9, 9, 9}));
  EXPECT_EQ(all.direct[2].chunk_bytes, 2048U);
  EXPECT_TRUE(plan_gather(Layout(shapes(), 5, 0, true), kPackBelowBytes).direct.empty());
}

TEST(GatherPlan, ACpuGathersInPlaceOnlyIfMostOfTheGroupIs) {
  const ParamShape large = {.outer = 1, .dim = 1024, .inner = 1024};
  const ParamShape small = {.outer = 1, .dim = 900, .inner = 256};
  for (const size_t num_small : {size_t{3}, size_t{100}}) {
    std::vector<ParamShape> params(num_small, small);
    params.push_back(large);
    const Layout layout(params, 2, 0);
    EXPECT_EQ(plan_gather(layout, kPackBelowBytes).direct.size(), 1U);
    const GatherPlan plan = plan_gather_on_cpu(layout, kPackBelowBytes);
    EXPECT_EQ(plan.direct.size(), num_small == 3 ? 1U : 0U);
    EXPECT_TRUE(plan.direct.empty() || 2 * 2 * plan.segment_bytes <= layout.slot_bytes());
  }
}

TEST(GatherPlan, WithoutRoomForWholeChunksOnlyEvenParametersAreDirect) {
  const GatherPlan plan = plan_gather(Layout(shapes(), 5, 0), 0);
  ASSERT_EQ(plan.direct.size(), 4U);
  EXPECT_EQ(plan.direct[0].param, 1U);
  for (size_t block = 0; block < 3; ++block) EXPECT_EQ(plan.direct[1 + block].param, 9U);
}

}  // namespace
}  // namespace fsdp2x
