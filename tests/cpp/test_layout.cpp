// Layouts over many shapes and worlds: the full tensors come out, whichever way the rows of all ranks travel.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "whole_tensors.hpp"

namespace fsdp2x {
namespace {

std::vector<ParamShape> unit_a() {
  std::vector<ParamShape> shapes(7);
  shapes[0] = {.outer = 1, .dim = 7, .inner = 5, .compute = DType::bf16, .grad_override = DType::bf16};
  shapes[1] = {.outer = 1, .dim = 3, .inner = 1, .trainable = false};
  shapes[2] = {.outer = 4, .dim = 6, .inner = 3, .compute = DType::bf16, .reduce = DType::bf16};
  shapes[3] = {.outer = 1, .dim = 1, .inner = 1};
  shapes[4] = {.outer = 3, .dim = 5, .inner = 1, .orig = DType::f64, .compute = DType::f32, .reduce = DType::f64};
  shapes[5] = {.outer = 1, .dim = 0, .inner = 9};
  shapes[6] = {.outer = 2, .dim = 8, .inner = 16, .orig = DType::bf16, .compute = DType::bf16, .reduce = DType::f32};
  return shapes;
}

std::vector<ParamShape> unit_b() {
  std::vector<ParamShape> shapes;
  for (int64_t dim = 1; dim <= 17; ++dim) shapes.push_back({.outer = 1 + dim % 3, .dim = dim, .inner = 1 + dim % 5});
  return shapes;
}

class LayoutWorld : public testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }
  std::vector<Layout> layouts(const std::vector<ParamShape>& shapes) const {
    std::vector<Layout> all;
    for (int rank = 0; rank < world(); ++rank) all.emplace_back(shapes, world(), rank);
    return all;
  }
};

TEST_P(LayoutWorld, RowsAreCutAsTorchChunks) {
  for (int64_t dim = 0; dim <= 40; ++dim) {
    int64_t next = 0;
    for (int rank = 0; rank < world(); ++rank) {
      const RowRange rows = shard_rows(dim, world(), rank);
      EXPECT_EQ(rows.begin, next);
      EXPECT_LE(rows.size(), (dim + world() - 1) / world());
      EXPECT_LE(rows.size(), shard_rows(dim, world(), std::max(rank - 1, 0)).size());
      next = rows.end;
    }
    EXPECT_EQ(next, dim);
  }
}

TEST_P(LayoutWorld, GradientsOfATrainedUnitLieAsItsShards) {
  for (const Layout& layout : layouts(unit_b())) {
    EXPECT_EQ(layout.gradient_pool_bytes(), layout.shard_pool_bytes());
    for (const ParamPlace& place : layout.params()) EXPECT_EQ(place.gradient_offset, place.shard_offset);
    EXPECT_TRUE(layout.can_reduce_in_place());
    EXPECT_FALSE(layout.training(std::vector<bool>(layout.params().size())).can_reduce_in_place());
    std::vector<bool> some(layout.params().size());
    some[3] = some[11] = true;
    const Layout frozen = layout.training(some);
    EXPECT_TRUE(frozen.can_reduce_in_place());
    EXPECT_EQ(frozen.params()[3].gradient_offset, 0u);
    EXPECT_EQ(frozen.params()[11].gradient_offset, frozen.params()[11].reduce_segment_offset);
  }
}

