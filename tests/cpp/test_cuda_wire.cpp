// Wire formats on the device against the CPU's, bit for bit (a NaN is a NaN).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "executor.hpp"
#include "kernels/cpu/kernels.hpp"
#include "kernels/cpu/wire.hpp"

namespace fsdp2x::cuda {

namespace {

using Bytes = std::vector<std::byte>;

// Values of all magnitudes, with blocks of zeros, values too small for a scale, and values that are no number.
std::vector<float> some_values(int64_t numel, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(numel));
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t block = i / kWireBlock + seed;
    const float scale = std::ldexp(1.0f, static_cast<int>(block % 9) * 30 - 120);
    values[i] = block % 7 == 3 ? 0.0f : normal(random) * scale;
    if (block % 11 == 5 && i % 50 == 7) values[i] = std::numeric_limits<float>::denorm_min();
    if (block % 13 == 6 && i % 97 == 3) values[i] = std::numeric_limits<float>::infinity();
    if (block % 13 == 8 && i % 97 == 3) values[i] = std::numeric_limits<float>::quiet_NaN();
    if (i % 31 == 0) values[i] = -values[i];
  }
  return values;
}

Bytes as_type(DType type, const std::vector<float>& values) {
  Bytes bytes(values.size() * dtype_bytes(type));
  cpu::cast_copy(type, bytes.data(), DType::f32, values.data(), static_cast<int64_t>(values.size()));
  return bytes;
}

template <class T>
T* part(Bytes& bytes, int64_t offset) {
  return reinterpret_cast<T*>(bytes.data() + offset);
}

size_t code_bytes(WireFormat format) {
  return format == WireFormat::plain ? sizeof(float) : format == WireFormat::bf16 ? sizeof(uint16_t) : 1;
}

// One entry after the other: | codes | scales |, 64-byte aligned. The values of each are in their pieces.
struct Sent {
  std::vector<WireSegment> segments;
  int64_t bytes = 0;
  int64_t values_bytes = 0;

  void add(WireFormat format, DType type, int64_t numel, int64_t piece_numel, int64_t gap) {
    WireSegment one;
    one.format = format;
    one.type = type;
    one.numel = numel;
    one.piece_numel = piece_numel;
    one.stride = piece_numel + gap;
    one.source = static_cast<int32_t>(segments.size());
    one.values_offset = values_bytes;
    values_bytes +=
        static_cast<int64_t>(align_up(static_cast<size_t>(numel / piece_numel * one.stride + 3) * dtype_bytes(type)));
    one.codes_offset = bytes;
    bytes += static_cast<int64_t>(align_up(static_cast<size_t>(numel) * code_bytes(format)));
    one.scales_offset = bytes;
    bytes += static_cast<int64_t>(align_up(static_cast<size_t>(num_wire_blocks(numel)) * sizeof(float)));
    segments.push_back(one);
  }
};

// Scales and f32 codes are compared as floats, the rest as bytes.
void expect_same_segments(const Sent& sent, const Bytes& got, const Bytes& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const WireSegment& one : sent.segments) {
    const auto cut = [&](const Bytes& from, int64_t offset, size_t size) {
      return Bytes(from.begin() + offset, from.begin() + offset + static_cast<std::ptrdiff_t>(size));
    };
    const size_t codes = static_cast<size_t>(one.numel) * code_bytes(one.format);
    const DType type = one.format == WireFormat::plain  ? DType::f32
                       : one.format == WireFormat::bf16 ? DType::bf16
                                                        : DType::byte;
    EXPECT_TRUE(same(type, cut(got, one.codes_offset, codes), cut(wanted, one.codes_offset, codes)));
    if (!has_scales(one.format)) continue;
    const size_t scales = static_cast<size_t>(num_wire_blocks(one.numel)) * sizeof(float);
    EXPECT_TRUE(same(DType::f32, cut(got, one.scales_offset, scales), cut(wanted, one.scales_offset, scales)));
  }
}

constexpr int64_t kNumels[] = {1, 31, 255, 256, 257, 4095, 4096, 4097, 9000};

