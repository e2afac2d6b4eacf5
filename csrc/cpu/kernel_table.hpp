// The innermost loops as function pointers, one table per instruction set, chosen once at run time. The same source
// (kernel_loops.hpp) is compiled for each set, so that every table gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.hpp"

namespace fsdp2x::cpu {

enum class Isa { base, avx2, avx512 };

inline constexpr int kNumCastTypes = 4;      // f32, f64, bf16, f16: the index is the DType
inline constexpr int kMaxFusedSources = 4;   // fp32 sources summed in registers in one loop
inline constexpr int64_t kTileNumel = 1024;  // elements that wait in the first-level cache between two loops
inline constexpr int kNumLanes = 16;         // element i of a range adds its square to lane i % 16 on every set

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
};

const KernelTable& kernel_table_base();
#ifdef FSDP2X_X86_KERNELS
const KernelTable& kernel_table_avx2();
const KernelTable& kernel_table_avx512();
#endif

// The table in use: the best one this processor runs.
const KernelTable& kernel_table();
// Makes every kernel use `isa` from now on, for tests; false (and no change) when this processor lacks it.
bool select_kernels(Isa isa);

}  // namespace fsdp2x::cpu