TEST_P(LayoutWorld, OffsetsAreAlignedDisjointAndEqualOnAllRanks) {
  for (const auto& shapes : {unit_a(), unit_b()}) {
    const std::vector<Layout> all = layouts(shapes);
    for (const Layout& layout : all) {
      EXPECT_EQ(layout.shard_pool_bytes(), all[0].shard_pool_bytes());
      EXPECT_EQ(layout.slot_bytes(), all[0].slot_bytes());
      EXPECT_EQ(layout.scratch_bytes(), all[0].scratch_bytes());
      EXPECT_EQ(layout.gather_segment_bytes(), all[0].gather_segment_bytes());
      EXPECT_EQ(layout.reduce_segment_bytes(), all[0].reduce_segment_bytes());
      size_t shard_end = 0, slot_end = 0, reduce_end = 0, gradient_bytes = 0;
      const std::vector<ParamPlace> narrow = layout.narrow().params();
      size_t narrow_end = 0;
      for (size_t i = 0; i < layout.params().size(); ++i) {
        const ParamPlace& place = layout.params()[i];
        const ParamPlace& first = all[0].params()[i];
        const auto next = [](size_t offset, size_t& end, int64_t numel, DType type) {
          EXPECT_EQ(offset % kAlignBytes, 0u);
          EXPECT_GE(offset, end);
          end = offset + static_cast<size_t>(numel) * dtype_bytes(type);
        };
        EXPECT_EQ(place.shard_offset, first.shard_offset);
        EXPECT_EQ(place.slot_offset, first.slot_offset);
        EXPECT_EQ(place.reduce_segment_offset, first.reduce_segment_offset);
        EXPECT_EQ(place.gradient_offset, first.gradient_offset);
        EXPECT_EQ(place.padded_shard_numel, first.shard_numel) << "rank 0 has a whole chunk";
        EXPECT_LE(place.shard_numel, place.padded_shard_numel);
        next(place.shard_offset, shard_end, place.padded_shard_numel, place.shape.orig);
        next(place.slot_offset, slot_end, place.shape.numel(), place.shape.compute);
        if (!place.shape.trainable) continue;
        EXPECT_EQ(place.gradient_offset, gradient_bytes);
        gradient_bytes += align_up(static_cast<size_t>(place.padded_shard_numel) * dtype_bytes(place.shape.grad()));
        EXPECT_EQ(narrow[i].shape.reduce, place.shape.packed());
        next(narrow[i].reduce_segment_offset, narrow_end, place.padded_shard_numel, place.shape.packed());
        EXPECT_GE(place.reduce_segment_offset, narrow[i].reduce_segment_offset);
        next(place.reduce_segment_offset, reduce_end, place.padded_shard_numel, place.shape.reduce);
      }
      EXPECT_LE(shard_end, layout.shard_pool_bytes());
      EXPECT_EQ(gradient_bytes, layout.gradient_pool_bytes());
      EXPECT_LE(slot_end, layout.slot_bytes());
      const auto in_scratch = [&](size_t segment) { return align_up(segment) * static_cast<size_t>(layout.world()); };
      EXPECT_EQ(layout.scratch_bytes(), layout.scratch_flags_bytes() + in_scratch(narrow_end));
      EXPECT_EQ(layout.wide_scratch_bytes(), layout.scratch_flags_bytes() + in_scratch(reduce_end));
      EXPECT_GE(layout.scratch_flags_bytes(), layout.params().size());
      EXPECT_LE(reduce_end, layout.reduce_segment_bytes());
    }
  }
}

TEST_P(LayoutWorld, RowsWrittenStraightIntoTheSlotGiveTheWholeTensors) {
  for (const auto& shapes : {unit_a(), unit_b()}) {
    const std::vector<Layout> all = layouts(shapes);
    Bytes slot(all[0].slot_bytes());
    for (const Layout& layout : all) cpu::run_copies(layout.shard_to_slot(), shard_pool(layout).data(), slot.data());
    expect_whole(all[0], slot);
  }
}

TEST_P(LayoutWorld, ShardsRestWhereTheirRowsAreGathered) {
  std::vector<ParamShape> shapes;
  for (const int64_t dim : {7, 1, 0, 12}) shapes.push_back({.outer = 1, .dim = dim, .inner = 3});
  shapes.push_back({.outer = 1, .dim = 5, .inner = 1, .orig = DType::bf16, .compute = DType::bf16, .trainable = false});
  std::vector<size_t> ends(shapes.size());  // ends of the earlier ranks' rows
  for (const Layout& layout : layouts(shapes)) {
    EXPECT_TRUE(layout.can_rest_in_slot());
    const std::vector<size_t> offsets = layout.offsets_in_slot();
    ASSERT_EQ(offsets.size(), shapes.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      const ParamPlace& place = layout.params()[i];
      EXPECT_EQ(offsets[i], place.slot_offset + ends[i]);
      ends[i] += static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig);
    }
    for (const Copy& copy : layout.shard_to_slot())
      EXPECT_TRUE(std::count(offsets.begin(), offsets.end(), copy.dst_offset));
  }
}

TEST(Layout, RowsThatAreCastPermutedOrFilledInElsewhereDoNotRest) {
  const ParamShape plain = {.outer = 1, .dim = 4, .inner = 2};
  ParamShape cast = plain, permuted = plain, elsewhere = plain;
  cast.compute = DType::bf16;
  permuted.outer = 2;
  elsewhere.in_slot = false;
  EXPECT_TRUE(Layout({plain}, 2, 0).can_rest_in_slot());
  for (const ParamShape& other : {cast, permuted, elsewhere}) {
    EXPECT_FALSE(Layout({plain, other}, 2, 0).can_rest_in_slot());
  }
  EXPECT_FALSE(Layout({}, 2, 0).can_rest_in_slot());
}

