// The source of every kernel table. Each including file is compiled for another instruction set and defines
// FSDP2X_KERNEL_TABLE, the name of the function that returns its table.
//
// Everything here has internal linkage, and no inline function of the standard library is called. Otherwise the linker
// could choose a shared copy compiled for AVX for code that runs on a processor without it.
#include <cstdint>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "kernels/cpu/kernel_elements.hpp"
#include "kernels/cpu/kernel_moments.hpp"
#include "kernels/cpu/kernel_optimizers.hpp"
#include "kernels/cpu/kernel_table.hpp"
#include "kernels/cpu/kernel_wire.hpp"

namespace fsdp2x::cpu {
namespace {

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

// --- past the caches -------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
typedef __m512 StreamVector;
inline StreamVector load_vector(const float* src) { return _mm512_loadu_ps(src); }
inline void stream_vector(float* dst, StreamVector value) { _mm512_stream_ps(dst, value); }
#elif defined(__AVX2__)
typedef __m256 StreamVector;
inline StreamVector load_vector(const float* src) { return _mm256_loadu_ps(src); }
inline void stream_vector(float* dst, StreamVector value) { _mm256_stream_ps(dst, value); }
#elif defined(__SSE2__)
typedef __m128 StreamVector;
inline StreamVector load_vector(const float* src) { return _mm_loadu_ps(src); }
inline void stream_vector(float* dst, StreamVector value) { _mm_stream_ps(dst, value); }
#endif

#ifdef __SSE2__
inline constexpr int64_t kStreamNumel = sizeof(StreamVector) / sizeof(float);

template <bool kDivide, int kNumSources>
void stream_sum_f32(float* dst, const float* const* sources, int64_t numel, float factor) {
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(dst) % sizeof(StreamVector) / sizeof(float));
  const int64_t head = misaligned == 0 ? 0 : kStreamNumel - misaligned;
  int64_t i = head < numel ? head : numel;
  sum_f32<false, kDivide, kNumSources>(dst, sources, i, factor);
  const StreamVector factors = StreamVector{} + factor;
  for (; i + kStreamNumel <= numel; i += kStreamNumel) {
    StreamVector sum = load_vector(sources[0] + i);
    for (int s = 1; s < kNumSources; ++s) sum += load_vector(sources[s] + i);
    stream_vector(dst + i, kDivide ? sum / factors : sum * factors);
  }
  const float* rest[kMaxFusedSources];
  for (int s = 0; s < kNumSources; ++s) rest[s] = sources[s] + i;
  sum_f32<false, kDivide, kNumSources>(dst + i, rest, numel - i, factor);
  _mm_sfence();  // such stores are not ordered with others
}

void stream_copy(void* target, const void* source, size_t bytes) {
  auto* dst = static_cast<char*>(target);
  const auto* src = static_cast<const char*>(source);
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % sizeof(StreamVector);
  size_t i = misaligned == 0 ? 0 : sizeof(StreamVector) - misaligned;
  if (i > bytes) i = bytes;
  __builtin_memcpy(dst, src, i);
  for (; i + sizeof(StreamVector) <= bytes; i += sizeof(StreamVector)) {
    stream_vector(reinterpret_cast<float*>(dst + i), load_vector(reinterpret_cast<const float*>(src + i)));
  }
  __builtin_memcpy(dst + i, src + i, bytes - i);
  _mm_sfence();
}
#else
template <bool kDivide, int kNumSources>
void stream_sum_f32(float* dst, const float* const* sources, int64_t numel, float factor) {
  sum_f32<false, kDivide, kNumSources>(dst, sources, numel, factor);
}

void stream_copy(void* dst, const void* src, size_t bytes) { __builtin_memcpy(dst, src, bytes); }
#endif

// --- the table -------------------------------------------------------------------------------------------------------

template <bool kAccumulate, bool kDivide>
void fill_sums(KernelTable& table) {
  auto& row = table.sum_f32[kAccumulate][kDivide];
  row[0] = sum_f32<kAccumulate, kDivide, 1>;
  row[1] = sum_f32<kAccumulate, kDivide, 2>;
  row[2] = sum_f32<kAccumulate, kDivide, 3>;
  row[3] = sum_f32<kAccumulate, kDivide, 4>;
}

template <bool kDivide>
void fill_stream_sums(KernelTable& table) {
  auto& row = table.stream_sum_f32[kDivide];
  row[0] = stream_sum_f32<kDivide, 1>;
  row[1] = stream_sum_f32<kDivide, 2>;
  row[2] = stream_sum_f32<kDivide, 3>;
  row[3] = stream_sum_f32<kDivide, 4>;
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
  fill_stream_sums<false>(table);
  fill_stream_sums<true>(table);
  table.stream_copy = stream_copy;
  table.adamw[false] = adamw<false>;
  table.adamw[true] = adamw<true>;
  table.rounding_bits = rounding_bits;
  table.store_stochastic = store_stochastic;
  table.load_moments[false] = load_moments<false>;
  table.load_moments[true] = load_moments<true>;
  table.store_moments[false][false] = store_moments<false, false>;
  table.store_moments[false][true] = store_moments<false, true>;
  table.store_moments[true][false] = store_moments<true, false>;
  table.store_moments[true][true] = store_moments<true, true>;
  table.encode_wire[0] = encode_wire<WireFormat::int8>;
  table.encode_wire[1] = encode_wire<WireFormat::fp8>;
  table.decode_wire[0] = decode_wire<WireFormat::int8>;
  table.decode_wire[1] = decode_wire<WireFormat::fp8>;
  table.add_int8 = add_int8;
  table.encode_int8_with_errors = encode_int8_with_errors;
  return table;
}

}  // namespace

const KernelTable& FSDP2X_KERNEL_TABLE() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace fsdp2x::cpu
