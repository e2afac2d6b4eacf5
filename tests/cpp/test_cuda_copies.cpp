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
  for (const DType src : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::byte}) {
    for (const DType dst : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::byte}) {
      if ((src == DType::byte) != (dst == DType::byte)) continue;
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

TEST(Copies, StridedPiecesOnEitherSide) {
  std::mt19937_64 random(2);
  for (const DType src : {DType::f32, DType::bf16, DType::byte}) {
    for (const DType dst : {DType::f32, DType::bf16, DType::byte}) {
      if ((src == DType::byte) != (dst == DType::byte)) continue;
      for (const int64_t piece : {1, 3, 8, 16, 40, 4100}) {
        for (const int64_t gap : {0, 1, 8}) {
          const int64_t count = piece < 100 ? 700 : 3;
          Copy copy = {0, 0, count, piece, piece + gap, piece, src, dst};
          expect_copies({copy}, src, dst, count * (piece + gap), count * piece, 0, 0, random);
          copy.src_stride = piece;
          copy.dst_stride = piece + gap;
          expect_copies({copy}, src, dst, count * piece, count * (piece + gap), 0, 0, random);
          copy.dst_offset = dtype_bytes(dst);
          expect_copies({copy}, src, dst, count * piece, count * (piece + gap) + 1, 0, 0, random);
        }
      }
    }
  }
}

TEST(Copies, RefuseToCastBytes) {
  const Copy copy = {0, 0, 1, 1, 1, 1, DType::byte, DType::f32};
  EXPECT_THROW(plan_copies(std::vector<Copy>{copy}), Error);
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
      const Uploaded plan(plan_cast_to_slot(layout));
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
      const Uploaded plan(plan_cast_to_segment(layout));
      kernels().copy(plan.list(), pool.data(), gathered.as<std::byte>() + stride * static_cast<size_t>(layout.rank()),
                     nullptr);
    }
    for (const Layout& layout : unit.layouts) {
      const Region slot(layout.slot_bytes());
      const Uploaded plan(plan_copy_out(layout, stride));
      kernels().copy(plan.list(), gathered.data(), slot.data(), nullptr);
      unit.expect_gathered(layout, slot.read());
    }
  }
}

TEST_P(CopyWorld, PeersPullTheSegments) {
  for (const Unit& unit : units()) {
    std::vector<Region> segments;
    PeerTable peers;
    peers.num_ranks = world();
    for (const Layout& layout : unit.layouts) {
      const Region pool(unit.shard_pool(layout), 0);
      const Uploaded plan(plan_cast_to_segment(layout));
      segments.emplace_back(layout.gather_segment_bytes());
      kernels().copy(plan.list(), pool.data(), segments.back().data(), nullptr);
      peers.base[layout.rank()] = segments.back().data();
    }
    for (const Layout& layout : unit.layouts) {
      const Region slot(layout.slot_bytes());
      const Uploaded plan(plan_all_gather_peer(layout));
      kernels().all_gather_peer(plan.list(), peers, slot.data(), nullptr);
      unit.expect_gathered(layout, slot.read());
    }
  }
}

TEST_P(CopyWorld, APeerGatherBeginsBehindTheOwnRank) {
  const Unit unit = units()[0];
  for (const Layout& layout : unit.layouts) {
    const CopyPlan plan = plan_all_gather_peer(layout);
    // Every rank has rows of some parameter.
    EXPECT_EQ(plan.segments.front().source, (layout.rank() + 1) % world());
  }
}

// --- packing ---------------------------------------------------------------------------------------------------------

struct Gradient {
  Bytes bytes;
  DType type;
};

