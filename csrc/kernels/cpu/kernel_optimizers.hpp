// Loops of AdamW and of stochastic rounding. Part of kernel_loops.hpp, with internal linkage in each table's
// source.
#pragma once

#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "kernels/cpu/kernel_table.hpp"
#include "kernels/rules/philox.hpp"

namespace fsdp2x::cpu {
namespace {

// --- optimizer steps -------------------------------------------------------------------------------------------------

template <bool kAmsgrad>
void adamw(float* __restrict param, const float* __restrict grad, float* __restrict exp_avg,
           float* __restrict exp_avg_sq, float* __restrict max_exp_avg_sq, int64_t numel, const AdamWStep& step) {
  const AdamWStep s = step;
  for (int64_t i = 0; i < numel; ++i) {
    float m = exp_avg[i], v = exp_avg_sq[i];
    s.update_moments(grad[i] * s.sign, m, v);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    if constexpr (kAmsgrad) max_exp_avg_sq[i] = v = largest_square(max_exp_avg_sq[i], v);
    param[i] = s.stepped(param[i], m, v);
  }
}

// --- stochastic rounding ---------------------------------------------------------------------------------------------

#ifdef __AVX2__
// The low and high halves of a factor's eight products.
struct Products {
  __m256i low, high;
};
inline Products multiply8(__m256i x, __m256i factor) {
  const __m256i even = _mm256_mul_epu32(x, factor);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa),
          _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa)};
}

// Computes eight blocks at once with the same result as philox(), because compilers widen its products one by one.
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
    // Transposes from word by word to block by block.
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
    // On a little-endian machine the words are the elements' halves in their order.
    __builtin_memcpy(bits + b * kRoundingBlock, block.words, sizeof(block.words));
  }
}

void store_stochastic(void* __restrict target, const float* __restrict acc, const uint16_t* __restrict bits,
                      int64_t numel) {
  auto* dst = static_cast<uint16_t*>(target);
  for (int64_t i = 0; i < numel; ++i) dst[i] = stochastic_bf16(__builtin_bit_cast(uint32_t, acc[i]), bits[i]);
}

}  // namespace
}  // namespace fsdp2x::cpu
