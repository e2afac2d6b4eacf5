// Units sharded over W virtual ranks in one process, with shard pools and whole tensors of known values.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "core/layout.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x::cuda {

using Bytes = std::vector<std::byte>;

inline void put(Bytes& buffer, size_t offset, DType type, int64_t index, double value) {
  cpu::cast_copy(type, buffer.data() + offset + static_cast<size_t>(index) * dtype_bytes(type), DType::f64, &value, 1);
}

inline double get(const Bytes& buffer, size_t offset, DType type, int64_t index) {
  double value = 0;
  cpu::cast_copy(DType::f64, &value, type, buffer.data() + offset + static_cast<size_t>(index) * dtype_bytes(type), 1);
  return value;
}

struct Unit {
  std::vector<Layout> layouts;  // by rank

  // Distinct within a tile and held exactly by bf16, so that casts keep them.
  static double value_of(size_t param, int64_t index) {
    return static_cast<double>((static_cast<int64_t>(param) * 37 + index) % 251 + 1);
  }

  // The shard pool of a rank, filled from the whole tensors element by element.
  Bytes shard_pool(const Layout& layout) const {
    Bytes pool(layout.shard_pool_bytes());
    for (size_t i = 0; i < layout.params().size(); ++i) {
      const ParamPlace& place = layout.params()[i];
      const ParamShape& shape = place.shape;
      int64_t local = 0;
      for (int64_t o = 0; o < shape.outer; ++o) {
        for (int64_t k = place.rows.begin * shape.inner; k < place.rows.end * shape.inner; ++k) {
          put(pool, place.shard_offset, shape.orig, local++, value_of(i, o * shape.dim * shape.inner + k));
        }
      }
    }
    return pool;
  }

  void expect_gathered(const Layout& layout, const Bytes& slot) const {
    for (size_t i = 0; i < layout.params().size(); ++i) {
      const ParamPlace& place = layout.params()[i];
      for (int64_t index = 0; index < place.shape.numel(); ++index) {
        ASSERT_EQ(get(slot, place.slot_offset, place.shape.compute, index), value_of(i, index))
            << "parameter " << i << " element " << index << " of rank " << layout.rank();
      }
    }
  }
};

class VirtualRanks : public testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }

  Unit unit(const std::vector<ParamShape>& shapes) const {
    Unit result;
    for (int rank = 0; rank < world(); ++rank) result.layouts.emplace_back(shapes, world(), rank);
    return result;
  }

  // One of every type with odd sizes, uneven, short and empty shards, and Shard(d > 0); some larger than a tile. f64 is
  // only moved: plans of gradients leave it out.
  std::vector<Unit> units() const {
    std::vector<ParamShape> odd(8);
    odd[0] = {.outer = 1, .dim = 7, .inner = 5, .compute = DType::bf16};
    odd[1] = {.outer = 1, .dim = 3, .inner = 1, .trainable = false};
    odd[2] = {.outer = 4, .dim = 6, .inner = 3, .compute = DType::bf16, .reduce = DType::bf16};
    odd[3] = {.outer = 1, .dim = 1, .inner = 1};
    odd[4] = {.outer = 3, .dim = 5, .inner = 1, .orig = DType::f64, .compute = DType::f64, .reduce = DType::f64};
    odd[5] = {.outer = 1, .dim = 0, .inner = 9};
    odd[6] = {.outer = 2, .dim = 8, .inner = 16, .orig = DType::bf16, .compute = DType::bf16, .reduce = DType::f32};
    odd[7] = {.outer = 1, .dim = 9, .inner = 24, .orig = DType::f16, .compute = DType::f16, .reduce = DType::f16};
    std::vector<ParamShape> large(3);
    large[0] = {.outer = 1, .dim = 129, .inner = 104, .compute = DType::bf16, .reduce = DType::bf16};
    large[1] = {.outer = 5, .dim = 33, .inner = 40, .compute = DType::bf16};
    large[2] = {.outer = 1, .dim = 10007, .inner = 1, .orig = DType::bf16, .compute = DType::f16};
    return {unit(odd), unit(large)};
  }
};

}  // namespace fsdp2x::cuda
