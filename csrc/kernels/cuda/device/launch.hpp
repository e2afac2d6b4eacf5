// Turns bodies into kernels: one block per tile, and a check after every launch. Only for the .cu files of this folder.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "core/error.hpp"
#include "kernels/cuda/bodies/element.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda {

template <class Body>
constexpr bool kFitsParameters = sizeof(Body) <= 4096;  // more needs a driver of CUDA 12.1 or later

// Blocks that share a multiprocessor. A body that sets this number gets no more registers than it leaves room for.
template <class Body>
constexpr int kBlocks = 1;
template <class Body>
requires requires { Body::kBlocks; }
constexpr int kBlocks<Body> = Body::kBlocks;

// The body stays in parameter space: indexing its tables must not copy them to every thread's stack.
template <class Body>
__global__ void __launch_bounds__(kThreads, kBlocks<Body>) run_tiles(const __grid_constant__ Body body) {
  body.run(blockIdx.x, static_cast<int>(threadIdx.x));
}

inline void check_launch(const char* kernel, int64_t num_blocks) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  throw Error(std::string("launching ") + kernel + " with " + std::to_string(num_blocks) +
              " blocks, or work before it, failed: " + cudaGetErrorString(status));
}

template <class Body>
void launch_tiles(const char* kernel, const Body& body, int64_t num_tiles, Stream stream) {
  static_assert(kFitsParameters<Body>);
  if (num_tiles == 0) return;
  run_tiles<Body><<<static_cast<unsigned>(num_tiles), kThreads, 0, stream>>>(body);
  check_launch(kernel, num_tiles);
}

}  // namespace fsdp2x::cuda
