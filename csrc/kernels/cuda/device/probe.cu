// Asks the driver for a kernel that is compiled like all others.
#include "kernels/cuda/probe.hpp"

#include <cuda_runtime.h>

namespace fsdp2x::cuda {

namespace {

__global__ void nothing() {}

std::string said(cudaError_t status) {
  if (status == cudaSuccess) return {};
  cudaGetLastError();  // otherwise torch would report it after its next launch
  int driver = 0;
  cudaDriverGetVersion(&driver);
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  return std::string(cudaGetErrorString(status)) + " (driver: " + (driver == 0 ? "none" : "CUDA " + version(driver)) +
         ", fsdp2x's kernels: CUDA " + version(CUDART_VERSION) + ")";
}

}  // namespace

std::string why_no_kernels_on(int device) {
  int before = 0;
  if (const cudaError_t status = cudaGetDevice(&before); status != cudaSuccess) return said(status);
  cudaFuncAttributes attributes;
  cudaError_t status = cudaSetDevice(device);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, nothing);
  const std::string why = said(status);
  cudaSetDevice(before);
  return why;
}

}  // namespace fsdp2x::cuda
