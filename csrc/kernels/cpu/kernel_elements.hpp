// 16-bit formats for the loops. Part of kernel_loops.hpp, with internal linkage in each table's source.
#pragma once

#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "kernels/rules/float_bits.hpp"

namespace fsdp2x::cpu {
namespace {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// --- one element -----------------------------------------------------------------------------------------------------

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bf16_to_float(x.bits); }
inline float to_float(f16 x) { return f16_to_float(x.bits); }

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) { out.bits = float_to_bf16(x); }
inline void from_float(float x, f16& out) { out.bits = float_to_f16(x); }

inline void widen(double x, double& out) { out = x; }
template <class T>
inline void widen(T x, float& out) {
  out = to_float(x);
}
template <class T>
inline void widen(T x, double& out) {
  out = static_cast<double>(to_float(x));
}

inline void narrow(double x, double& out) { out = x; }
template <class T>
inline void narrow(float x, T& out) {
  from_float(x, out);
}
template <class T>
inline void narrow(double x, T& out) {
  from_float(static_cast<float>(x), out);
}

// --- f16 by hardware: compilers do not vectorize the other code ------------------------------------------------------

#ifdef __F16C__
inline __m256 load8(const f16* src) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src))); }

int64_t load_f16_blocks(float* acc, const f16* src, int64_t numel) {
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(acc + i, load8(src + i));
  return i;
}

int64_t add_f16_blocks(float* acc, const f16* src, int64_t numel) {
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) _mm256_storeu_ps(acc + i, _mm256_add_ps(_mm256_loadu_ps(acc + i), load8(src + i)));
  return i;
}

int64_t store_f16_blocks(f16* dst, const float* acc, int64_t numel) {
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), half);
  }
  return i;
}
#else
int64_t load_f16_blocks(float*, const f16*, int64_t) { return 0; }
int64_t add_f16_blocks(float*, const f16*, int64_t) { return 0; }
int64_t store_f16_blocks(f16*, const float*, int64_t) { return 0; }
#endif

template <class A, class T>
inline constexpr bool kIsF16Block = false;
template <>
inline constexpr bool kIsF16Block<float, f16> = true;

}  // namespace
}  // namespace fsdp2x::cpu
