// Elements as the kernels read, compute, and write them: in vectors of kVectorNumel if memory allows it, else one by
// one.
#pragma once

#include <math.h>

#include <cstdint>

#include "core/dtype.hpp"
#include "kernels/cuda/kernels.hpp"
#include "kernels/rules/float_bits.hpp"
#include "kernels/rules/philox.hpp"
#ifndef __CUDA_ARCH__
#include <string>

#include "core/error.hpp"
#endif

namespace fsdp2x::cuda {

inline constexpr int kThreads = 256;         // of a block
inline constexpr int kVectorNumel = 8;       // complete 16-byte words of every type, and a block of random bits
inline constexpr int kFloatVectorNumel = 4;  // one word of floats
inline constexpr int kWordBytes = 16;
static_assert(kTileNumel % kVectorNumel == 0 && kVectorNumel == kRoundingBlock);

template <class U, int N>
struct alignas(sizeof(U) * N) Packed {
  U values[N];
};

FSDP2X_HOST_DEVICE bool is_word_aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kWordBytes == 0;
}

FSDP2X_HOST_DEVICE const char* at(const void* base, int64_t bytes) { return static_cast<const char*>(base) + bytes; }
FSDP2X_HOST_DEVICE char* at(void* base, int64_t bytes) { return static_cast<char*>(base) + bytes; }

#ifndef __CUDA_ARCH__
// The device faults if an access is not aligned, and so do the reference kernels.
inline void require_aligned(const void* address, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    throw Error("reference kernel: an access of " + std::to_string(alignment) + " bytes is not aligned");
  }
}
#endif

template <class P>
FSDP2X_HOST_DEVICE P read(const char* address) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const P*>(address);
#else
  require_aligned(address, alignof(P));
  P value;
  __builtin_memcpy(&value, address, sizeof(P));
  return value;
#endif
}

template <class P>
FSDP2X_HOST_DEVICE void write(char* address, const P& value) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<P*>(address) = value;
#else
  require_aligned(address, alignof(P));
  __builtin_memcpy(address, &value, sizeof(P));
#endif
}

// Loads N elements from element `index` on, in 16-byte words if there are enough.
template <class U, int N>
FSDP2X_HOST_DEVICE void load_units(const void* base, int64_t index, U* out) {
  constexpr int kPart = N * sizeof(U) > kWordBytes ? kWordBytes / sizeof(U) : N;
  const char* address = at(base, index * static_cast<int64_t>(sizeof(U)));
  FSDP2X_UNROLL
  for (int part = 0; part < N / kPart; ++part) {
    const auto word = read<Packed<U, kPart>>(address + part * sizeof(Packed<U, kPart>));
    FSDP2X_UNROLL
    for (int k = 0; k < kPart; ++k) out[part * kPart + k] = word.values[k];
  }
}

template <class U, int N>
FSDP2X_HOST_DEVICE void store_units(void* base, int64_t index, const U* in) {
  constexpr int kPart = N * sizeof(U) > kWordBytes ? kWordBytes / sizeof(U) : N;
  char* address = at(base, index * static_cast<int64_t>(sizeof(U)));
  FSDP2X_UNROLL
  for (int part = 0; part < N / kPart; ++part) {
    Packed<U, kPart> word;
    FSDP2X_UNROLL
    for (int k = 0; k < kPart; ++k) word.values[k] = in[part * kPart + k];
    write(address + part * sizeof(word), word);
  }
}

// --- typed elements as floats
// -----------------------------------------------------------------------------------------

// Loads f32 if `kFloats`, otherwise bf16 or f16.
template <bool kFloats, int N>
FSDP2X_HOST_DEVICE void load_known(DType type, const void* base, int64_t index, float* out) {
  if constexpr (kFloats) return load_units<float, N>(base, index, out);
  uint16_t units[N];
  load_units<uint16_t, N>(base, index, units);
  if (type == DType::bf16) {
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) out[k] = bf16_to_float(units[k]);
  } else {
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) out[k] = f16_to_float(units[k]);
  }
}

