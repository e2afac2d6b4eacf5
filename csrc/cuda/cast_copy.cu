// The cast-and-copy kernel: a block takes one tile of one segment, in vectors of 16 bytes where both sides allow it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <climits>
#include <string>
#include <type_traits>

#include "core/error.hpp"
#include "cuda/cast_copy.hpp"

namespace fsdp2x::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kTileNumel = 4096;  // a multiple of every vector length, so that a tile starts on a vector

constexpr int64_t num_tiles_of(int64_t numel) { return (numel + kTileNumel - 1) / kTileNumel; }

// Elements of a vector: both sides move whole 16-byte words.
template <class Src, class Dst>
constexpr int kVectorNumel = 16 / static_cast<int>(sizeof(Src) < sizeof(Dst) ? sizeof(Src) : sizeof(Dst));

template <class T, int N>
struct alignas(16) Vector {
  T values[N];
};

__device__ float to_float(float value) { return value; }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float to_float(__half value) { return __half2float(value); }

template <class Dst, class Src>
struct Cast {
  static __device__ Dst run(Src value) {
    if constexpr (sizeof(Dst) == sizeof(float)) {
      return to_float(value);
    } else if constexpr (std::is_same_v<Dst, __nv_bfloat16>) {
      return __float2bfloat16_rn(to_float(value));
    } else {
      return __float2half_rn(to_float(value));
    }
  }
};

template <class T>
struct Cast<T, T> {
  static __device__ T run(T value) { return value; }
};

template <class Src, class Dst>
__device__ void run_tile(const CastSegment& segment, const void* src_base, void* dst_base, int64_t begin, int64_t end,
                         bool use_vectors) {
  constexpr int kVector = kVectorNumel<Src, Dst>;
  const auto* src = reinterpret_cast<const Src*>(static_cast<const char*>(src_base) + segment.src_offset);
  auto* dst = reinterpret_cast<Dst*>(static_cast<char*>(dst_base) + segment.dst_offset);
  const bool is_one_piece = segment.piece_numel == segment.numel;
  const auto index = [&](int64_t element, int64_t stride) {
    return is_one_piece ? element : element / segment.piece_numel * stride + element % segment.piece_numel;
  };
  if (use_vectors) {
    const int64_t vectors_end = begin + (end - begin) / kVector * kVector;
    for (int64_t i = begin + static_cast<int64_t>(threadIdx.x) * kVector; i < vectors_end; i += kThreads * kVector) {
      const auto in = *reinterpret_cast<const Vector<Src, kVector>*>(src + index(i, segment.src_stride));
      Vector<Dst, kVector> out;
#pragma unroll
      for (int k = 0; k < kVector; ++k) out.values[k] = Cast<Dst, Src>::run(in.values[k]);
      *reinterpret_cast<Vector<Dst, kVector>*>(dst + index(i, segment.dst_stride)) = out;
    }
    begin = vectors_end;
  }
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    dst[index(i, segment.dst_stride)] = Cast<Dst, Src>::run(src[index(i, segment.src_stride)]);
  }
}

__global__ void __launch_bounds__(kThreads)
    cast_to_slot_kernel(const CastSegment* __restrict__ segments, int num_segments, const void* src_base,
                        void* dst_base, bool bases_are_aligned) {
  const int64_t tile = blockIdx.x;
  int low = 0;  // the last segment whose first tile is not behind this one
  for (int high = num_segments; high - low > 1;) {
    const int middle = (low + high) / 2;
    (segments[middle].first_tile <= tile ? low : high) = middle;
  }
  const CastSegment segment = segments[low];
  const int64_t begin = (tile - segment.first_tile) * kTileNumel;
  const int64_t end = begin + kTileNumel < segment.numel ? begin + kTileNumel : segment.numel;
  const bool use_vectors = bases_are_aligned && segment.aligned;
  switch (segment.mode) {
    case CastMode::copy1:
      return run_tile<uint8_t, uint8_t>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::copy2:
      return run_tile<uint16_t, uint16_t>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::copy4:
      return run_tile<uint32_t, uint32_t>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::copy8:
      return run_tile<uint64_t, uint64_t>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::f32_to_bf16:
      return run_tile<float, __nv_bfloat16>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::f32_to_f16:
      return run_tile<float, __half>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::bf16_to_f32:
      return run_tile<__nv_bfloat16, float>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::bf16_to_f16:
      return run_tile<__nv_bfloat16, __half>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::f16_to_f32:
      return run_tile<__half, float>(segment, src_base, dst_base, begin, end, use_vectors);
    case CastMode::f16_to_bf16:
      return run_tile<__half, __nv_bfloat16>(segment, src_base, dst_base, begin, end, use_vectors);
  }
}

