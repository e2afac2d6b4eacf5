// The source of every kernel table; each including file is compiled for another instruction set and defines
// FSDP2X_KERNEL_TABLE, the name of the function that returns its table.
//
// Everything here has internal linkage and no inline function of the standard library is called: a shared copy compiled
// for AVX could otherwise be chosen by the linker for code that runs on a processor without it.
#include <cstdint>
#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/philox.hpp"
#include "cpu/kernel_table.hpp"

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

// --- loops around an accumulator -------------------------------------------------------------------------------------

template <class A, class T>
void load(A* __restrict acc, const void* __restrict source, int64_t numel) {
  const T* src = static_cast<const T*>(source);
  int64_t i = 0;
  if constexpr (kIsF16Block<A, T>) i = load_f16_blocks(acc, src, numel);
  for (; i < numel; ++i) widen(src[i], acc[i]);
}

template <class A, class T>
void add(A* __restrict acc, const void* __restrict source, int64_t numel) {
  const T* src = static_cast<const T*>(source);
  int64_t i = 0;
  if constexpr (kIsF16Block<A, T>) i = add_f16_blocks(acc, src, numel);
  for (; i < numel; ++i) {
    A value;
    widen(src[i], value);
    acc[i] += value;
  }
}

template <class A, class T>
void store(void* __restrict target, const A* __restrict acc, int64_t numel) {
  T* dst = static_cast<T*>(target);
  int64_t i = 0;
  if constexpr (kIsF16Block<A, T>) i = store_f16_blocks(dst, acc, numel);
  for (; i < numel; ++i) narrow(acc[i], dst[i]);
}

template <class A>
void multiply(A* acc, int64_t numel, A factor) {
  for (int64_t i = 0; i < numel; ++i) acc[i] *= factor;
}

template <class A>
void divide(A* acc, int64_t numel, A divisor) {
  for (int64_t i = 0; i < numel; ++i) acc[i] /= divisor;
}

// The lanes are held in vectors of this set's width, which does not change which lane an element adds to.
#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
inline constexpr int kVectorNumel = kVectorBytes / 8;
inline constexpr int kNumVectors = kNumLanes / kVectorNumel;
typedef double Doubles __attribute__((vector_size(kVectorBytes)));

template <class A>
void sum_squares(const A* values, int64_t numel, double* lanes) {
  typedef A Values __attribute__((vector_size(kVectorNumel * sizeof(A))));
  Doubles sums[kNumVectors];
  __builtin_memcpy(sums, lanes, sizeof(sums));
  int64_t i = 0;
  for (; i + kNumLanes <= numel; i += kNumLanes) {
    for (int v = 0; v < kNumVectors; ++v) {
      Values part;
      __builtin_memcpy(&part, values + i + v * kVectorNumel, sizeof(part));
      const Doubles x = __builtin_convertvector(part, Doubles);
      sums[v] += x * x;
    }
  }
  __builtin_memcpy(lanes, sums, sizeof(sums));
  for (int lane = 0; i < numel; ++i, ++lane) {
    const double x = static_cast<double>(values[i]);
    lanes[lane] += x * x;
  }
}

// --- casts without an accumulator in between, and the fused fp32 sum -------------------------------------------------

template <class D, class S>
void cast(void* dst, const void* src, int64_t numel) {
  if constexpr (__is_same(D, float) || __is_same(D, double)) {
    load<D, S>(static_cast<D*>(dst), src, numel);
  } else if constexpr (__is_same(S, float) || __is_same(S, double)) {
    store<S, D>(dst, static_cast<const S*>(src), numel);
  } else {
    float tile[kTileNumel];
    for (int64_t begin = 0; begin < numel; begin += kTileNumel) {
      const int64_t count = numel - begin < kTileNumel ? numel - begin : kTileNumel;
      load<float, S>(tile, static_cast<const S*>(src) + begin, count);
      store<float, D>(static_cast<D*>(dst) + begin, tile, count);
    }
  }
}

template <bool kAccumulate, bool kDivide, int kNumSources>
void sum_f32(float* __restrict dst, const float* const* sources, int64_t numel, float factor) {
  const float* __restrict s0 = sources[0];
  const float* __restrict s1 = sources[kNumSources > 1 ? 1 : 0];
  const float* __restrict s2 = sources[kNumSources > 2 ? 2 : 0];
  const float* __restrict s3 = sources[kNumSources > 3 ? 3 : 0];
  for (int64_t i = 0; i < numel; ++i) {
    float sum = s0[i];
    if constexpr (kNumSources > 1) sum += s1[i];
    if constexpr (kNumSources > 2) sum += s2[i];
    if constexpr (kNumSources > 3) sum += s3[i];
    sum = kDivide ? sum / factor : sum * factor;
    dst[i] = kAccumulate ? dst[i] + sum : sum;
  }
}