TEST_P(LayoutWorld, GradientsReachTheSegmentOfTheirOwner) {
  const std::vector<Layout> all = layouts(unit_a());
  const size_t segment_bytes = all[0].reduce_segment_bytes();
  Bytes segments(segment_bytes * static_cast<size_t>(world()));
  for (size_t i = 0; i < all[0].params().size(); ++i) {
    const ParamPlace& place = all[0].params()[i];
    if (!place.shape.trainable) continue;
    Bytes gradient(static_cast<size_t>(place.shape.numel()) * dtype_bytes(DType::bf16));
    for (int64_t index = 0; index < place.shape.numel(); ++index) {
      put(gradient, 0, DType::bf16, index, value_of(i, index));
    }
    cpu::run_copies(all[0].gradient_to_segments(i, DType::bf16), gradient.data(), segments.data());
  }
  for (const Layout& layout : all) {
    const size_t start = segment_bytes * static_cast<size_t>(layout.rank());
    for (size_t i = 0; i < layout.params().size(); ++i) {
      const ParamPlace& place = layout.params()[i];
      const ParamShape& shape = place.shape;
      if (!shape.trainable) continue;
      int64_t local = 0;
      for (int64_t o = 0; o < shape.outer; ++o) {
        for (int64_t row = place.rows.begin; row < place.rows.end; ++row) {
          for (int64_t k = 0; k < shape.inner; ++k) {
            ASSERT_EQ(get(segments, start + place.reduce_segment_offset, shape.reduce, local++),
                      value_of(i, (o * shape.dim + row) * shape.inner + k));
          }
        }
      }
      for (; local < place.padded_shard_numel; ++local) {
        ASSERT_EQ(get(segments, start + place.reduce_segment_offset, shape.reduce, local), 0.0f) << "a pad";
      }
    }
  }
}

TEST_P(LayoutWorld, JoinedCopiesMoveTheSameElements) {
  for (const auto& shapes : {unit_a(), unit_b()}) {
    const Layout layout(shapes, world(), 0);
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (!shapes[i].trainable) continue;
      std::vector<Copy> copies = layout.gradient_to_segments(i, DType::f32);
      std::reverse(copies.begin(), copies.end());  // joined whatever their order
      std::vector<float> gradient(static_cast<size_t>(shapes[i].numel()));
      for (size_t k = 0; k < gradient.size(); ++k) gradient[k] = static_cast<float>(k % 251 + 1);
      Bytes one_by_one(layout.reduce_segment_bytes() * static_cast<size_t>(world())), together(one_by_one.size());
      cpu::run_copies(copies, gradient.data(), one_by_one.data());
      const std::vector<Copy> fewer = joined(copies);
      cpu::run_copies(fewer, gradient.data(), together.data());
      EXPECT_EQ(together, one_by_one);
      EXPECT_LE(fewer.size(), copies.size());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, LayoutWorld, testing::Range(1, 9));

TEST(Layout, BytesAreCarriedUnchanged) {
  const std::vector<ParamShape> shapes = {{.outer = 2,
                                           .dim = 5,
                                           .inner = 3,
                                           .orig = DType::byte,
                                           .compute = DType::byte,
                                           .reduce = DType::f32,
                                           .trainable = false}};
  Bytes slot(align_up(30));
  for (int rank = 0; rank < 2; ++rank) {
    const Layout layout(shapes, 2, rank);
    Bytes pool(layout.shard_pool_bytes(), static_cast<std::byte>(rank + 1));
    cpu::run_copies(layout.shard_to_slot(), pool.data(), slot.data());
  }
  for (size_t i = 0; i < 30; ++i) EXPECT_EQ(slot[i], static_cast<std::byte>(i % 15 < 9 ? 1 : 2)) << i;
}

// The parts of all ranks of a parameter are one strided copy, and another one for a last rank with fewer rows.
TEST(Layout, CopiesOfAllRanksAreJoined) {
  for (const int world : {2, 7, 64, 512}) {
    const Layout layout({{.outer = 1, .dim = 100, .inner = 3}, {.outer = 1, .dim = 64, .inner = 1}}, world, 0);
    EXPECT_LE(joined(layout.gradient_to_segments(0, DType::f32)).size(), 2u) << "world " << world;
  }
}

TEST(Layout, RefusesNonsense) {
  const ParamShape good = {.outer = 1, .dim = 4, .inner = 4};
  EXPECT_THROW(Layout({good}, 0, 0), Error);
  EXPECT_THROW(Layout({good}, 2, 2), Error);
  EXPECT_THROW(Layout({good}, 2, -1), Error);
  ParamShape bad = good;
  bad.dim = -1;
  EXPECT_THROW(Layout({bad}, 2, 0), Error);
  bad = good;
  bad.orig = DType::byte;
  EXPECT_THROW(Layout({bad}, 2, 0), Error) << "bytes cannot be cast";
  bad.compute = DType::byte;
  EXPECT_THROW(Layout({bad}, 2, 0), Error) << "bytes cannot be trained";
  const Layout layout({good, {.outer = 1, .dim = 2, .inner = 2, .trainable = false}}, 2, 0);
  EXPECT_THROW(layout.gradient_to_segments(1, DType::f32), Error);
  EXPECT_THROW(layout.gradient_to_segments(2, DType::f32), Error);
}

}  // namespace
}  // namespace fsdp2x
