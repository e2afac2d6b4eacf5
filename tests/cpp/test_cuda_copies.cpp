// Copy plans on the kernels: every type, alignment and odd size, and layouts of virtual ranks, against plain loops.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "core/error.hpp"
#include "cpu/kernels.hpp"
#include "executor.hpp"
#include "virtual_ranks.hpp"

namespace fsdp2x::cuda {
namespace {

constexpr std::array kSizes = {1, 7, 8, 9, 31, 255, 4095, 4096, 4097, 4103, 9001};

constexpr std::array kCopyTypes = {DType::f32, DType::f64, DType::bf16, DType::f16, DType::byte};

bool is_served(DType src, DType dst) { return serves({0, 0, 1, 1, 1, 1, src, dst}); }

// The bytes that a plan leaves in a destination full of Region::kFill, by the CPU kernels.
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

// Dense, on one side with gaps between the pieces, on both; at starts where vectors fit and where none does.
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
      const Region pool(unit.shard_pool(layout), 0);
      const Uploaded plan(plan_copies(layout.shard_to_slot()));
      kernels().copy(plan.list(), pool.data(), slot.data(), nullptr);
    }
    unit.expect_gathered(unit.layouts[0], slot.read());
  }
}

TEST_P(CopyWorld, SegmentsAreCopiedOut) {
  for (const Unit& unit : units()) {
    const size_t stride = unit.layouts[0].gather_segment_bytes() + kAlignBytes;
    const Region gathered(stride * static_cast<size_t>(world()));
    for (const Layout& layout : unit.layouts) {
      const Region pool(unit.shard_pool(layout), 0);
      const Uploaded plan(plan_copies(layout.shard_to_segment()));
      kernels().copy(plan.list(), pool.data(), gathered.as<std::byte>() + stride * static_cast<size_t>(layout.rank()),
                     nullptr);
    }
    for (const Layout& layout : unit.layouts) {
      const Region slot(layout.slot_bytes());
      const Uploaded plan(plan_copies(layout.segments_to_slot(stride)));
      kernels().copy(plan.list(), gathered.data(), slot.data(), nullptr);
      unit.expect_gathered(layout, slot.read());
    }
  }
}

// A part of every rank, of an odd number of bytes and at odd places, or of words, to its place among the others.
TEST_P(CopyWorld, PeersPullTheParts) {
  std::mt19937_64 random(4);
  for (const DType unit : {DType::byte, DType::f32}) {
    const size_t bytes = dtype_bytes(unit);
    for (const int64_t numel : kSizes) {
      for (const auto& [src_shift, dst_shift] : {std::pair{0, 0}, {1, 1}, {3, 0}}) {
        const size_t begin = 5 * bytes, part_bytes = static_cast<size_t>(numel) * bytes;
        std::vector<Region> blocks;  // those of two parameters, one behind the other
        PeerTable peers;
        peers.num_ranks = world();
        Bytes expected(begin, Region::kFill);
        std::vector<Bytes> contents;
        for (int rank = 0; rank < world(); ++rank) {
          contents.push_back(random_bytes(unit, 5 + 2 * numel * world(), random));
          blocks.emplace_back(contents.back(), static_cast<size_t>(src_shift) * bytes);
          peers.base[rank] = blocks.back().data();
        }
        for (int part = 0; part < 2 * world(); ++part) {
          const Bytes& content = contents[static_cast<size_t>(part % world())];
          const auto from = content.begin() + static_cast<std::ptrdiff_t>(begin + part * part_bytes);
          expected.insert(expected.end(), from, from + static_cast<std::ptrdiff_t>(part_bytes));
        }
        const size_t second = begin + part_bytes * static_cast<size_t>(world());
        const std::vector<Copy> parts = {{begin, begin, 1, numel, numel, numel, unit, unit},
                                         {second, second, 1, numel, numel, numel, unit, unit}};
        const Uploaded plan(plan_copies(parts));
        EXPECT_EQ(plan.list().num_tiles, 2 * ((numel + kTileNumel - 1) / kTileNumel)) << "however many ranks there are";
        for (const int rank : {0, world() - 1}) {
          const Region out(expected.size(), static_cast<size_t>(dst_shift) * bytes);
          kernels().all_gather_peer(plan.list(), peers, rank, out.data(), nullptr);
          Bytes without_own = expected;
          for (const size_t start : {begin, second}) {
            const auto own =
                without_own.begin() + static_cast<std::ptrdiff_t>(start + part_bytes * static_cast<size_t>(rank));
            std::fill(own, own + static_cast<std::ptrdiff_t>(part_bytes), Region::kFill);
          }
          EXPECT_EQ(out.read(), without_own) << numel << " of " << dtype_name(unit) << ", rank " << rank << ", shifts "
                                             << src_shift << " " << dst_shift;
        }
      }
    }
  }
}

