// Reductions on the kernels against cpu::reduce bit for bit, norms against plain sums, over every type and mode.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "core/error.hpp"
#include "executor.hpp"
#include "kernels/cpu/kernels.hpp"
#include "virtual_ranks.hpp"

namespace fsdp2x::cuda {
namespace {

constexpr std::array kSizes = {1, 7, 8, 9, 4095, 4097, 9001};
constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16};

ReduceSegment segment_of(DType src, DType dst, int64_t numel, int target = 0) {
  ReduceSegment segment;
  segment.numel = numel;
  segment.target = target;
  segment.src = src;
  segment.dst = dst;
  return segment;
}

double sum_of(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

struct Case {
  DType src;
  DType dst;
  int64_t numel;
  double divisor;
  bool round;
  TableMode mode;
  size_t shift;  // of all memory, in elements
};

void expect_reduction(const Case& c, std::mt19937_64& random) {
  const Bytes content = random_bytes(c.src, c.numel, random);
  const Region source(content, c.shift * dtype_bytes(c.src));
  Bytes expected = random_bytes(c.dst, c.numel, random);
  const Region out(expected, c.shift * dtype_bytes(c.dst));
  TargetTable targets;
  targets.base[0] = out.data();
  targets.mode[0] = c.mode;
  ReduceArgs args;
  args.scale = divide_by(c.divisor);
  args.round = c.round;
  const Uploaded plan(make_plan(std::vector{segment_of(c.src, c.dst, c.numel)}));
  kernels().reduce(plan.list(), source.data(), targets, args, nullptr);

  if (c.mode != TableMode::skip) {
    const void* pointer = content.data();
    cpu::ReducePiece piece;
    piece.src_type = c.src;
    piece.dst_type = c.dst;
    piece.sources = &pointer;
    piece.num_sources = 1;
    piece.dst = expected.data();
    piece.numel = c.numel;
    piece.divisor = c.divisor;
    piece.round = c.round;
    piece.accumulate = c.mode == TableMode::add;
    cpu::reduce(piece);
  }
  EXPECT_TRUE(same(c.dst, out.read(), expected))
      << dtype_name(c.src) << " to " << dtype_name(c.dst) << ", " << c.numel << " elements, divisor " << c.divisor
      << ", mode " << static_cast<int>(c.mode) << ", shift " << c.shift;
}

TEST(Reduce, EqualsTheCpuKernels) {
  std::mt19937_64 random(1);
  for (const DType src : kTypes) {
    for (const DType dst : kTypes) {
      for (const double divisor : {1.0, 2.0, 3.0, 4.0, 5.0, 8.0}) {
        for (const int64_t numel : kSizes) {
          Case c = {src, dst, numel, divisor, false, TableMode::write, 0};
          c.mode = static_cast<TableMode>(random() % 3);
          c.round = random() % 2 == 0;
          c.shift = random() % 4 == 0 ? 1 : 0;
          if (random() % 4 == 0) c.divisor = 7.0;
          expect_reduction(c, random);
        }
      }
    }
  }
}

TEST(Reduce, ComputesFloats) {
  EXPECT_THROW(make_plan(std::vector{segment_of(DType::byte, DType::f32, 1)}), Error);
  EXPECT_THROW(make_plan(std::vector{segment_of(DType::f32, DType::f64, 1)}), Error);
}

// Squares of gradients in place, in any type and at any address, with the same bits every time. Clipping by them.
TEST(Norms, SquaresOfTargetsAndTheirScaling) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  const std::array numels = {int64_t{10000}, int64_t{5}, int64_t{4099}};
  for (const DType type : kTypes) {
    for (const size_t shift : {size_t{0}, size_t{1}}) {
      std::vector<ReduceSegment> segments;
      std::vector<Region> gradients;
      std::vector<Bytes> before;
      TargetTable targets;
      targets.mode[1] = TableMode::skip;
      double expected = 0.0;
      for (size_t i = 0; i < numels.size(); ++i) {
        reference::Buffer values(type, numels[i]);
        for (int64_t k = 0; k < numels[i]; ++k) {
          values.set(k, normal(random));
          if (i != 1) expected += values.get_double(k) * values.get_double(k);
        }
        before.push_back(bytes_of(values, numels[i]));
        gradients.emplace_back(before.back(), shift * dtype_bytes(type));
        targets.base[i] = gradients.back().data();
        segments.push_back(segment_of(type, type, numels[i], static_cast<int>(i)));
      }
      const Uploaded plan(make_plan(segments));
      const int64_t num_tiles = plan.plan().num_tiles();
      ASSERT_EQ(num_tiles, 6);
      const Region sums(static_cast<size_t>(num_tiles) * sizeof(double)), again(sums.bytes());
      const Region total(sizeof(double)), norm(sizeof(double)), factor(sizeof(double));
      kernels().sum_squares(plan.list(), targets, sums.as<double>(), nullptr);
      kernels().sum_squares(plan.list(), targets, again.as<double>(), nullptr);
      const std::vector<double> tile_sums = sums.read_as<double>();
      EXPECT_NEAR(sum_of(tile_sums), expected, 1e-12 * expected) << dtype_name(type) << ", shift " << shift;
      EXPECT_EQ(tile_sums[3], 0.0) << "the skipped target";
      EXPECT_EQ(again.read_as<double>(), tile_sums);

      kernels().add_up(sums.as<double>(), num_tiles, total.as<double>(), nullptr);
      EXPECT_NEAR(total.read_as<double>()[0], expected, 1e-12 * expected);
      kernels().clip_factor(total.as<double>(), 0.5, false, norm.as<double>(), factor.as<double>(), nullptr);
      const auto root = static_cast<float>(std::sqrt(total.read_as<double>()[0]));
      EXPECT_EQ(norm.read_as<double>()[0], root);
      EXPECT_EQ(factor.read_as<double>()[0], 1.0f / (root + 1e-6f) * 0.5f);

      kernels().scale_gradients(plan.list(), targets, factor.as<double>(), nullptr);
      for (size_t i = 0; i < numels.size(); ++i) {
        Bytes scaled = before[i];
        if (i != 1) cpu::multiply(type, scaled.data(), numels[i], factor.read_as<double>()[0]);
        EXPECT_TRUE(same(type, gradients[i].read(), scaled)) << dtype_name(type) << ", shift " << shift;
      }
      const double one = 1.0;
      const Region no_factor(std::as_bytes(std::span(&one, 1)), 0);
      const Bytes clipped = gradients[0].read();
      kernels().scale_gradients(plan.list(), targets, no_factor.as<double>(), nullptr);
      EXPECT_EQ(gradients[0].read(), clipped);
    }
  }
}

TEST(Norms, ClippingLeavesSmallNormsAndPassesNanOn) {
  const Region norm(sizeof(double)), factor(sizeof(double));
  for (const bool in_f64 : {false, true}) {
    const auto run = [&](double square_sum, double max_norm) {
      const Region sum(std::as_bytes(std::span(&square_sum, 1)), 0);
      kernels().clip_factor(sum.as<double>(), max_norm, in_f64, norm.as<double>(), factor.as<double>(), nullptr);
      return factor.read_as<double>()[0];
    };
    EXPECT_EQ(run(0.25, 1.0), 1.0);
    EXPECT_EQ(norm.read_as<double>()[0], 0.5);
    EXPECT_EQ(run(9.0, 0.1), in_f64 ? 1.0 / (3.0 + 1e-6) * 0.1 : 1.0f / (3.0f + 1e-6f) * 0.1f);
    EXPECT_EQ(norm.read_as<double>()[0], 3.0);
    run(2.0, 1.0);
    EXPECT_EQ(norm.read_as<double>()[0], in_f64 ? std::sqrt(2.0) : static_cast<float>(std::sqrt(2.0)));
    EXPECT_EQ(run(std::numeric_limits<double>::infinity(), 1.0), 0.0);
    EXPECT_TRUE(std::isnan(run(std::numeric_limits<double>::quiet_NaN(), 1.0)));
  }
}

TEST(Norms, AddingUpTakesAnyNumber) {
  for (const size_t num :
       {size_t{0}, size_t{1}, size_t{255}, size_t{1024}, size_t{5000}, size_t{8192}, size_t{40000}}) {
    std::vector<double> values(num + 1, 1e9);  // the last value belongs to no sum
    for (size_t i = 0; i < num; ++i) values[i] = static_cast<double>(i % 17) - 3.0;
    const Region in(std::as_bytes(std::span(values)), 0);
    const size_t num_sums = std::max<size_t>((num + kSumNumel - 1) / kSumNumel, 1);
    const Region sums(num_sums * sizeof(double));
    kernels().add_up(in.as<double>(), static_cast<int64_t>(num), sums.as<double>(), nullptr);
    const std::vector<double> got = sums.read_as<double>();
    for (size_t i = 0; i < num_sums; ++i) {
      const size_t begin = i * kSumNumel, end = std::min<size_t>(num, begin + kSumNumel);
      EXPECT_EQ(got[i], std::accumulate(values.data() + begin, values.data() + end, 0.0))
          << "sum " << i << " of " << num;
    }
  }
}

// --- virtual ranks ---------------------------------------------------------------------------------------------------

class ReduceWorld : public VirtualRanks {};

// Every rank packs different gradients, and the sum of the packed ones reaches the owner's rows.
TEST_P(ReduceWorld, PackedGradientsReachTheirOwners) {
  for (const Unit& unit : units()) {
    const Layout& first = unit.layouts[0];
    const size_t stride = first.reduce_segment_bytes();
    std::vector<DType> types;
    for (const ParamPlace& place : first.params()) types.push_back(place.shape.compute);
    const Uploaded pack(plan_pack(first, types, stride).at(0));
    const auto has_kernels = [](const ParamShape& shape) { return shape.trainable && computes(shape.reduce); };
    std::vector<Bytes> packed;
    for (int rank = 0; rank < world(); ++rank) {
      std::vector<Region> gradients;
      PackTable table;
      for (size_t p = 0; p < first.params().size(); ++p) {
        const ParamShape& shape = first.params()[p].shape;
        Bytes whole(static_cast<size_t>(shape.numel()) * dtype_bytes(types[p]));
        // Small integers, so that every partial sum is exact in every type.
        for (int64_t i = 0; i < shape.numel(); ++i) put(whole, 0, types[p], i, static_cast<double>((i + rank) % 13));
        gradients.emplace_back(whole, 0);
        table.base[p] = gradients.back().data();
      }
      const Region buffer(stride * static_cast<size_t>(world()));
      kernels().pack_gradients(pack.list(), table, buffer.data(), nullptr);
      packed.push_back(buffer.read());
    }
    for (const Layout& layout : unit.layouts) {
      Bytes summed(stride);  // as a reduce-scatter leaves it
      for (const ParamPlace& place : layout.params()) {
        const size_t offset = place.reduce_segment_offset;
        for (int64_t i = 0; has_kernels(place.shape) && i < place.shard_numel; ++i) {
          double sum = 0;
          for (const Bytes& one : packed) {
            sum += get(one, stride * static_cast<size_t>(layout.rank()) + offset, place.shape.reduce, i);
          }
          put(summed, offset, place.shape.reduce, i, sum);
        }
      }
      const Region segment(summed, 0);
      const Region pool(layout.shard_pool_bytes());
      TargetTable targets;
      for (size_t p = 0; p < layout.params().size(); ++p) {
        targets.base[p] = pool.as<std::byte>() + layout.params()[p].shard_offset;
      }
      const Uploaded plan(plan_reduce(layout).at(0));
      ReduceArgs args;
      args.scale = divide_by(0.5);
      for (const TableMode mode : {TableMode::write, TableMode::add}) {
        std::fill(std::begin(targets.mode), std::end(targets.mode), mode);
        kernels().reduce(plan.list(), segment.data(), targets, args, nullptr);
        const Bytes got = pool.read();
        const double factor = mode == TableMode::write ? 2.0 : 4.0;
        for (size_t p = 0; p < layout.params().size(); ++p) {
          const ParamPlace& place = layout.params()[p];
          const ParamShape& shape = place.shape;
          int64_t local = 0;
          for (int64_t o = 0; has_kernels(shape) && o < shape.outer; ++o) {
            for (int64_t k = place.rows.begin * shape.inner; k < place.rows.end * shape.inner; ++k, ++local) {
              double sum = 0;
              for (int rank = 0; rank < world(); ++rank) {
                sum += static_cast<double>((o * shape.dim * shape.inner + k + rank) % 13);
              }
              ASSERT_EQ(get(got, place.shard_offset, shape.orig, local), factor * sum) << "parameter " << p;
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReduceWorld, testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace
}  // namespace fsdp2x::cuda
