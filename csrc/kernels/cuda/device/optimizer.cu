// AdamW on the device.
#include "kernels/cuda/bodies/coded_adamw.hpp"
#include "kernels/cuda/bodies/optimizer.hpp"
#include "kernels/cuda/device/functions.hpp"
#include "kernels/cuda/device/launch.hpp"

namespace fsdp2x::cuda {

namespace {

template <bool kStochastic>
__global__ void __launch_bounds__(kThreads, kBlocks<CodedAdamWBody<kStochastic>>)
    coded_adamw_kernel(const __grid_constant__ CodedAdamWBody<kStochastic> body) {
  __shared__ MomentTriple peaks[kThreads];
  const auto tile = static_cast<int64_t>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  if (!body.steps(tile)) return;
  FSDP2X_NO_UNROLL
  for (int pass = 0; pass < kCodedPasses; ++pass) {
    const MomentTriple scales = body.scales(tile, pass, thread);
    peaks[thread] = body.peaks(tile, pass, thread, scales);
    __syncthreads();
    const MomentTriple block = block_peaks(peaks, thread);
    __syncthreads();
    body.step(tile, pass, thread, scales, block);
  }
}

template <bool kStochastic>
void launch_coded(const AdamWList& list, const AdamWArgs& args, Stream stream) {
  using Body = CodedAdamWBody<kStochastic>;
  static_assert(kFitsParameters<Body>);
  if (list.num_tiles == 0) return;
  coded_adamw_kernel<kStochastic><<<static_cast<unsigned>(list.num_tiles), kThreads, 0, stream>>>(Body{list, args});
  check_launch("adamw", list.num_tiles);
}

}  // namespace

namespace device {

void adamw(const AdamWList& list, const AdamWArgs& args, Stream stream) {
  if (args.coded && args.stochastic) return launch_coded<true>(list, args, stream);
  if (args.coded) return launch_coded<false>(list, args, stream);
  if (args.stochastic) return launch_tiles("adamw", AdamWBody<true>{list, args}, list.num_tiles, stream);
  launch_tiles("adamw", AdamWBody<false>{list, args}, list.num_tiles, stream);
}

}  // namespace device

}  // namespace fsdp2x::cuda