TEST(Copies, PeersAreThoseOfTheTable) {
  PeerTable peers;
  EXPECT_THROW(kernels().all_gather_peer(CopyList(), peers, 0, nullptr, nullptr), Error);
  peers.num_ranks = 2;
  EXPECT_THROW(kernels().all_gather_peer(CopyList(), peers, 2, nullptr, nullptr), Error);
}

// --- packing ---------------------------------------------------------------------------------------------------------

struct Gradient {
  Bytes bytes;
  DType type;
};

// What packing makes of one element, by the CPU kernels.
void pack_element(std::byte* dst, DType dst_type, const std::byte* src, DType src_type, TableMode mode) {
  float value;
  cpu::cast_copy(DType::f32, &value, src_type, src, 1);
  if (mode == TableMode::add) {
    cpu::add(dst_type, dst, DType::f32, &value, 1);
  } else {
    cpu::cast_copy(dst_type, dst, DType::f32, &value, 1);
  }
}

// Packs by walking every element of every whole gradient; what the kernels do not compute stays as it is.
void pack_plainly(const std::vector<Layout>& layouts, const std::vector<Gradient>& gradients,
                  const std::vector<TableMode>& modes, const std::vector<bool>& missing, size_t stride, Bytes& packed) {
  for (size_t p = 0; p < gradients.size(); ++p) {
    const ParamShape& shape = layouts[0].params()[p].shape;
    if (!shape.trainable || !computes(shape.reduce) || modes[p] == TableMode::skip ||
        (modes[p] == TableMode::add && missing[p])) {
      continue;
    }
    const size_t element = dtype_bytes(shape.reduce);
    for (const Layout& layout : layouts) {
      const ParamPlace& place = layout.params()[p];
      std::byte* start = packed.data() + static_cast<size_t>(layout.rank()) * stride + place.reduce_segment_offset;
      if (modes[p] == TableMode::write) {
        std::memset(start, 0, align_up(static_cast<size_t>(place.padded_shard_numel) * element));
      }
      int64_t local = 0;
      for (int64_t o = 0; !missing[p] && o < shape.outer; ++o) {
        for (int64_t i = place.rows.begin * shape.inner; i < place.rows.end * shape.inner; ++i, ++local) {
          const int64_t whole = o * shape.dim * shape.inner + i;
          pack_element(start + static_cast<size_t>(local) * element, shape.reduce,
                       gradients[p].bytes.data() + static_cast<size_t>(whole) * dtype_bytes(gradients[p].type),
                       gradients[p].type, modes[p]);
        }
      }
    }
  }
}

TEST_P(CopyWorld, GradientsArePacked) {
  std::mt19937_64 random(3);
  for (const Unit& unit : units()) {
    const Layout& layout = unit.layouts[0];
    const DType flag_type = layout.params()[0].shape.reduce;
    const size_t flags_bytes = align_up(layout.params().size() * sizeof(double));
    const size_t stride = layout.reduce_segment_bytes() + flags_bytes;
    for (int repeat = 0; repeat < 3; ++repeat) {
      std::vector<Gradient> gradients;
      std::vector<DType> types;
      for (const ParamPlace& place : layout.params()) {
        constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
        const DType type = place.shape.orig == DType::f64 ? DType::f64 : kTypes[random() % 3];
        gradients.push_back({random_bytes(type, place.shape.numel(), random), type});
        types.push_back(type);
      }
      const std::vector<PackPlan> plans = plan_pack(layout, types, stride);
      ASSERT_EQ(plans.size(), 1u);
      const Uploaded plan(plans[0]);
      Bytes expected(stride * static_cast<size_t>(world()), Region::kFill);
      const Region packed(expected.size());
      std::vector<double> flags(flags_bytes / dtype_bytes(flag_type));
      // The first round writes everything; the second writes, adds, skips and misses.
      for (int round = 0; round < 2; ++round) {
        std::vector<TableMode> modes(gradients.size(), TableMode::write);
        std::vector<bool> missing(gradients.size(), false);
        for (size_t p = 0; round == 1 && p < gradients.size(); ++p) {
          modes[p] = static_cast<TableMode>(random() % 3);
          missing[p] = random() % 4 == 0;
        }
        PackTable table;
        std::vector<Region> regions;
        for (size_t p = 0; p < gradients.size(); ++p) {
          regions.emplace_back(gradients[p].bytes, random() % 3 * dtype_bytes(gradients[p].type));
          table.base[p] = missing[p] ? nullptr : regions.back().data();
          table.mode[p] = modes[p];
          table.flag[p] = random() % 2 == 0;
          if (modes[p] != TableMode::skip) flags[p] = table.flag[p] ? 1.0 : 0.0;
        }
        kernels().pack_gradients(plan.list(), table, packed.data(), nullptr);
        pack_plainly(unit.layouts, gradients, modes, missing, stride, expected);
        const Bytes got = packed.read();
        for (const Layout& rank : unit.layouts) {
          const size_t begin = static_cast<size_t>(rank.rank()) * stride;
          for (const ParamPlace& place : rank.params()) {
            if (!place.shape.trainable) continue;
            const size_t start = begin + place.reduce_segment_offset;
            const size_t bytes =
                align_up(static_cast<size_t>(place.padded_shard_numel) * dtype_bytes(place.shape.reduce));
            EXPECT_TRUE(same(place.shape.reduce, std::span(got).subspan(start, bytes),
                             std::span(expected).subspan(start, bytes)))
                << "rank " << rank.rank() << ", round " << round;
          }
          const size_t end = begin + rank.reduce_segment_bytes();
          for (size_t i = 0; packs_flags(layout) && i < flags.size(); ++i) {
            EXPECT_EQ(get(got, end, flag_type, static_cast<int64_t>(i)), flags[i])
                << "flag " << i << ", round " << round;
          }
        }
      }
    }
  }
}

