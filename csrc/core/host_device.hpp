// Marks the functions that kernels and their plain references share: always inlined, on the device as well where nvcc
// reads.
#pragma once

// Inlined without exception, also because the CPU loops are compiled once per instruction set: a copy that the linker
// shares between them could hold instructions that this processor lacks.
#ifdef __CUDACC__
#define FSDP2X_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FSDP2X_HOST_DEVICE inline __attribute__((always_inline))
#endif

// Loops over the elements of a vector, whose arrays must stay in registers on the device; and loops that a thread goes
// round a few times, which the device's compiler would write out for more turns than there ever are.
#ifdef __CUDA_ARCH__
#define FSDP2X_UNROLL _Pragma("unroll")
#define FSDP2X_NO_UNROLL _Pragma("unroll 1")
#else
#define FSDP2X_UNROLL
#define FSDP2X_NO_UNROLL
#endif

namespace fsdp2x {

// Builtins on the host, which are no functions of a library: see kernels/cpu/kernel_loops.hpp.
FSDP2X_HOST_DEVICE float square_root(float value) {
#ifdef __CUDA_ARCH__
  return sqrtf(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// a * b + c, rounded once.
FSDP2X_HOST_DEVICE float multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

}  // namespace fsdp2x
