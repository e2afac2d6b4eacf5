// Copy plans on the kernels against plain loops: every type, alignment, and odd size, and layouts of virtual ranks.
// Packing is in test_cuda_pack.cpp.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "core/error.hpp"
#include "core/gather_plan.hpp"
#include "executor.hpp"
#include "kernels/cpu/kernels.hpp"
#include "virtual_ranks.hpp"

namespace fsdp2x::cuda {
namespace {

constexpr std::array kSizes = {1, 7, 8, 9, 31, 255, 4095, 4096, 4097, 4103, 9001};

constexpr std::array kCopyTypes = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::byte};

bool is_served(DType src, DType dst) { return serves({0, 0, 1, 1, 1, 1, src, dst}); }

// Returns the bytes after a plan of the CPU kernels, in a destination full of Region::kFill.
Bytes expected_copy(const std::vector<Copy>& copies, const Bytes& src, size_t dst_bytes) {
  Bytes dst(dst_bytes, Region::kFill);
  cpu::run_copies(copies, src.data(), dst.data());
  return dst;
}

void expect_copies(const std::vector<Copy>& copies, DType src_type, DType dst_type, int64_t src_numel,
                   int64_t dst_numel, size_t src_shift, size_t dst_shift, std::mt19937_64& random) {
  const Bytes src = random_bytes(src_type, src_numel, random);
  const Region in(src, src_shift);
  const Region out(static_cast<size_t>(dst_numel) * dtype_bytes(dst_type), dst_shift);
  const Uploaded plan(plan_copies(copies));
  kernels().copy(plan.list(), in.data(), out.data(), nullptr);
  const Bytes expected = expected_copy(copies, src, out.bytes());
  const Bytes got = out.read();
  if (src_type == dst_type) {
    EXPECT_EQ(got, expected) << dtype_name(src_type) << ", " << src_numel << " elements, shifts " << src_shift << " "
                             << dst_shift;
  } else {
    EXPECT_TRUE(same(dst_type, got, expected)) << dtype_name(src_type) << " to " << dtype_name(dst_type) << ", "
                                               << src_numel << " elements, shifts " << src_shift << " " << dst_shift;
  }
}

TEST(Copies, EveryTypeSizeAndAlignment) {
  std::mt19937_64 random(1);
  for (const DType src : kCopyTypes) {
    for (const DType dst : kCopyTypes) {
      if (!is_served(src, dst)) continue;
      for (const int64_t numel : kSizes) {
        for (const auto& [src_shift, dst_shift] : {std::pair{0, 0}, {1, 1}, {3, 3}, {0, 1}, {5, 2}}) {
          const Copy copy = {0, 0, 1, numel, numel, numel, src, dst};
          expect_copies({copy}, src, dst, numel, numel, static_cast<size_t>(src_shift) * dtype_bytes(src),
                        static_cast<size_t>(dst_shift) * dtype_bytes(dst), random);
        }
      }
    }
  }
}

// Dense, with gaps between the pieces on one side, and on both. Some starts fit vectors and others fit none.
TEST(Copies, StridedPiecesOnEitherSide) {
  std::mt19937_64 random(2);
  for (const DType src : kCopyTypes) {
    for (const DType dst : kCopyTypes) {
      if (!is_served(src, dst)) continue;
      for (const int64_t piece : {3, 16, 40, 4100}) {
        const int64_t count = 4500 / piece + 2;
        for (const auto& [src_gap, dst_gap] : {std::pair{8, 0}, {0, 16}, {8, 16}, {1, 0}, {3, 2}}) {
          for (const size_t shift : {size_t{0}, size_t{1}}) {
            const Copy copy = {0, 0, count, piece, piece + src_gap, piece + dst_gap, src, dst};
            expect_copies({copy}, src, dst, count * (piece + src_gap), count * (piece + dst_gap), 0,
                          shift * dtype_bytes(dst), random);
          }
        }
      }
    }
  }
}

TEST(Copies, RefuseToCastBytesAndDoubles) {
  for (const DType type : {DType::byte, DType::f64}) {
    const Copy there = {0, 0, 1, 1, 1, 1, type, DType::f32};
    const Copy back = {0, 0, 1, 1, 1, 1, DType::bf16, type};
    EXPECT_THROW(plan_copies(std::vector<Copy>{there}), Error);
    EXPECT_THROW(plan_copies(std::vector<Copy>{back}), Error);
    EXPECT_FALSE(serves(there) || serves(back));
  }
}

TEST(Copies, PlansLeaveEmptySegmentsOut) {
  const Copy empty = {0, 0, 0, 0, 0, 0, DType::f32, DType::f32};
  const CopyPlan plan = plan_copies(std::vector<Copy>{empty, {0, 0, 1, 5000, 5000, 5000, DType::f32, DType::f32}});
  EXPECT_EQ(plan.segments.size(), 1u);
  EXPECT_EQ(plan.tile_segments, (std::vector<uint32_t>{0, 0}));
  kernels().copy(CopyList(), nullptr, nullptr, nullptr);
}

class CopyWorld : public VirtualRanks {};

TEST_P(CopyWorld, RowsCastStraightIntoTheSlot) {
  for (const Unit& unit : units()) {
    const Region slot(unit.layouts[0].slot_bytes());
    for (const Layout& layout : unit.layouts) {
      const Region pool(shard_pool(layout), 0);
      const Uploaded plan(plan_copies(layout.shard_to_slot()));
      kernels().copy(plan.list(), pool.data(), slot.data(), nullptr);
    }
    expect_whole(unit.layouts[0], slot.read());
  }
}

TEST_P(CopyWorld, SegmentsAreCopiedOut) {
  for (const Unit& unit : units()) {
    const size_t segment = unit.layouts[0].gather_segment_bytes();
    const Region gathered(segment * static_cast<size_t>(world()));
    for (const Layout& layout : unit.layouts) {
      const Region pool(shard_pool(layout), 0);
      const Uploaded plan(plan_copies(plan_gather(layout, kPackEverything).shard_to_segment));
      kernels().copy(plan.list(), pool.data(), gathered.as<std::byte>() + segment * static_cast<size_t>(layout.rank()),
                     nullptr);
    }
    for (const Layout& layout : unit.layouts) {
      const Region slot(layout.slot_bytes());
      const Uploaded plan(plan_copies(plan_gather(layout, kPackEverything).staging_to_slot));
      kernels().copy(plan.list(), gathered.data(), slot.data(), nullptr);
      expect_whole(layout, slot.read());
    }
  }
}

// Tiles after 2^32 elements. The pieces have no stride, so all of them are at the first one's place.
TEST(Copies, ElementsAreCountedIn64Bits) {
  std::mt19937_64 random(6);
  for (const int64_t piece : {24, 4099}) {
    const Bytes src = random_bytes(DType::bf16, piece, random);
    const Region in(src, 0), out(static_cast<size_t>(piece) * 4);
    CopySegment segment;
    segment.piece_numel = piece;
    segment.numel = piece * ((int64_t{3} << 32) / piece);
    segment.src = DType::bf16;
    segment.first_tile = 1 - segment.numel / kTileNumel;  // the launch has only the last tiles
    CopyPlan end;
    end.segments = {segment};
    end.tile_segments = {0, 0};
    kernels().copy(Uploaded(end).list(), in.data(), out.data(), nullptr);
    Bytes expected(out.bytes());
    cpu::cast_copy(DType::f32, expected.data(), DType::bf16, src.data(), piece);
    EXPECT_TRUE(same(DType::f32, out.read(), expected)) << "pieces of " << piece;
  }
}

// A 32-bit division could not find their ends.
TEST(Copies, LongPiecesAreSegmentsOfTheirOwn) {
  CopySegment segment;
  segment.piece_numel = segment.dst_stride = (int64_t{1} << 31) + 8;
  segment.src_stride = 2 * segment.piece_numel;
  segment.numel = 3 * segment.piece_numel;
  segment.src = DType::bf16;
  const CopyPlan plan = make_plan(std::vector{segment});
  ASSERT_EQ(plan.segments.size(), 3u);
  for (int64_t i = 0; i < 3; ++i) {
    const CopySegment& one = plan.segments[static_cast<size_t>(i)];
    EXPECT_EQ(one.numel, segment.piece_numel);
    EXPECT_EQ(one.src_offset, i * segment.src_stride * 2);
    EXPECT_EQ(one.dst_offset, i * segment.dst_stride * 4);
  }
  segment.numel = segment.piece_numel;
  EXPECT_EQ(make_plan(std::vector{segment}).segments.size(), 1u) << "one piece is dense";
}

INSTANTIATE_TEST_SUITE_P(Worlds, CopyWorld, testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace
}  // namespace fsdp2x::cuda