struct PackCase {
  PackSegment segment;
  TableMode mode = TableMode::write;
  size_t src_shift = 0, dst_shift = 0;  // in elements
  bool is_missing = false;
};

void expect_packed(const PackCase& c, std::mt19937_64& random) {
  const PackSegment& segment = c.segment;
  const size_t src_bytes = dtype_bytes(segment.src), dst_bytes = dtype_bytes(segment.dst);
  const Bytes src = random_bytes(segment.src, segment.outer * segment.dim * segment.inner, random);
  const int64_t rank_numel = segment.rank_bytes / static_cast<int64_t>(dst_bytes);
  Bytes expected = random_bytes(segment.dst, segment.num_ranks * rank_numel, random);
  const Region in(src, c.src_shift * src_bytes), out(expected, c.dst_shift * dst_bytes);
  PackTable table;
  table.base[0] = c.is_missing ? nullptr : in.data();
  table.mode[0] = c.mode;
  const Uploaded plan(make_plan(std::vector{segment}));
  kernels().pack_gradients(plan.list(), table, out.data(), nullptr);
  for (int64_t rank = 0; rank < segment.num_ranks; ++rank) {
    std::byte* const rows = expected.data() + rank * segment.rank_bytes + segment.dst_offset;
    if (c.mode == TableMode::write) std::memset(rows, 0, static_cast<size_t>(segment.region_numel) * dst_bytes);
    const int64_t begin = std::min(segment.dim, rank * segment.rows);
    const int64_t end = std::min(segment.dim, begin + segment.rows);
    int64_t local = 0;
    for (int64_t o = 0; !c.is_missing && o < segment.outer; ++o) {
      for (int64_t i = begin * segment.inner; i < end * segment.inner; ++i, ++local) {
        const int64_t whole = o * segment.dim * segment.inner + i;
        pack_element(rows + static_cast<size_t>(local) * dst_bytes, segment.dst,
                     src.data() + static_cast<size_t>(whole) * src_bytes, segment.src, c.mode);
      }
    }
  }
  EXPECT_TRUE(same(segment.dst, out.read(), expected))
      << dtype_name(segment.src) << " to " << dtype_name(segment.dst) << ", " << segment.outer << " x " << segment.dim
      << " x " << segment.inner << " over " << segment.num_ranks << ", mode " << static_cast<int>(c.mode) << ", shifts "
      << c.src_shift << " " << c.dst_shift;
}

// `region`: what a rank has of it, in 16-byte words as between parameters, then one that nobody writes.
PackSegment pack_segment(DType src, DType dst, int64_t outer, int64_t dim, int64_t inner, int ranks) {
  PackSegment segment;
  segment.outer = outer;
  segment.dim = dim;
  segment.inner = inner;
  segment.num_ranks = ranks;
  segment.rows = (dim + ranks - 1) / ranks;
  segment.region_numel = (outer * segment.rows * inner + 15) / 16 * 16;
  segment.rank_bytes = (segment.region_numel + 16) * static_cast<int64_t>(dtype_bytes(dst));
  segment.src = src;
  segment.dst = dst;
  return segment;
}

