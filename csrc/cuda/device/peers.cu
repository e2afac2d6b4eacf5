// The barrier between the devices of a group. A block that waits occupies its multiprocessor: one block of few threads.
#include "cuda/bodies/signals.hpp"
#include "cuda/checks.hpp"
#include "cuda/device/functions.hpp"
#include "cuda/device/launch.hpp"

namespace fsdp2x::cuda {

namespace {

constexpr int kBarrierThreads = 96;  // at least one per rank
static_assert(kBarrierThreads >= kMaxRanks);

__device__ uint64_t now_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void __launch_bounds__(kBarrierThreads)
    peer_barrier_kernel(const __grid_constant__ SignalTable signals, uint32_t epoch, Patience patience) {
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer >= signals.num_ranks || *patience.has_given_up != 0) return;
  __threadfence_system();
  signal(signals.pad[peer] + signals.rank, epoch);
  const uint64_t start = now_ns();
  while (!has_signalled(signals.pad[signals.rank] + peer, epoch)) {
    if (now_ns() - start > patience.timeout_ns) {
      *patience.has_given_up = 1;
      patience.missing[peer] = 1;
      return;
    }
    __nanosleep(100);
  }
}

}  // namespace

namespace device {

void peer_barrier(const SignalTable& signals, uint32_t epoch, const Patience& patience, Stream stream) {
  require_signals(signals, epoch);
  peer_barrier_kernel<<<1, kBarrierThreads, 0, stream>>>(signals, epoch, patience);
  check_launch("peer_barrier", 1);
}

}  // namespace device

}  // namespace fsdp2x::cuda
