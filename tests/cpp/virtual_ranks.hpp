// Units sharded over W virtual ranks in one process.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "whole_tensors.hpp"

namespace fsdp2x::cuda {

struct Unit {
  std::vector<Layout> layouts;  // by rank
};

class VirtualRanks : public testing::TestWithParam<int> {
 protected:
  int world() const { return GetParam(); }

  Unit unit(const std::vector<ParamShape>& shapes) const {
    Unit result;
    for (int rank = 0; rank < world(); ++rank) result.layouts.emplace_back(shapes, world(), rank);
    return result;
  }

  // One unit of every type with odd sizes, uneven, short, and empty shards, and Shard(d > 0). Some are larger than a
  // tile. f64 is only moved: plans of gradients leave it out.
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
