// Finds changes between two arrays on the device.
#include "kernels/cuda/bodies/changes.hpp"
#include "kernels/cuda/checks.hpp"
#include "kernels/cuda/device/functions.hpp"
#include "kernels/cuda/device/launch.hpp"

namespace fsdp2x::cuda {

namespace {

// The sums of the counts of all threads of a block.
struct BlockCounts {
  int counts[kThreads];
  int groups[kCountGroups];

  // Adds up the `count` of each thread, so that all threads can read the sums.
  __device__ void add_up(int thread, int count) {
    counts[thread] = count;
    __syncthreads();
    if (thread < kCountGroups) groups[thread] = group_count(counts, thread);
    __syncthreads();
  }
};

__global__ void __launch_bounds__(kThreads) mark_changes_kernel(const __grid_constant__ ChangesBody body) {
  __shared__ BlockCounts block;
  const auto thread = static_cast<int>(threadIdx.x);
  const uint32_t mask = body.find(blockIdx.x, thread);
  body.mark(blockIdx.x, thread, mask);
  block.add_up(thread, num_bits(mask));
  if (thread == 0) body.args.tile_counts[blockIdx.x] = num_before(block.counts, block.groups, kThreads);
}

__global__ void __launch_bounds__(kThreads) list_changes_kernel(const __grid_constant__ ChangesBody body) {
  __shared__ BlockCounts block;
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t begin = body.args.begin_of(blockIdx.x);
  if (begin == body.args.tile_ends[blockIdx.x]) return;  // for the complete block
  const uint32_t mask = body.marked(blockIdx.x, thread);
  block.add_up(thread, num_bits(mask));
  body.list(blockIdx.x, thread, mask, begin + num_before(block.counts, block.groups, thread));
}

}  // namespace

namespace device {

void mark_changes(const ChangesArgs& args, Stream stream) {
  require_elements(args);
  if (args.numel == 0) return;
  mark_changes_kernel<<<static_cast<unsigned>(args.num_tiles()), kThreads, 0, stream>>>({args});
  check_launch("mark_changes", args.num_tiles());
}

void list_changes(const ChangesArgs& args, Stream stream) {
  require_elements(args);
  if (args.numel == 0) return;
  list_changes_kernel<<<static_cast<unsigned>(args.num_tiles()), kThreads, 0, stream>>>({args});
  check_launch("list_changes", args.num_tiles());
}

}  // namespace device

}  // namespace fsdp2x::cuda
