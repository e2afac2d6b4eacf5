// Queries the runtime about a stream.
#include <cuda_runtime.h>

#include "kernels/cuda/device/functions.hpp"

namespace fsdp2x::cuda::device {

bool is_capturing(Stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the legacy stream was queried during another stream's capture, which continues
  return false;
}

}  // namespace fsdp2x::cuda::device
