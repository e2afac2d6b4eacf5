// Checks of a launch's arguments, the same for the device and the reference kernels.
#pragma once

#include <string>

#include "core/error.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda {

inline void require_elements(const ChangesArgs& args) {
  const int bytes = args.element_bytes;
  if (bytes < 1 || bytes > 16 || bytes != 1 << args.element_shift) {
    throw Error("changes: expected elements of 1, 2, 4, 8, or 16 bytes, got " + std::to_string(bytes));
  }
  if (args.num_tiles() > INT32_MAX) {
    throw Error("changes: " + std::to_string(args.numel) + " elements are more than a launch can have");
  }
}

inline void require_sources(const SumWireArgs& args) {
  if (args.num_ranks < 1)
    throw Error("sum_wire: expected segments of 1 or more ranks, got " + std::to_string(args.num_ranks));
}

}  // namespace fsdp2x::cuda
