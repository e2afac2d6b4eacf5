// The innermost loops as function pointers: one table per instruction set, chosen once at run time. The same source
// (kernel_loops.hpp) is compiled for each set, so that every table gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"
#include "kernels/rules/optimizer_rules.hpp"
#include "kernels/rules/philox.hpp"

namespace fsdp2x::cpu {

enum class Isa { base, avx2, avx512 };

inline constexpr int kNumCastTypes = 4;        // f32, f64, bf16, f16: the index is the DType
inline constexpr int kMaxFusedSources = 4;     // fp32 sources summed in registers in one loop
inline constexpr int64_t kTileNumel = 1024;    // elements that stay in the first-level cache between two loops
inline constexpr size_t kTileAlignBytes = 64;  // of such tiles and of the lanes: a cache line, and AVX-512's vector
inline constexpr int kNumLanes = 16;           // element i of a range adds its square to lane i % 16 on every set

// Copied or summed ranges of at least this size are written past the caches. The limit for copies is higher because all
// ranks read gathered rows immediately. That is worth more than the lines that a copy of a few MiB has to fetch. Sums
// are read after backward has ended.
inline constexpr size_t kStreamCopyBytes = size_t{8} << 20;
inline constexpr size_t kStreamSumBytes = size_t{1} << 20;

// Loops around an accumulator type A (float or double). Entries for a type that A must not hold are null.
template <class A>
struct Arithmetic {
  void (*load[kNumCastTypes])(A* acc, const void* src, int64_t numel);   // acc = src
  void (*add[kNumCastTypes])(A* acc, const void* src, int64_t numel);    // acc += src
  void (*store[kNumCastTypes])(void* dst, const A* acc, int64_t numel);  // dst = round(acc)
  void (*multiply)(A* acc, int64_t numel, A factor);
  void (*divide)(A* acc, int64_t numel, A divisor);
  void (*sum_squares)(const A* values, int64_t numel, double* lanes);
};

struct KernelTable {
  // cast[dst][src], null on the diagonal.
  void (*cast[kNumCastTypes][kNumCastTypes])(void* dst, const void* src, int64_t numel);
  Arithmetic<float> f32;
  Arithmetic<double> f64;
  // dst (+)= (s0 + s1 + ..) * factor, or / factor: [accumulate][divide][num_sources - 1].
  void (*sum_f32[2][2][kMaxFusedSources])(float* dst, const float* const* sources, int64_t numel, float factor);
  // The same without accumulating, and a copy, past the caches: dst is not read before it is written. Use them for more
  // data than the caches should hold. A thread that sees a later store also sees the written data.
  void (*stream_sum_f32[2][kMaxFusedSources])(float* dst, const float* const* sources, int64_t numel, float factor);
  void (*stream_copy)(void* dst, const void* src, size_t bytes);
  // [amsgrad]; max_exp_avg_sq is not read without it.
  void (*adamw[2])(float* param, const float* grad, float* exp_avg, float* exp_avg_sq, float* max_exp_avg_sq,
                   int64_t numel, const AdamWStep& step);
  // The rounding bits (see kernels/rules/philox.hpp) of the elements of `num_blocks` blocks, 16 for each element, in
  // order.
  void (*rounding_bits)(uint16_t* bits, RoundingKey key, Draw draw, uint64_t first_block, int64_t num_blocks);
  // dst (bf16) = acc, rounded up or down by the bits.
  void (*store_stochastic)(void* dst, const float* acc, const uint16_t* bits, int64_t numel);
  // 8-bit moments from the beginning of a block on (kernels/rules/moment_codes.hpp): [has a sign], and [stochastic].
  // `bits` are only read if stochastic.
  void (*load_moments[2])(float* values, const uint8_t* codes, const float* scales, int64_t numel);
  void (*store_moments[2][2])(uint8_t* codes, float* scales, const float* values, const uint16_t* bits, int64_t numel);
  // Wire formats, [fp8 rather than int8]: see kernels/cpu/wire.hpp. `first` must be in the first block.
  void (*encode_wire[2])(uint8_t* codes, float* scales, const float* values, int64_t numel);
  void (*decode_wire[2])(float* values, const uint8_t* codes, const float* scales, int64_t first, int64_t numel);
  void (*add_int8)(float* sums, const uint8_t* codes, const float* scales, int64_t numel);
  void (*encode_int8_with_errors)(uint8_t* codes, float* scales, uint8_t* errors, float* error_scales,
                                  const float* values, int64_t numel);
};

const KernelTable& kernel_table_base();
#ifdef FSDP2X_X86_KERNELS
const KernelTable& kernel_table_avx2();
const KernelTable& kernel_table_avx512();
#endif

// Returns the table in use: the best one that this processor runs.
const KernelTable& kernel_table();
// Makes every kernel use `isa` from now on, for tests. Returns false without a change if this processor lacks it.
bool select_kernels(Isa isa);

}  // namespace fsdp2x::cpu
