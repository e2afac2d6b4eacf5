// Wire formats on the device.
#include "kernels/cuda/bodies/wire.hpp"
#include "kernels/cuda/checks.hpp"
#include "kernels/cuda/device/functions.hpp"
#include "kernels/cuda/device/launch.hpp"

namespace fsdp2x::cuda {

namespace {

__global__ void __launch_bounds__(kThreads) encode_wire_kernel(const __grid_constant__ EncodeWireBody body) {
  __shared__ float peaks[kThreads];
  const auto tile = static_cast<int64_t>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  FSDP2X_NO_UNROLL
  for (int pass = 0; pass < kWirePasses; ++pass) {
    const float error_scale = body.error_scale(tile, pass, thread);
    peaks[thread] = body.peak(tile, pass, thread, error_scale);
    __syncthreads();
    const float peak = wire_peak(peaks, thread);
    __syncthreads();
    body.run(tile, pass, thread, error_scale, peak);
  }
}

}  // namespace

namespace device {

void encode_wire(const WireList& list, const EncodeWireArgs& args, Stream stream) {
  static_assert(kFitsParameters<EncodeWireBody>);
  if (list.num_tiles == 0) return;
  encode_wire_kernel<<<static_cast<unsigned>(list.num_tiles), kThreads, 0, stream>>>({list, args});
  check_launch("encode_wire", list.num_tiles);
}

void decode_wire(const WireList& list, const void* segments, void* values, Stream stream) {
  launch_tiles("decode_wire", DecodeWireBody{list, segments, values}, list.num_tiles, stream);
}

void sum_wire(const WireList& list, const SumWireArgs& args, Stream stream) {
  require_sources(args);
  launch_tiles("sum_wire", SumWireBody{list, args}, list.num_tiles, stream);
}

}  // namespace device

}  // namespace fsdp2x::cuda
