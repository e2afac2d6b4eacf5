// Words that ranks signal each other with, across devices or threads.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace fsdp2x::cuda {

FSDP2X_HOST_DEVICE void signal(uint32_t* word, uint32_t epoch) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(epoch) : "memory");
#else
  __atomic_store_n(word, epoch, __ATOMIC_RELEASE);
#endif
}

// Has the word's owner come to `epoch`? It may be ahead, and the count may wrap around.
FSDP2X_HOST_DEVICE bool has_signalled(const uint32_t* word, uint32_t epoch) {
  uint32_t seen;
#ifdef __CUDA_ARCH__
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
#else
  seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
  return static_cast<int32_t>(seen - epoch) >= 0;
}

}  // namespace fsdp2x::cuda
