// What the runtime says of a stream.
#include <cuda_runtime.h>

#include "kernels/cuda/device/functions.hpp"

namespace fsdp2x::cuda::device {

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // asked of the legacy stream beside a capture of others, which goes on
  return false;
}

}  // namespace fsdp2x::cuda::device
