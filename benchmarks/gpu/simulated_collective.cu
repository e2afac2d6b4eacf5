// A kernel in the place of a collective: its blocks move the bytes of one rank's part, and last as long as the links
// would need. bench_world.py launches it on the stream where a process group would enqueue the collective. All ranks
// send what this one sends.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 512;
constexpr int64_t kTile = kThreads * 16;  // bytes that a block moves between two looks at the clock

__device__ uint64_t nanoseconds() {
  uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// A gather writes `source` to each of the `world` segments of `output`. A reduction reads all `world` segments of
// `source` and writes the first one to `output`. A block waits after each tile until its share of the time is over, so
// that memory traffic is as even as that of links.
__global__ void __launch_bounds__(kThreads)
    simulate(const uint4* source, uint4* output, int64_t segment, int world, bool reduces, uint64_t duration) {
  const uint64_t start = nanoseconds();
  const int64_t tiles = (segment + kTile - 1) / kTile;
  const int64_t mine = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const int64_t vectors = segment / 16;
  uint64_t done = 0;
  uint32_t seen = 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t at = tile * kThreads + threadIdx.x;
    for (int rank = 0; rank < world && at < vectors; ++rank) {
      if (reduces) {
        const uint4 value = source[rank * vectors + at];
        seen |= value.x ^ value.y ^ value.z ^ value.w;  // keeps the reads of the other segments
        if (rank == 0) output[at] = value;
      } else if (output + rank * vectors != source) {
        output[rank * vectors + at] = source[at];
      }
    }
    ++done;
    const uint64_t until = start + duration * done / static_cast<uint64_t>(mine);
    while (nanoseconds() < until) __nanosleep(200);
  }
  if (seen == 0xdeadbeef && duration == 0) output[0].x = seen;
  while (nanoseconds() < start + duration) __nanosleep(200);
}

}  // namespace

// Bytes must be multiples of 16, as fsdp2x's and FSDP2's are or are padded to by the caller. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int simulate_collective(const void* source, void* output,
                                                                          int64_t segment_bytes, int world, int reduces,
                                                                          uint64_t duration_ns, int blocks,
                                                                          void* stream) {
  simulate<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(source), static_cast<uint4*>(output), segment_bytes, world, reduces != 0, duration_ns);
  return static_cast<int>(cudaGetLastError());
}