TEST(CudaWire, WeightsAreCodedAndDecodedAsOnTheCpu) {
  for (const WireFormat format : {WireFormat::int8, WireFormat::fp8}) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
      Sent sent;
      for (const int64_t numel : kNumels) sent.add(format, type, numel, numel, 0);
      Bytes values(static_cast<size_t>(sent.values_bytes)), wanted(static_cast<size_t>(sent.bytes), Region::kFill);
      Bytes decoded(values.size(), Region::kFill);
      for (const WireSegment& one : sent.segments) {
        const Bytes some = as_type(type, some_values(one.numel, static_cast<uint32_t>(one.numel)));
        std::copy(some.begin(), some.end(), values.begin() + one.values_offset);
        cpu::encode_wire(format, wanted.data() + one.codes_offset, part<float>(wanted, one.scales_offset), type,
                         values.data() + one.values_offset, one.numel);
        cpu::decode_wire(format, type, decoded.data() + one.values_offset, wanted.data() + one.codes_offset,
                         part<float>(wanted, one.scales_offset), 0, one.numel);
      }
      const Uploaded plan(make_plan(sent.segments));
      const Region from(values, 0), segments(wanted.size()), back(values.size());
      EncodeWireArgs args;
      args.values = from.data();
      args.segments = segments.data();
      kernels().encode_wire(plan.list(), args, nullptr);
      expect_same_segments(sent, segments.read(), wanted);
      kernels().decode_wire(plan.list(), segments.data(), back.data(), nullptr);
      EXPECT_TRUE(same(type, back.read(), decoded));
    }
  }
}

TEST(CudaWire, PiecesLieApart) {
  for (const DType type : {DType::f32, DType::bf16}) {
    Sent sent;
    for (const int64_t piece : {1, 3, 8, 100, 256, 300}) sent.add(WireFormat::int8, type, piece * 40, piece, 5);
    Bytes codes(static_cast<size_t>(sent.bytes)), wanted(static_cast<size_t>(sent.values_bytes), Region::kFill);
    for (const WireSegment& one : sent.segments) {
      const std::vector<float> values = some_values(one.numel, static_cast<uint32_t>(one.piece_numel));
      auto* const scales = part<float>(codes, one.scales_offset);
      cpu::encode_wire(one.format, codes.data() + one.codes_offset, scales, DType::f32, values.data(), one.numel);
      for (int64_t i = 0; i < one.numel; ++i) {
        const int64_t place = i / one.piece_numel * one.stride + i % one.piece_numel;
        cpu::decode_wire(one.format, type,
                         wanted.data() + one.values_offset + place * static_cast<int64_t>(dtype_bytes(type)),
                         codes.data() + one.codes_offset, scales, i, 1);
      }
    }
    const Uploaded plan(make_plan(sent.segments));
    const Region segments(codes, 0), values(wanted.size()), again(codes.size());
    kernels().decode_wire(plan.list(), segments.data(), values.data(), nullptr);
    EXPECT_TRUE(same(type, values.read(), wanted));
    // Encoding decoded values gives the same codes, if the scale is a number and the type holds the values.
    EncodeWireArgs args;
    args.values = values.data();
    args.segments = again.data();
    kernels().encode_wire(plan.list(), args, nullptr);
    for (const WireSegment& one : sent.segments) {
      std::vector<float> dense(static_cast<size_t>(one.numel));
      Bytes expected(codes.size());
      for (int64_t i = 0; i < one.numel; ++i) {
        const int64_t place = i / one.piece_numel * one.stride + i % one.piece_numel;
        cpu::cast_copy(DType::f32, &dense[static_cast<size_t>(i)], type,
                       wanted.data() + one.values_offset + place * static_cast<int64_t>(dtype_bytes(type)), 1);
      }
      cpu::encode_wire(one.format, expected.data() + one.codes_offset, part<float>(expected, one.scales_offset),
                       DType::f32, dense.data(), one.numel);
      Sent alone;
      alone.segments = {one};
      expect_same_segments(alone, again.read(), expected);
    }
  }
}