// What packing makes of one element, by the CPU kernels.
void pack_element(std::byte* dst, DType dst_type, const std::byte* src, DType src_type, Scale scale, TableMode mode) {
  const DType wide = src_type == DType::f64 || dst_type == DType::f64 ? DType::f64 : DType::f32;
  std::array<std::byte, 8> value;
  cpu::cast_copy(wide, value.data(), src_type, src, 1);
  if (scale.mode == ScaleMode::multiply) cpu::multiply(wide, value.data(), 1, scale.value);
  if (scale.mode == ScaleMode::divide) cpu::divide(wide, value.data(), 1, scale.value);
  if (mode == TableMode::add) {
    cpu::add(dst_type, dst, wide, value.data(), 1);
  } else {
    cpu::cast_copy(dst_type, dst, wide, value.data(), 1);
  }
}

// Packs by walking every element of every whole gradient.
void pack_plainly(const std::vector<Layout>& layouts, const std::vector<Gradient>& gradients,
                  const std::vector<TableMode>& modes, const std::vector<bool>& missing, size_t stride, Scale scale,
                  Bytes& packed) {
  for (size_t p = 0; p < gradients.size(); ++p) {
    const ParamShape& shape = layouts[0].params()[p].shape;
    if (!shape.trainable || modes[p] == TableMode::skip || (modes[p] == TableMode::add && missing[p])) continue;
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
                       gradients[p].type, scale, modes[p]);
        }
      }
    }
  }
}

TEST_P(CopyWorld, GradientsArePacked) {
  std::mt19937_64 random(3);
  for (const Unit& unit : units()) {
    const Layout& layout = unit.layouts[0];
    const size_t stride = layout.reduce_segment_bytes() + kAlignBytes;  // as with flags behind the rows
    for (const Scale scale : {Scale(), divide_by(world()), multiply_by(0.3)}) {
      std::vector<Gradient> gradients;
      std::vector<DType> types;
      for (const ParamPlace& place : layout.params()) {
        constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};
        const DType type = place.shape.orig == DType::f64 ? DType::f64 : kTypes[random() % 3];
        gradients.push_back({random_bytes(type, place.shape.numel(), random), type});
        types.push_back(type);
      }
      const std::vector<CopyPlan> plans = plan_pack(layout, types, stride);
      ASSERT_EQ(plans.size(), 1u);
      const Uploaded plan(plans[0]);
      Bytes expected(stride * static_cast<size_t>(world()), Region::kFill);
      const Region packed(expected.size());
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
        }
        kernels().pack_gradients(plan.list(), table, packed.data(), scale, nullptr);
        pack_plainly(unit.layouts, gradients, modes, missing, stride, scale, expected);
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
          for (size_t i = end; i < begin + stride; ++i) EXPECT_EQ(got[i], Region::kFill) << "behind the segment";
        }
      }
    }
  }
}

TEST(Packing, MoreParametersThanALaunchCanName) {
  const std::vector<ParamShape> shapes(2 * kMaxTable + 10, {.outer = 1, .dim = 3, .inner = 5});
  const Layout layout(shapes, 2, 0);
  const std::vector<DType> types(shapes.size(), DType::f32);
  const std::vector<CopyPlan> plans = plan_pack(layout, types, layout.reduce_segment_bytes());
  ASSERT_EQ(plans.size(), 3u);
  const Region packed(2 * layout.reduce_segment_bytes());
  std::vector<Region> gradients;
  for (size_t p = 0; p < shapes.size(); ++p) {
    const std::vector<float> values(15, static_cast<float>(p));
    gradients.emplace_back(std::as_bytes(std::span(values)), 0);
  }
  for (const CopyPlan& part : plans) {
    PackTable table;
    for (size_t i = 0; i < kMaxTable && static_cast<size_t>(part.first) + i < gradients.size(); ++i) {
      table.base[i] = gradients[static_cast<size_t>(part.first) + i].data();
    }
    const Uploaded plan(part);
    kernels().pack_gradients(plan.list(), table, packed.data(), Scale(), nullptr);
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
}

INSTANTIATE_TEST_SUITE_P(Worlds, CopyWorld, testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace
}  // namespace fsdp2x::cuda
