// Reductions, norms, and clipping on the device.
#include "kernels/cuda/bodies/reduce.hpp"
#include "kernels/cuda/checks.hpp"
#include "kernels/cuda/device/functions.hpp"
#include "kernels/cuda/device/launch.hpp"

namespace fsdp2x::cuda {

namespace {

// Leaves the block's sum in values[0], for thread 0.
__device__ void fold_block(double* values, int num_threads) {
  const auto thread = static_cast<int>(threadIdx.x);
  for (int half = num_threads / 2; half > 0; half /= 2) {
    __syncthreads();
    fold_half(values, half, thread);
  }
}

__global__ void __launch_bounds__(kThreads) sum_squares_kernel(const __grid_constant__ SquareBody body) {
  __shared__ double squares[kThreads];
  squares[threadIdx.x] = body.run(blockIdx.x, static_cast<int>(threadIdx.x));
  fold_block(squares, kThreads);
  if (threadIdx.x == 0) body.tile_sums[blockIdx.x] = squares[0];
}

__global__ void __launch_bounds__(kSumThreads) add_up_kernel(const double* values, int64_t num, double* sums) {
  __shared__ double parts[kSumThreads];
  parts[threadIdx.x] = strided_sum(values, num, blockIdx.x, static_cast<int>(threadIdx.x));
  fold_block(parts, kSumThreads);
  if (threadIdx.x == 0) sums[blockIdx.x] = parts[0];
}

__global__ void clip_factor_kernel(const double* square_sum, double max_norm, bool in_f64, double* norm,
                                   double* factor) {
  set_clip_factor(*square_sum, max_norm, in_f64, norm, factor);
}

}  // namespace

namespace device {

void reduce(const ReduceList& list, const void* source, const TargetTable& targets, const ReduceArgs& args,
            Stream stream) {
  launch_tiles("reduce", ReduceBody{list, source, targets, args}, list.num_tiles, stream);
}

void sum_squares(const ReduceList& list, const TargetTable& targets, double* tile_sums, Stream stream) {
  static_assert(kFitsParameters<SquareBody>);
  if (list.num_tiles == 0) return;
  sum_squares_kernel<<<static_cast<unsigned>(list.num_tiles), kThreads, 0, stream>>>({list, targets, tile_sums});
  check_launch("sum_squares", list.num_tiles);
}

void add_up(const double* values, int64_t num, double* sums, Stream stream) {
  const int64_t num_blocks = num_sums(num);
  add_up_kernel<<<static_cast<unsigned>(num_blocks), kSumThreads, 0, stream>>>(values, num, sums);
  check_launch("add_up", num_blocks);
}

void clip_factor(const double* square_sum, double max_norm, bool in_f64, double* norm, double* factor, Stream stream) {
  clip_factor_kernel<<<1, 1, 0, stream>>>(square_sum, max_norm, in_f64, norm, factor);
  check_launch("clip_factor", 1);
}

void scale_gradients(const ReduceList& list, const TargetTable& targets, const double* factor, Stream stream) {
  launch_tiles("scale_gradients", ScaleBody{list, targets, factor}, list.num_tiles, stream);
}

}  // namespace device

}  // namespace fsdp2x::cuda