// Rows of whole gradients, and columns (Shard(1)), whose pieces lie apart; ranks that have less than others, or
// nothing.
TEST(Packing, EveryTypeModeSizeAndAlignment) {
  std::mt19937_64 random(5);
  struct Shape {
    int64_t outer, dim, inner;
    int ranks;
  };
  const std::vector<Shape> shapes = {{1, 1, 1, 1},    {1, 9, 1, 2},    {1, 4103, 1, 1}, {1, 3, 4103, 2},
                                     {1, 7, 24, 5},   {1, 2, 4096, 3}, {1502, 2, 3, 2}, {564, 2, 8, 2},
                                     {114, 3, 40, 3}, {1502, 4, 1, 1}, {300, 4, 16, 2}, {1130, 2, 4, 2}};
  for (const DType src : {DType::f32, DType::bf16, DType::f16}) {
    for (const DType dst : {DType::f32, DType::bf16, DType::f16}) {
      for (const TableMode mode : {TableMode::write, TableMode::add, TableMode::skip}) {
        for (const Shape& shape : shapes) {
          PackCase c = {.segment = pack_segment(src, dst, shape.outer, shape.dim, shape.inner, shape.ranks)};
          c.mode = mode;
          for (const auto& [src_shift, dst_shift] : {std::pair{0, 0}, {3, 3}, {0, 1}, {8, 0}}) {
            c.src_shift = static_cast<size_t>(src_shift);
            c.dst_shift = static_cast<size_t>(dst_shift);
            if (mode == TableMode::skip) {
              Bytes before = random_bytes(dst, 8, random);
              const Region out(before, 0);
              PackTable table;
              table.mode[0] = mode;
              kernels().pack_gradients(Uploaded(make_plan(std::vector{c.segment})).list(), table, out.data(), nullptr);
              EXPECT_EQ(out.read(), before);
              break;
            }
            expect_packed(c, random);
          }
        }
      }
    }
  }
}

TEST(Packing, MissingGradientsAreZerosAtAnyAddress) {
  std::mt19937_64 random(7);
  for (const DType dst : {DType::f32, DType::bf16}) {
    for (const int64_t numel : {1, 9, 4103}) {
      for (const size_t shift : {0, 1, 3}) {
        PackCase c = {.segment = pack_segment(DType::f32, dst, 1, numel, 3, 2)};
        c.dst_shift = shift;
        c.is_missing = true;
        expect_packed(c, random);
      }
    }
  }
}

// Flags of every rank, and zeros behind the last one; with the rows, or of a parameter that has none here.
TEST(Packing, FlagsLieBehindTheRows) {
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int32_t flag_numel : {1, 700}) {
      for (const bool has_rows : {true, false}) {
        for (const TableMode mode : {TableMode::write, TableMode::add, TableMode::skip}) {
          const auto bytes = static_cast<int64_t>(dtype_bytes(type));
          PackSegment segment = pack_segment(type, type, 1, 3, 3000, 3);
          segment.flag_offset = segment.rank_bytes;
          segment.rank_bytes += (flag_numel + 1) * bytes;
          segment.flag_numel = flag_numel;
          segment.flag_type = type;
          if (!has_rows) segment.region_numel = 0;
          const Region out(static_cast<size_t>(3 * segment.rank_bytes));
          PackTable table;
          table.mode[0] = mode;
          table.flag[0] = true;
          kernels().pack_gradients(Uploaded(make_plan(std::vector{segment})).list(), table, out.data(), nullptr);
          const Bytes got = out.read();
          for (int64_t rank = 0; rank < 3; ++rank) {
            const auto at = static_cast<size_t>(rank * segment.rank_bytes + segment.flag_offset);
            for (int64_t i = 0; mode != TableMode::skip && i < flag_numel; ++i) {
              ASSERT_EQ(get(got, at, type, i), i == 0 ? 1.0 : 0.0) << "rank " << rank;
            }
            const size_t end = mode == TableMode::skip ? at : at + static_cast<size_t>(flag_numel * bytes);
            for (size_t i = end; i < at + static_cast<size_t>((flag_numel + 1) * bytes); ++i) {
              ASSERT_EQ(got[i], Region::kFill);
            }
          }
        }
      }
    }
  }
}

