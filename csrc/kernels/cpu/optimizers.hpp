// AdamW on raw pointers: one pass over parameter, gradient, and moments, by kernels/rules/optimizer_rules.hpp.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"
#include "kernels/cpu/kernel_table.hpp"

namespace fsdp2x::cpu {

// Stochastic rounding of values stored in bf16. Element i of a piece draws its bits as number `first + (offset + i) /
// run * stride + (offset + i) % run`. So rows that are apart in the full parameter draw the same bits as there.
struct Rounding {
  RoundingKey key;
  uint64_t first = 0;
  int64_t run = 1;
  int64_t stride = 1;
  int64_t offset = 0;
};

struct AdamWPiece {
  DType type = DType::f32;  // of the parameter and its gradient: f32, bf16, or f16
  DType moments =
      DType::f32;  // f32, bf16, or byte: codes of kernels/rules/moment_codes.hpp, from the beginning of a block on
  void* param = nullptr;
  const void* grad = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  void* max_exp_avg_sq = nullptr;   // null: no amsgrad
  float* exp_avg_scales = nullptr;  // one per block. Only read if moments are codes, as those below
  float* exp_avg_sq_scales = nullptr;
  float* max_exp_avg_sq_scales = nullptr;
  int64_t numel = 0;
  const Rounding* rounding = nullptr;  // null: to nearest even
};

// Updates the parameter and its moments. Values of 16 or 8 bits are widened, stepped in fp32, and rounded. The
// parameter uses the moments before they are rounded. The largest exp_avg_sq is rounded with the bits of exp_avg_sq, so
// that both are stored equal if it is the new one.
void adamw(const AdamWPiece& piece, const AdamWStep& step);

// Decode 8-bit moments and encode them to the nearest codes, from the beginning of a block on
// (kernels/rules/moment_codes.hpp). `is_signed`: for exp_avg.
void decode_moments(float* values, const uint8_t* codes, const float* scales, int64_t numel, bool is_signed);
void encode_moments(uint8_t* codes, float* scales, const float* values, int64_t numel, bool is_signed);

}  // namespace fsdp2x::cpu