// --- optimizer steps -------------------------------------------------------------------------------------------------

// A multiply-add that torch rounds once is rounded once here as well, on every set.

template <bool kAmsgrad>
void adamw(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
           float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq, int64_t numel, const AdamWStep& step) {
  const AdamWStep s = step;
  // torch interpolates from the nearer end.
  const bool from_average = s.weight < 0.5f;
  const float coefficient = from_average ? s.weight : s.weight - 1.0f;
  for (int64_t i = 0; i < numel; ++i) {
    const float g = grad[i] * s.sign;
    const float old = exp_avg[i];
    const float m = __builtin_fmaf(coefficient, g - old, from_average ? old : g);
    const float v = __builtin_fmaf(s.rest2 * g, g, exp_avg_sq[i] * s.beta2);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    float second = v;
    if constexpr (kAmsgrad) {
      const float before = max_exp_avg_sq[i];
      second = before >= v || before != before ? before : v;
      max_exp_avg_sq[i] = second;
    }
    const float denominator = __builtin_sqrtf(second) / s.root + s.eps;
    param[i] = param[i] * s.decay + s.minus_size * m / denominator;
  }
}

template <bool kDecay, SgdMomentum kMomentum>
void sgd(float* __restrict param, const float* __restrict grad, float* __restrict buffer, int64_t numel,
         const SgdStep& step) {
  const SgdStep s = step;
  for (int64_t i = 0; i < numel; ++i) {
    float d = grad[i] * s.sign;
    if constexpr (kDecay) d = __builtin_fmaf(s.weight_decay, param[i], d);
    if constexpr (kMomentum != SgdMomentum::none) {
      float b = d;
      if constexpr (kMomentum == SgdMomentum::later || kMomentum == SgdMomentum::later_nesterov) {
        b = __builtin_fmaf(s.rest, d, buffer[i] * s.momentum);
      }
      buffer[i] = b;
      constexpr bool kNesterov = kMomentum == SgdMomentum::first_nesterov || kMomentum == SgdMomentum::later_nesterov;
      d = kNesterov ? __builtin_fmaf(s.momentum, b, d) : b;
    }
    param[i] = __builtin_fmaf(s.minus_lr, d, param[i]);
  }
}

// --- stochastic rounding ---------------------------------------------------------------------------------------------

#ifdef __AVX2__
// The low and high halves of the eight products of a factor.
struct Products {
  __m256i low, high;
};
inline Products multiply8(__m256i x, __m256i factor) {
  const __m256i even = _mm256_mul_epu32(x, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa),
          _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)};
}

// Eight blocks at once, as philox() computes one: compilers widen its products one by one.
int64_t rounding_bits_blocks(uint16_t* bits, RoundingKey key, Draw draw, uint64_t first_block, int64_t num_blocks) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i left_factor = _mm256_set1_epi32(static_cast<int>(kPhiloxLeft));
  const __m256i right_factor = _mm256_set1_epi32(static_cast<int>(kPhiloxRight));
  int64_t b = 0;
  for (; b + 8 <= num_blocks; b += 8) {
    const PhiloxBlock counter = rounding_counter(key, draw, first_block + static_cast<uint64_t>(b));
    if (counter.words[0] > 0xfffffff8u) break;  // the eight numbers differ in their upper halves
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(counter.words[0])), lanes);
    __m256i c1 = _mm256_set1_epi32(static_cast<int>(counter.words[1]));
    __m256i c2 = _mm256_set1_epi32(static_cast<int>(counter.words[2]));
    __m256i c3 = _mm256_set1_epi32(static_cast<int>(counter.words[3]));
    auto key0 = static_cast<uint32_t>(key.seed);
    auto key1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const Products left = multiply8(c0, left_factor);
      const Products right = multiply8(c2, right_factor);
      c0 = _mm256_xor_si256(_mm256_xor_si256(right.high, c1), _mm256_set1_epi32(static_cast<int>(key0)));
      c2 = _mm256_xor_si256(_mm256_xor_si256(left.high, c3), _mm256_set1_epi32(static_cast<int>(key1)));
      c1 = right.low;
      c3 = left.low;
      key0 += kPhiloxKey0;
      key1 += kPhiloxKey1;
    }
    // Word by word to block by block.
    const __m256i low01 = _mm256_unpacklo_epi32(c0, c1), high01 = _mm256_unpackhi_epi32(c0, c1);
    const __m256i low23 = _mm256_unpacklo_epi32(c2, c3), high23 = _mm256_unpackhi_epi32(c2, c3);
    const __m256i b04 = _mm256_unpacklo_epi64(low01, low23), b15 = _mm256_unpackhi_epi64(low01, low23);
    const __m256i b26 = _mm256_unpacklo_epi64(high01, high23), b37 = _mm256_unpackhi_epi64(high01, high23);
    auto* out = reinterpret_cast<__m256i*>(bits + b * kRoundingBlock);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(b04, b15, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(b26, b37, 0x20));
    _mm256_storeu_si256(out + 2, _mm256_permute2x128_si256(b04, b15, 0x31));
    _mm256_storeu_si256(out + 3, _mm256_permute2x128_si256(b26, b37, 0x31));
  }
  return b;
}
#else
int64_t rounding_bits_blocks(uint16_t*, RoundingKey, Draw, uint64_t, int64_t) { return 0; }
#endif

