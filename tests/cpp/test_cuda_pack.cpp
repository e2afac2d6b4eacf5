// Gradients packed by the kernels against plain loops: every type, mode, alignment, and odd size, and layouts of
// virtual ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/error.hpp"
#include "core/gather_plan.hpp"
#include "executor.hpp"
#include "kernels/cpu/kernels.hpp"
#include "virtual_ranks.hpp"

namespace fsdp2x::cuda {
namespace {

struct Gradient {
  Bytes bytes;
  DType type;
};

// Packs one element with the CPU kernels.
void pack_element(std::byte* dst, DType dst_type, const std::byte* src, DType src_type, TableMode mode) {
  float value;
  cpu::cast_copy(DType::f32, &value, src_type, src, 1);
  if (mode == TableMode::add) {
    cpu::add(dst_type, dst, DType::f32, &value, 1);
  } else {
    cpu::cast_copy(dst_type, dst, DType::f32, &value, 1);
  }
}

// Packs every element of every full gradient. Elements that the kernels do not compute stay unchanged.
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

class PackWorld : public VirtualRanks {};

TEST_P(PackWorld, GradientsArePacked) {
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
      // The first round writes everything. The second writes, adds, skips, and misses.
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

TEST_P(PackWorld, PiecesArePackedAsPartsOfTheWhole) {
  std::mt19937_64 random(4);
  size_t num_pieces = 0;
  for (const Unit& unit : units()) {
    const std::vector<bool> trains(unit.layouts[0].params().size(), true);
    const ReductionPlan plan = plan_reduction(unit.layouts[0], trains, {0, 300 * static_cast<size_t>(world())});
    num_pieces += plan.pieces.size();
    std::vector<Region> gradients;
    std::vector<DType> types;
    PackTable table;
    for (const ParamPlace& place : plan.layout->params()) {
      const size_t p = types.size();
      types.push_back(place.shape.compute);
      gradients.emplace_back(random_bytes(types.back(), place.shape.numel(), random), 0);
      table.base[p] = random() % 4 == 0 ? nullptr : gradients.back().data();
      table.flag[p] = random() % 2 == 0;
    }
    const auto packed = [&](const Piece& piece) {
      const Region out(piece.size() * static_cast<size_t>(world()));
      for (const PackPlan& part : plan_pack(*plan.layout, types, plan.segment_bytes, piece)) {
        kernels().pack_gradients(Uploaded(part).list(), table, out.data(), nullptr);
      }
      return out.read();
    };
    const Bytes whole = packed(plan.whole());
    size_t begin = 0;
    for (const Piece& piece : plan.pieces) {
      EXPECT_EQ(piece.begin, begin);
      begin = piece.end;
      const Bytes part = packed(piece);
      for (size_t rank = 0; rank < static_cast<size_t>(world()); ++rank) {
        const auto expected = std::span(whole).subspan(rank * plan.segment_bytes + piece.begin, piece.size());
        EXPECT_TRUE(std::ranges::equal(std::span(part).subspan(rank * piece.size(), piece.size()), expected));
      }
    }
    EXPECT_EQ(begin, plan.segment_bytes);
  }
  EXPECT_EQ(num_pieces > units().size(), world() > 1);
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

// `region`: a rank's part, in 16-byte words as between parameters, and one more word that must stay unwritten.
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

// Rows of full gradients, and columns (Shard(1)) whose pieces are apart. Some ranks have fewer, or none.
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

// Flags of every rank, and zeros after the last one: together with rows, or for a parameter without rows here.
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

// For any number of ranks: a plan for a unit of many experts must not grow with them.
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

// The last tile of a rank whose rows begin after 2^32 elements of the gradient and 2^33 bytes of the buffer. Both bases
// are that far before the existing memory.
TEST(Packing, ElementsAreCountedIn64Bits) {
  std::mt19937_64 random(7);
  constexpr int64_t kRows = int64_t{1} << 31, kMissing = 100;
  for (const TableMode mode : {TableMode::write, TableMode::add}) {
    PackSegment segment;
    segment.num_ranks = 3;
    segment.dim = 3 * kRows - kMissing;
    segment.rows = segment.region_numel = kRows;
    segment.rank_bytes = kRows * 4 + 64;
    segment.src = DType::bf16;
    segment.rank_tiles = kRows / kTileNumel;
    segment.first_tile = 1 - int64_t{3} * segment.rank_tiles;  // the launch has only the last tile
    const Bytes src = random_bytes(DType::bf16, kTileNumel - kMissing, random);
    Bytes expected = random_bytes(DType::f32, kTileNumel, random);
    const Region in(src, 0), out(expected, 0);
    PackTable table;
    table.base[0] = in.as<std::byte>() - (3 * kRows - kTileNumel) * 2;
    table.mode[0] = mode;
    PackPlan end;
    end.segments = {segment};
    end.tile_segments = {0};
    std::byte* const buffer = out.as<std::byte>() - 2 * segment.rank_bytes - (kRows - kTileNumel) * 4;
    kernels().pack_gradients(Uploaded(end).list(), table, buffer, nullptr);
    if (mode == TableMode::write) std::memset(expected.data(), 0, expected.size());
    for (int64_t i = 0; i < kTileNumel - kMissing; ++i) {
      pack_element(expected.data() + i * 4, DType::f32, src.data() + i * 2, DType::bf16, mode);
    }
    EXPECT_TRUE(same(DType::f32, out.read(), expected)) << "mode " << static_cast<int>(mode);
  }
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

// Pieces that 32 bits cannot count are left to torch's operations.
TEST(Packing, RefusesPiecesTooLongToCount) {
  const ParamShape shape = {.outer = 2, .dim = int64_t{1} << 29, .inner = 8};
  const Layout columns({shape}, 2, 0), rows({{.outer = 1, .dim = shape.dim, .inner = 8}}, 2, 0);
  EXPECT_FALSE(packs(columns.params()[0], DType::bf16));
  EXPECT_TRUE(packs(rows.params()[0], DType::bf16));
  EXPECT_FALSE(packs(rows.params()[0], DType::f64));
}

INSTANTIATE_TEST_SUITE_P(Worlds, PackWorld, testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace
}  // namespace fsdp2x::cuda
