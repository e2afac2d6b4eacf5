// 16-bit formats for the loops. Part of kernel_loops.hpp, with internal linkage in each table's source.
#pragma once

#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

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
inline float to_float(bf16 x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31u;
  const uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 31) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return __builtin_bit_cast(float, sign | 0x7f800000u | (mantissa << 13) | quiet);
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, magnitude));
  }
  return __builtin_bit_cast(float, sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  out.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}
inline void from_float(float x, f16& out) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // from half-way between 65504 and 65536 on
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: at least 2^-14
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  } else if (magnitude >= 0x33000000u) {  // subnormal: count in units of 2^-24
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t rest = significand & ((1u << shift) - 1u);
    const uint32_t tie = 1u << (shift - 1u);
    half = significand >> shift;
    half += (rest > tie || (rest == tie && (half & 1u) != 0)) ? 1u : 0u;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

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

// --- f16 by hardware: compilers do not vectorise the code above for it -----------------------------------------------

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