TEST(CudaWire, ErrorsAreKeptAsOnTheCpu) {
  Sent sent;
  for (const int64_t numel : kNumels) sent.add(WireFormat::int8, DType::f32, numel, numel, 0);
  sent.add(WireFormat::bf16, DType::f32, 700, 700, 0);
  sent.add(WireFormat::plain, DType::f32, 300, 300, 0);
  const auto size = static_cast<size_t>(sent.bytes);
  Bytes errors(size), wanted(size, Region::kFill);
  const Uploaded plan(make_plan(sent.segments));
  const Region kept(errors, 0), segments(size);
  for (uint32_t round = 0; round < 4; ++round) {
    Bytes values(static_cast<size_t>(sent.values_bytes));
    EncodeWireArgs args;
    for (const WireSegment& one : sent.segments) {
      args.is_missing[one.source] = (static_cast<uint32_t>(one.source) + round) % 4 == 1 && has_scales(one.format);
      const Bytes some = as_type(DType::f32, some_values(one.numel, static_cast<uint32_t>(one.source) + 40 * round));
      std::copy(some.begin(), some.end(), values.begin() + one.values_offset);
      auto* const codes = wanted.data() + one.codes_offset;
      auto* const scales = part<float>(wanted, one.scales_offset);
      if (args.is_missing[one.source]) {
        std::fill_n(codes, one.numel, std::byte{0});
        std::fill_n(scales, num_wire_blocks(one.numel), 1.0f);
      } else if (one.format == WireFormat::int8) {
        cpu::encode_int8_with_errors(reinterpret_cast<uint8_t*>(codes), scales, part<uint8_t>(errors, one.codes_offset),
                                     part<float>(errors, one.scales_offset), part<float>(values, one.values_offset),
                                     one.numel);
      } else {
        cpu::cast_copy(one.format == WireFormat::bf16 ? DType::bf16 : DType::f32, codes, DType::f32,
                       values.data() + one.values_offset, one.numel);
      }
    }
    const Region from(values, 0);
    args.values = from.data();
    args.segments = segments.data();
    args.errors = kept.data();
    kernels().encode_wire(plan.list(), args, nullptr);
    expect_same_segments(sent, segments.read(), wanted);
    const Bytes left = kept.read();
    for (const WireSegment& one : sent.segments) {
      Sent alone;
      alone.segments = {one};
      if (one.format == WireFormat::int8) expect_same_segments(alone, left, errors);
    }
  }
}

TEST(CudaWire, SumsAreThoseOfTheCpu) {
  for (const int num_ranks : {1, 2, 3, 80}) {
    Sent sent;
    for (const WireFormat format : {WireFormat::int8, WireFormat::bf16, WireFormat::plain}) {
      for (const int64_t numel : {1, 300, 4500}) sent.add(format, DType::f32, numel, numel, 0);
    }
    Bytes all(static_cast<size_t>(sent.bytes * num_ranks));
    Bytes wanted(static_cast<size_t>(sent.values_bytes), Region::kFill);
    for (const WireSegment& one : sent.segments) {
      auto* const sums = part<float>(wanted, one.values_offset);
      std::fill_n(sums, one.numel, 0.0f);
      for (int rank = 0; rank < num_ranks; ++rank) {
        const std::vector<float> values = some_values(one.numel, static_cast<uint32_t>(rank + one.source));
        std::byte* const segment = all.data() + rank * sent.bytes;
        std::byte* const codes = segment + one.codes_offset;
        auto* const scales = reinterpret_cast<float*>(segment + one.scales_offset);
        if (one.format == WireFormat::plain) {
          std::memcpy(codes, values.data(), values.size() * sizeof(float));
          cpu::add(DType::f32, sums, DType::f32, codes, one.numel);
        } else {
          cpu::encode_wire(one.format, codes, scales, DType::f32, values.data(), one.numel);
          cpu::add_wire(one.format, sums, codes, scales, one.numel);
        }
      }
    }
    const Uploaded plan(make_plan(sent.segments));
    const Region segments(all, 0);
    for (const double divisor : {1.0, 2.0, 3.0}) {
      Bytes divided = wanted;
      for (const WireSegment& one : sent.segments) {
        cpu::divide(DType::f32, divided.data() + one.values_offset, one.numel, divisor);
      }
      const Region sums(wanted.size());
      SumWireArgs args;
      args.segments = segments.data();
      args.rank_bytes = sent.bytes;
      args.num_ranks = num_ranks;
      args.scale = divide_by(divisor);
      args.values = sums.data();
      kernels().sum_wire(plan.list(), args, nullptr);
      args.num_ranks = 0;
      EXPECT_THROW(kernels().sum_wire(plan.list(), args, nullptr), Error);
      EXPECT_TRUE(same(DType::f32, sums.read(), divided));
    }
  }
}

TEST(CudaWire, PlansRefuseWhatKernelsCannotCount) {
  WireSegment one;
  one.numel = one.piece_numel = 256;
  one.type = DType::f64;
  EXPECT_THROW(make_plan(std::vector{one}), Error);
  one.type = DType::f32;
  one.source = kMaxTable;
  EXPECT_THROW(make_plan(std::vector{one}), Error);
  one.source = 0;
  one.piece_numel = (int64_t{1} << 31) + 1;
  one.numel = 2 * one.piece_numel;
  EXPECT_THROW(make_plan(std::vector{one}), Error);
  EXPECT_EQ(make_plan(std::vector<WireSegment>{}).num_tiles(), 0);
}

}  // namespace

}  // namespace fsdp2x::cuda
