// CPU kernels on raw pointers. Each has a plain scalar reference in tests/cpp. Arithmetic is fp32 unless a side is f64.
// Rounding to bf16/f16 is to nearest even, and NaN stays NaN. Multiply and add are not contracted (-ffp-contract=off).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.hpp"
#include "core/layout.hpp"

namespace fsdp2x::cpu {

// dst[i] = cast(src[i]). Equal types are a memcpy. `byte` casts only to `byte` (throws Error otherwise).
void cast_copy(DType dst_type, void* dst, DType src_type, const void* src, int64_t numel);

// Copies past the caches, any size, for memory that is not read soon. The ranges must not overlap.
void stream_copy(void* dst, const void* src, size_t bytes);

// dst[i] = cast(dst[i] + src[i]), the sum in fp32 (f64 if either side is f64).
void add(DType dst_type, void* dst, DType src_type, const void* src, int64_t numel);

// dst[i] = cast(dst[i] / divisor).
void divide(DType type, void* dst, int64_t numel, double divisor);

// dst[i] = cast(dst[i] * factor). The factor is first rounded to float unless dst is f64.
void multiply(DType type, void* dst, int64_t numel, double factor);

// Returns the sum of values[i]^2 in f64.
double sum_squares(DType type, const void* values, int64_t numel);

// Runs elements [begin, end) of a copy's count * piece_numel from one base pointer to another.
void run_copy(const Copy& copy, int64_t begin, int64_t end, const void* src_base, void* dst_base);

// Runs a copy plan from one base pointer to another.
void run_copies(std::span<const Copy> copies, const void* src_base, void* dst_base);

struct ReducePiece {
  DType src_type = DType::f32;
  DType dst_type = DType::f32;
  const DType* source_types = nullptr;   // of each source, if they differ from src_type
  const void* const* sources = nullptr;  // one per contributing rank, in rank order
  int num_sources = 0;                   // 0: the sum is zero
  void* dst = nullptr;                   // contiguous, overlaps no source
  int64_t numel = 0;
  double divisor = 1.0;     // true division, so that 2 ranks match sum / 2 bit for bit
  bool round = false;       // round the quotient to src_type first, as a collective in that type would return it
  bool accumulate = false;  // dst += cast(sum / divisor) instead of dst = ...
};

// Sets elements [begin, end) of dst to cast(sum of the sources in rank order / divisor), optionally added to dst.
void reduce(const ReducePiece& piece, int64_t begin, int64_t end);
inline void reduce(const ReducePiece& piece) { reduce(piece, 0, piece.numel); }

}  // namespace fsdp2x::cpu