template <bool kFloats, int N>
FSDP2X_HOST_DEVICE void store_known(DType type, void* base, int64_t index, const float* in) {
  if constexpr (kFloats) return store_units<float, N>(base, index, in);
  uint16_t units[N];
  if (type == DType::bf16) {
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) units[k] = float_to_bf16(in[k]);
  } else {
    FSDP2X_UNROLL
    for (int k = 0; k < N; ++k) units[k] = float_to_f16(in[k]);
  }
  store_units<uint16_t, N>(base, index, units);
}

template <int N>
FSDP2X_HOST_DEVICE void load(DType type, const void* base, int64_t index, float* out) {
  if (type == DType::f32) return load_known<true, N>(type, base, index, out);
  load_known<false, N>(type, base, index, out);
}

template <int N>
FSDP2X_HOST_DEVICE void store(DType type, void* base, int64_t index, const float* in) {
  if (type == DType::f32) return store_known<true, N>(type, base, index, in);
  store_known<false, N>(type, base, index, in);
}

// Returns the value after storing as `type` and loading again.
FSDP2X_HOST_DEVICE float rounded(DType type, float value) {
  if (type == DType::bf16) return bf16_to_float(float_to_bf16(value));
  if (type == DType::f16) return f16_to_float(float_to_f16(value));
  return value;
}

// Divides by a product: the slow path of the device's division is a call, around which registers spill. In f64 the
// product has a relative error below 2^-51. No quotient of two floats comes that close to the middle between two
// floats, so it rounds as the quotient does. (Below 2^-126 it may lie in the middle, and goes to either side.)
FSDP2X_HOST_DEVICE float scaled(float value, Scale scale) {
  if (scale.mode == ScaleMode::multiply) return value * static_cast<float>(scale.value);
  if (scale.mode == ScaleMode::divide) return static_cast<float>(static_cast<double>(value) * scale.reciprocal);
  return value;
}

// --- a tile of elements over the threads of a block ------------------------------------------------------------------

struct TileRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Calls step.run<V>(index) for complete vectors. Calls step.run<1>(index) for single elements: before `first_vector`,
// after the last vector, or all of them if `use_vectors` is false.
template <int V, class Step>
FSDP2X_HOST_DEVICE void walk(TileRange range, int64_t first_vector, bool use_vectors, int thread, Step& step) {
  if (!use_vectors || first_vector > range.end) first_vector = range.end;
  FSDP2X_NO_UNROLL
  for (int64_t i = range.begin + thread; i < first_vector; i += kThreads) step.template run<1>(i);
  const int64_t num_vectors = (range.end - first_vector) / V;
  FSDP2X_NO_UNROLL
  for (int64_t v = thread; v < num_vectors; v += kThreads) step.template run<V>(first_vector + v * V);
  const int64_t last = first_vector + num_vectors * V + thread;
  if (last < range.end) step.template run<1>(last);
}

// Works as `walk` for a target of type `type`. The float step takes one word at a time, so that the threads of a warp
// write complete sectors of memory. With two words per thread, each store would fill half a sector.
template <class FloatStep, class Step>
FSDP2X_HOST_DEVICE void walk_written(DType type, TileRange range, bool use_vectors, int thread, FloatStep& float_step,
                                     Step& step) {
  if (type == DType::f32) return walk<kFloatVectorNumel>(range, range.begin, use_vectors, thread, float_step);
  walk<kVectorNumel>(range, range.begin, use_vectors, thread, step);
}

// Returns the range of tile `tile` of a segment whose elements start at one of its own tiles.
FSDP2X_HOST_DEVICE TileRange range_of(int64_t tile, int64_t first_tile, int64_t numel) {
  const int64_t begin = (tile - first_tile) * kTileNumel;
  const int64_t end = begin + kTileNumel;
  return {begin, end < numel ? end : numel};
}

}  // namespace fsdp2x::cuda