void rounding_bits(uint16_t* bits, RoundingKey key, Draw draw, uint64_t first_block, int64_t num_blocks) {
  for (int64_t b = rounding_bits_blocks(bits, key, draw, first_block, num_blocks); b < num_blocks; ++b) {
    const PhiloxBlock block = rounding_block(key, draw, (first_block + static_cast<uint64_t>(b)) * kRoundingBlock);
    // Little-endian: the words are the elements' halves in their order.
    __builtin_memcpy(bits + b * kRoundingBlock, block.words, sizeof(block.words));
  }
}

void store_stochastic(void* __restrict target, const float* __restrict acc, const uint16_t* __restrict bits,
                      int64_t numel) {
  auto* dst = static_cast<uint16_t*>(target);
  for (int64_t i = 0; i < numel; ++i) dst[i] = stochastic_bf16(__builtin_bit_cast(uint32_t, acc[i]), bits[i]);
}

// --- the table -------------------------------------------------------------------------------------------------------

template <bool kAccumulate, bool kDivide>
void fill_sums(KernelTable& table) {
  auto& row = table.sum_f32[kAccumulate][kDivide];
  row[0] = sum_f32<kAccumulate, kDivide, 1>;
  row[1] = sum_f32<kAccumulate, kDivide, 2>;
  row[2] = sum_f32<kAccumulate, kDivide, 3>;
  row[3] = sum_f32<kAccumulate, kDivide, 4>;
}

template <class A, class T>
void fill_type(Arithmetic<A>& table, DType type) {
  const int index = static_cast<int>(type);
  table.load[index] = load<A, T>;
  table.add[index] = add<A, T>;
  table.store[index] = store<A, T>;
}

template <class A>
void fill_arithmetic(Arithmetic<A>& table) {
  fill_type<A, float>(table, DType::f32);
  fill_type<A, bf16>(table, DType::bf16);
  fill_type<A, f16>(table, DType::f16);
  table.multiply = multiply<A>;
  table.divide = divide<A>;
  table.sum_squares = sum_squares<A>;
}

template <class D>
void fill_casts(KernelTable& table, DType dst) {
  auto& row = table.cast[static_cast<int>(dst)];
  if constexpr (!__is_same(D, float)) row[static_cast<int>(DType::f32)] = cast<D, float>;
  if constexpr (!__is_same(D, double)) row[static_cast<int>(DType::f64)] = cast<D, double>;
  if constexpr (!__is_same(D, bf16)) row[static_cast<int>(DType::bf16)] = cast<D, bf16>;
  if constexpr (!__is_same(D, f16)) row[static_cast<int>(DType::f16)] = cast<D, f16>;
}

template <bool kDecay>
void fill_sgd(KernelTable& table) {
  auto& row = table.sgd[kDecay];
  row[static_cast<int>(SgdMomentum::none)] = sgd<kDecay, SgdMomentum::none>;
  row[static_cast<int>(SgdMomentum::first)] = sgd<kDecay, SgdMomentum::first>;
  row[static_cast<int>(SgdMomentum::first_nesterov)] = sgd<kDecay, SgdMomentum::first_nesterov>;
  row[static_cast<int>(SgdMomentum::later)] = sgd<kDecay, SgdMomentum::later>;
  row[static_cast<int>(SgdMomentum::later_nesterov)] = sgd<kDecay, SgdMomentum::later_nesterov>;
}

KernelTable make_table() {
  KernelTable table = {};
  fill_casts<float>(table, DType::f32);
  fill_casts<double>(table, DType::f64);
  fill_casts<bf16>(table, DType::bf16);
  fill_casts<f16>(table, DType::f16);
  fill_arithmetic(table.f32);
  fill_arithmetic(table.f64);
  fill_type<double, double>(table.f64, DType::f64);
  fill_sums<false, false>(table);
  fill_sums<false, true>(table);
  fill_sums<true, false>(table);
  fill_sums<true, true>(table);
  table.adamw[false] = adamw<false>;
  table.adamw[true] = adamw<true>;
  table.rounding_bits = rounding_bits;
  table.store_stochastic = store_stochastic;
  fill_sgd<false>(table);
  fill_sgd<true>(table);
  return table;
}

}  // namespace

const KernelTable& FSDP2X_KERNEL_TABLE() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace fsdp2x::cpu