// However many ranks there are: what lies on a device for a unit of many experts must not grow with them.
TEST(Packing, PlansHaveOneSegmentAParameter) {
  const std::vector<ParamShape> shapes(kMaxTable, {.outer = 1, .dim = 1024, .inner = 8});
  const std::vector<DType> types(shapes.size(), DType::bf16);
  for (const int world : {1, 8, 512, 1024}) {
    const Layout layout(shapes, world, 0);
    const std::vector<PackPlan> plans = plan_pack(layout, types, layout.reduce_segment_bytes());
    ASSERT_EQ(plans.size(), 1u);
    EXPECT_EQ(plans[0].segments.size(), shapes.size()) << world << " ranks";
  }
}

// Tiles behind 2^32 elements: the pieces have no stride, so that all of them lie on the first.
TEST(Copies, ElementsAreCountedIn64Bits) {
  std::mt19937_64 random(6);
  for (const int64_t piece : {24, 4099}) {
    const Bytes src = random_bytes(DType::bf16, piece, random);
    const Region in(src, 0), out(static_cast<size_t>(piece) * 4);
    CopySegment segment;
    segment.piece_numel = piece;
    segment.numel = piece * ((int64_t{3} << 32) / piece);
    segment.src = DType::bf16;
    segment.first_tile = 1 - segment.numel / kTileNumel;  // the launch has the last tiles alone
    CopyPlan end;
    end.segments = {segment};
    end.tile_segments = {0, 0};
    kernels().copy(Uploaded(end).list(), in.data(), out.data(), nullptr);
    Bytes expected(out.bytes());
    cpu::cast_copy(DType::f32, expected.data(), DType::bf16, src.data(), piece);
    EXPECT_TRUE(same(DType::f32, out.read(), expected)) << "pieces of " << piece;
  }
}

// A division of 32 bits could not tell where they end.
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

TEST(Packing, MoreParametersThanALaunchCanName) {
  const std::vector<ParamShape> shapes(2 * kMaxTable + 10, {.outer = 1, .dim = 3, .inner = 5});
  const Layout layout(shapes, 2, 0);
  const std::vector<DType> types(shapes.size(), DType::f32);
  const std::vector<PackPlan> plans = plan_pack(layout, types, layout.reduce_segment_bytes());
  ASSERT_EQ(plans.size(), 3u);
  const Region packed(2 * layout.reduce_segment_bytes());
  std::vector<Region> gradients;
  for (size_t p = 0; p < shapes.size(); ++p) {
    const std::vector<float> values(15, static_cast<float>(p));
    gradients.emplace_back(std::as_bytes(std::span(values)), 0);
  }
  for (const PackPlan& part : plans) {
    PackTable table;
    for (size_t i = 0; i < kMaxTable && static_cast<size_t>(part.first) + i < gradients.size(); ++i) {
      table.base[i] = gradients[static_cast<size_t>(part.first) + i].data();
    }
    const Uploaded plan(part);
    kernels().pack_gradients(plan.list(), table, packed.data(), nullptr);
  }
  const std::vector<float> got = packed.read_as<float>();
  for (size_t p = 0; p < shapes.size(); ++p) {
    EXPECT_EQ(got[layout.params()[p].reduce_segment_offset / 4 + 9], static_cast<float>(p));
  }
}

TEST(Packing, RefusesWhatDoesNotFit) {
  const Layout layout({{.outer = 1, .dim = 3, .inner = 5}}, 2, 0);
  EXPECT_THROW(plan_pack(layout, std::vector<DType>(2, DType::f32), layout.reduce_segment_bytes()), Error);
  EXPECT_THROW(plan_pack(layout, std::vector<DType>(1, DType::f32), layout.reduce_segment_bytes() - 1), Error);
  const Layout two({{.outer = 1, .dim = 3, .inner = 5}, {.outer = 1, .dim = 3, .inner = 5}}, 2, 0);
  EXPECT_THROW(plan_pack(two, std::vector<DType>(2, DType::f32), two.reduce_segment_bytes() + 4), Error);
  EXPECT_THROW(make_plan(std::vector{pack_segment(DType::byte, DType::f32, 1, 1, 1, 1)}), Error);
}

// Pieces that 32 bits do not count are left to torch's operations.
TEST(Packing, RefusesPiecesTooLongToCount) {
  const ParamShape shape = {.outer = 2, .dim = int64_t{1} << 29, .inner = 8};
  const Layout columns({shape}, 2, 0), rows({{.outer = 1, .dim = shape.dim, .inner = 8}}, 2, 0);
  EXPECT_FALSE(packs(columns.params()[0], DType::bf16));
  EXPECT_TRUE(packs(rows.params()[0], DType::bf16));
  EXPECT_FALSE(packs(rows.params()[0], DType::f64));
}

INSTANTIATE_TEST_SUITE_P(Worlds, CopyWorld, testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace
}  // namespace fsdp2x::cuda
