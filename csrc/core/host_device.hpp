// Marks functions that kernels and their plain references share: always inlined, and also compiled for the device by
// nvcc.
#pragma once

// Inlining has no exception, also because the CPU loops are compiled once per instruction set. A copy that the linker
// shares between them could hold instructions that this processor lacks.
#ifdef __CUDACC__
#define FSDP2X_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FSDP2X_HOST_DEVICE inline __attribute__((always_inline))
#endif

// FSDP2X_UNROLL is for loops over vector elements, whose arrays must stay in registers on the device. FSDP2X_NO_UNROLL
// is for loops with few turns, which the device's compiler would otherwise unroll too far.
#ifdef __CUDA_ARCH__
#define FSDP2X_UNROLL _Pragma("unroll")
#define FSDP2X_NO_UNROLL _Pragma("unroll 1")
#else
#define FSDP2X_UNROLL
#define FSDP2X_NO_UNROLL
#endif

namespace fsdp2x {

// On the host these are builtins, not library functions: see kernels/cpu/kernel_loops.hpp.
FSDP2X_HOST_DEVICE float square_root(float value) {
#ifdef __CUDA_ARCH__
  return sqrtf(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// Returns a * b + c, rounded once.
FSDP2X_HOST_DEVICE float multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

}  // namespace fsdp2x
