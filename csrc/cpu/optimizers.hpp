// Optimizer steps on raw pointers: one pass over parameter, gradient and state. Each has a scalar twin in tests/cpp.
//
// The arithmetic is torch's, operation by operation: what torch rounds once (its lerp, addcmul and add compute a fused
// multiply-add) is rounded once, everything else twice.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/kernel_table.hpp"

namespace fsdp2x::cpu {

// Stochastic rounding of what is stored in bf16. Element i of a piece draws its bits as number
// `first + (offset + i) / run * stride + (offset + i) % run`, so that rows that lie apart in the whole parameter draw
// what they would there.
struct Rounding {
  RoundingKey key;
  uint64_t first = 0;
  int64_t run = 1;
  int64_t stride = 1;
  int64_t offset = 0;
};

struct AdamWPiece {
  DType type = DType::f32;     // of the parameter and its gradient: f32, bf16 or f16
  DType moments = DType::f32;  // f32, bf16, or byte: codes of core/moment_codes.hpp, from the beginning of a block on
  void* param = nullptr;
  const void* grad = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;   // null: no amsgrad
  float* exp_avg_scales = nullptr;  // one a block; not read but for codes, as those below
  float* exp_avg_sq_scales = nullptr;
  float* max_exp_avg_sq_scales = nullptr;
  int64_t numel = 0;
  const Rounding* rounding = nullptr;  // null: to nearest even
};

// Updates the parameter and its moments. What has 16 or 8 bits is widened, stepped in fp32 and rounded; the parameter
// moves by the moments before they are rounded. The largest exp_avg_sq is rounded with the bits of exp_avg_sq: where it
// is the new one, both are stored equal.
void adamw(const AdamWPiece& piece, const AdamWStep& step);

// Moments in 8 bits from the beginning of a block on (core/moment_codes.hpp), out of codes and into the nearest ones.
// `is_signed`: of exp_avg.
void decode_moments(float* values, const uint8_t* codes, const float* scales, int64_t numel, bool is_signed);
void encode_moments(uint8_t* codes, float* scales, const float* values, int64_t numel, bool is_signed);

struct SgdPiece {
  float* param = nullptr;
  const float* grad = nullptr;
  float* buffer = nullptr;  // not read with SgdMomentum::none
  SgdMomentum momentum = SgdMomentum::none;
  int64_t numel = 0;
};

// Updates the parameter and its momentum buffer.
void sgd(const SgdPiece& piece, const SgdStep& step);

// Updates the parameter and its average of gradients (Chen et al., 2023, arXiv 2302.06675, algorithm 2).
void lion(float* param, const float* grad, float* average, int64_t numel, const LionStep& step);

}  // namespace fsdp2x::cpu
