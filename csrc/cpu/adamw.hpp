// Optimizer steps on raw pointers: one pass over parameter, gradient and state. Each has a scalar twin in tests/cpp.
//
// The arithmetic is torch's, operation by operation: what torch rounds once (its lerp, addcmul and add compute a fused
// multiply-add) is rounded once, everything else twice.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/kernel_table.hpp"

namespace fsdp2x::cpu {

struct AdamWPiece {
  DType type = DType::f32;  // of the parameter and its gradient: f32, bf16 or f16
  void* param = nullptr;
  const void* grad = nullptr;
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  float* max_exp_avg_sq = nullptr;  // null: no amsgrad
  int64_t numel = 0;
};

// Updates the parameter and its moments. A 16-bit parameter is widened, stepped in fp32 and rounded to nearest even.
void adamw(const AdamWPiece& piece, const AdamWStep& step);

struct SgdPiece {
  float* param = nullptr;
  const float* grad = nullptr;
  float* buffer = nullptr;  // not read with SgdMomentum::none
  SgdMomentum momentum = SgdMomentum::none;
  int64_t numel = 0;
};

// Updates the parameter and its momentum buffer.
void sgd(const SgdPiece& piece, const SgdStep& step);

}  // namespace fsdp2x::cpu
