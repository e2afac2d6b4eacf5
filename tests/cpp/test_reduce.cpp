// The reduction kernel against its scalar reference, bit for bit, complete and in ranges.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/kernels.hpp"
#include "reference.hpp"

namespace fsdp2x {
namespace {

using cpu::ReducePiece;
using reference::Buffer;
using reference::kTypes;

struct Case {
  DType src = DType::f32;
  DType dst = DType::f32;
  int num_sources = 2;
  int64_t numel = 100;
  double divisor = 2.0;
  bool accumulate = false;
};

template <class A>
A value_at(const Buffer& buffer, int64_t index) {
  if constexpr (sizeof(A) == 8) return buffer.get_double(index);
  return static_cast<A>(buffer.get_float(index));
}

// Reduces one element after the other.
template <class A>
void reduce_plainly(const Case& c, const std::vector<Buffer>& sources, Buffer& dst) {
  Buffer rounded(c.dst, 1);
  for (int64_t i = 0; i < c.numel; ++i) {
    A sum = 0;
    for (size_t s = 0; s < sources.size(); ++s) {
      const A value = value_at<A>(sources[s], i);
      sum = s == 0 ? value : sum + value;
    }
    rounded.set(0, sum / static_cast<A>(c.divisor));
    const A result = value_at<A>(rounded, 0);
    dst.set(i, c.accumulate ? value_at<A>(dst, i) + result : result);
  }
}

void check(const Case& c, uint64_t seed, bool finite = false) {
  std::mt19937_64 random(seed);
  std::vector<Buffer> sources;
  std::vector<const void*> pointers;
  for (int s = 0; s < c.num_sources; ++s) {
    sources.emplace_back(c.src, c.numel);
    sources.back().fill_random(random);
    for (int64_t i = 0; finite && i < c.numel; ++i) {
      sources.back().set(i, static_cast<double>(static_cast<int64_t>(random())) * 0x1p-63);
    }
  }
  for (const Buffer& source : sources) pointers.push_back(source.data());
  Buffer dst(c.dst, c.numel);
  if (finite) {
    for (int64_t i = 0; i < c.numel; ++i) dst.set(i, static_cast<float>(i % 7));
  } else {
    dst.fill_random(random);
  }
  Buffer expected = dst;
  const bool wide = c.src == DType::f64 || c.dst == DType::f64;
  wide ? reduce_plainly<double>(c, sources, expected) : reduce_plainly<float>(c, sources, expected);

  ReducePiece piece;
  piece.src_type = c.src;
  piece.dst_type = c.dst;
  piece.sources = pointers.data();
  piece.num_sources = c.num_sources;
  Buffer in_ranges = dst;
  piece.dst = dst.data();
  piece.numel = c.numel;
  piece.divisor = c.divisor;
  piece.accumulate = c.accumulate;
  cpu::reduce(piece);
  const std::string what = std::string(dtype_name(c.src)) + " to " + dtype_name(c.dst) + ", " +
                           std::to_string(c.num_sources) + " sources, " + std::to_string(c.numel) + " elements, / " +
                           std::to_string(c.divisor);
  ASSERT_TRUE(dst.equals(expected, false)) << what << (c.accumulate ? ", accumulated" : "");
  piece.dst = in_ranges.data();
  const auto cut = static_cast<int64_t>(random() % static_cast<uint64_t>(c.numel + 1));
  cpu::reduce(piece, cut, c.numel);
  cpu::reduce(piece, 0, cut);
  ASSERT_TRUE(in_ranges.equals(expected, false)) << what << ", cut at " << cut;
}

class Reduce : public reference::EveryIsa {};

TEST_P(Reduce, EveryPairOfTypesAndNumberOfSources) {
  uint64_t seed = 0;
  for (const DType src : kTypes) {
    for (const DType dst : kTypes) {
      for (int num_sources = 0; num_sources <= 8; ++num_sources) {
        for (const bool accumulate : {false, true}) {
          for (const int64_t numel : {1, 17, 1025}) {
            Case c{.src = src, .dst = dst, .num_sources = num_sources, .numel = numel, .accumulate = accumulate};
            c.divisor = num_sources == 0 ? 2.0 : num_sources;
            check(c, ++seed);
          }
        }
      }
    }
  }
}

TEST_P(Reduce, SizesAroundTilesAndVectors) {
  for (const int64_t numel : {1, 2, 7, 8, 15, 16, 31, 32, 33, 1023, 1024, 1040, 2048, 5000}) {
    for (int num_sources = 1; num_sources <= 5; ++num_sources) {
      check({.num_sources = num_sources, .numel = numel, .divisor = 3.0}, static_cast<uint64_t>(numel), true);
      check({.src = DType::bf16, .num_sources = num_sources, .numel = numel, .divisor = 4.0, .accumulate = true},
            static_cast<uint64_t>(numel), true);
    }
  }
}

TEST_P(Reduce, LargePiecesGoPastTheCaches) {
  const auto numel = static_cast<int64_t>(cpu::kStreamSumBytes / sizeof(float)) + 77;
  for (int num_sources = 1; num_sources <= 4; ++num_sources) {
    for (const double divisor : {2.0, 3.0}) {
      check({.num_sources = num_sources, .numel = numel, .divisor = divisor}, 11);
    }
  }
}

// Sources of different types give the same result as after widening.
TEST_P(Reduce, SourcesOfDifferentTypes) {
  std::mt19937_64 random(13);
  for (const int64_t numel : {1, 33, 1024, 3000}) {
    for (const DType dst : {DType::f32, DType::bf16}) {
      for (const bool accumulate : {false, true}) {
        const std::vector<DType> types = {DType::bf16, DType::f32, DType::f16};
        std::vector<Buffer> narrow, wide;
        std::vector<const void*> pointers, wide_pointers;
        for (const DType type : types) {
          narrow.emplace_back(type, numel);
          for (int64_t i = 0; i < numel; ++i) {
            narrow.back().set(i, static_cast<double>(static_cast<int64_t>(random())) * 0x1p-63);
          }
          wide.emplace_back(DType::f32, numel);
          cpu::cast_copy(DType::f32, wide.back().data(), type, narrow.back().data(), numel);
        }
        for (size_t s = 0; s < types.size(); ++s) {
          pointers.push_back(narrow[s].data());
          wide_pointers.push_back(wide[s].data());
        }
        Buffer got(dst, numel);
        for (int64_t i = 0; i < numel; ++i) got.set(i, static_cast<double>(i % 7));
        Buffer expected = got;
        ReducePiece piece;
        piece.dst_type = dst;
        piece.num_sources = static_cast<int>(types.size());
        piece.numel = numel;
        piece.divisor = 3.0;
        piece.round = true;
        piece.accumulate = accumulate;
        piece.sources = wide_pointers.data();
        piece.dst = expected.data();
        cpu::reduce(piece);
        piece.sources = pointers.data();
        piece.source_types = types.data();
        piece.dst = got.data();
        cpu::reduce(piece);
        EXPECT_TRUE(got.equals(expected, false)) << numel << " elements to " << dtype_name(dst);
      }
    }
  }
}

TEST_P(Reduce, Divisors) {
  for (const double divisor : {1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 0.5, 0.3, -2.0, 0x1p-140, 0x1p127}) {
    for (const DType src : kTypes) {
      check({.src = src, .divisor = divisor}, 7);
      check({.src = src, .num_sources = 6, .divisor = divisor, .accumulate = true}, 8);
    }
  }
}

TEST_P(Reduce, RefusesBytes) {
  std::vector<float> out(4);
  const void* sources[] = {out.data()};
  ReducePiece piece;
  piece.sources = sources;
  piece.num_sources = 1;
  piece.dst = out.data();
  piece.numel = 4;
  piece.src_type = DType::byte;
  EXPECT_THROW(cpu::reduce(piece), Error);
  piece.src_type = DType::f32;
  piece.dst_type = DType::byte;
  EXPECT_THROW(cpu::reduce(piece), Error);
}

INSTANTIATE_TEST_SUITE_P(Isa, Reduce, reference::kAllIsas, reference::isa_name);

}  // namespace
}  // namespace fsdp2x