CastMode mode_of(DType src, DType dst) {
  if (src == dst) {
    switch (dtype_bytes(src)) {
      case 1:
        return CastMode::copy1;
      case 2:
        return CastMode::copy2;
      case 4:
        return CastMode::copy4;
      case 8:
        return CastMode::copy8;
    }
  }
  if (src == DType::f32 && dst == DType::bf16) return CastMode::f32_to_bf16;
  if (src == DType::f32 && dst == DType::f16) return CastMode::f32_to_f16;
  if (src == DType::bf16 && dst == DType::f32) return CastMode::bf16_to_f32;
  if (src == DType::bf16 && dst == DType::f16) return CastMode::bf16_to_f16;
  if (src == DType::f16 && dst == DType::f32) return CastMode::f16_to_f32;
  if (src == DType::f16 && dst == DType::bf16) return CastMode::f16_to_bf16;
  throw Error(std::string("the CUDA copy plan cannot cast ") + dtype_name(src) + " to " + dtype_name(dst) +
              ": it casts between f32, bf16 and f16, and copies any dtype unchanged");
}

bool is_aligned(const Copy& copy) {
  const size_t narrow = dtype_bytes(copy.src) < dtype_bytes(copy.dst) ? dtype_bytes(copy.src) : dtype_bytes(copy.dst);
  const auto vector_numel = static_cast<int64_t>(16 / narrow);
  if (copy.src_offset % 16 != 0 || copy.dst_offset % 16 != 0) return false;
  return copy.count == 1 || (copy.piece_numel % vector_numel == 0 && copy.src_stride % vector_numel == 0 &&
                             copy.dst_stride % vector_numel == 0);
}

}  // namespace

CastPlan plan_casts(std::span<const Copy> copies) {
  CastPlan plan;
  plan.segments.reserve(copies.size());
  for (const Copy& copy : copies) {
    const int64_t numel = copy.count * copy.piece_numel;
    if (numel == 0) continue;
    plan.segments.push_back({copy.src_offset, copy.dst_offset, numel, copy.piece_numel, copy.src_stride,
                             copy.dst_stride, plan.num_tiles, mode_of(copy.src, copy.dst), is_aligned(copy)});
    plan.num_tiles += num_tiles_of(numel);
  }
  if (plan.num_tiles > INT_MAX) {
    throw Error("a copy plan has " + std::to_string(plan.num_tiles) + " tiles of " + std::to_string(kTileNumel) +
                " elements, more than one launch can have: shard the model into smaller units");
  }
  return plan;
}

void cast_to_slot(const CastSegment* segments, int num_segments, int64_t num_tiles, const void* src_base,
                  void* dst_base, cudaStream_t stream) {
  if (num_tiles == 0) return;
  const auto bits = reinterpret_cast<uintptr_t>(src_base) | reinterpret_cast<uintptr_t>(dst_base);
  cast_to_slot_kernel<<<static_cast<unsigned>(num_tiles), kThreads, 0, stream>>>(segments, num_segments, src_base,
                                                                                 dst_base, bits % 16 == 0);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    throw Error(std::string("launching cast_to_slot with ") + std::to_string(num_tiles) +
                " blocks failed: " + cudaGetErrorString(status));
  }
}

}  // namespace fsdp2x::cuda
