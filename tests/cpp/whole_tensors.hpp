// Full tensors of known values: the ranks' shards of them, and a check that they come out complete.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/layout.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

using Bytes = std::vector<std::byte>;

inline void put(Bytes& buffer, size_t offset, DType type, int64_t index, double value) {
  cpu::cast_copy(type, buffer.data() + offset + static_cast<size_t>(index) * dtype_bytes(type), DType::f64, &value, 1);
}

inline double get(const Bytes& buffer, size_t offset, DType type, int64_t index) {
  double value = 0;
  cpu::cast_copy(DType::f64, &value, type, buffer.data() + offset + static_cast<size_t>(index) * dtype_bytes(type), 1);
  return value;
}

// Distinct within a tile and exact in bf16, so that casts keep them.
inline double value_of(size_t param, int64_t index) {
  return static_cast<double>((static_cast<int64_t>(param) * 37 + index) % 251 + 1);
}

// Returns the shard pool of a rank, filled from the full tensors element by element.
inline Bytes shard_pool(const Layout& layout) {
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
    EXPECT_EQ(local, place.shard_numel);
  }
  return pool;
}

inline void expect_whole(const Layout& layout, const Bytes& slot) {
  for (size_t i = 0; i < layout.params().size(); ++i) {
    const ParamPlace& place = layout.params()[i];
    for (int64_t index = 0; place.shape.in_slot && index < place.shape.numel(); ++index) {
      ASSERT_EQ(get(slot, place.slot_offset, place.shape.compute, index), value_of(i, index))
          << "parameter " << i << " element " << index << " of rank " << layout.rank();
    }
  }
}

}  // namespace fsdp2x
