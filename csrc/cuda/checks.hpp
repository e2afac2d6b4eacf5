// Checks of a launch's arguments, the same for the device and the twins.
#pragma once

#include <string>

#include "core/error.hpp"
#include "cuda/kernels.hpp"

namespace fsdp2x::cuda {

inline void require_ranks(int num_ranks, const char* kernel) {
  if (num_ranks >= 1 && num_ranks <= kMaxRanks) return;
  throw Error(std::string(kernel) + ": a table of " + std::to_string(num_ranks) + " ranks; expected 1 to " +
              std::to_string(kMaxRanks));
}

inline void require_rank(int rank, int num_ranks, const char* kernel) {
  require_ranks(num_ranks, kernel);
  if (rank >= 0 && rank < num_ranks) return;
  throw Error(std::string(kernel) + ": rank " + std::to_string(rank) + " is not among " + std::to_string(num_ranks) +
              " ranks");
}

inline void require_elements(const ChangesArgs& args) {
  const int bytes = args.element_bytes;
  if (bytes < 1 || bytes > 16 || bytes != 1 << args.element_shift) {
    throw Error("changes: elements of " + std::to_string(bytes) + " bytes; expected 1, 2, 4, 8 or 16");
  }
  if (args.num_tiles() > INT32_MAX) {
    throw Error("changes: " + std::to_string(args.numel) + " elements are more than a launch can have");
  }
}

inline void require_sources(const SumWireArgs& args) {
  if (args.num_ranks < 1)
    throw Error("sum_wire: segments of " + std::to_string(args.num_ranks) + " ranks; expected 1 or more");
}

inline void require_signals(const SignalTable& signals, uint32_t epoch) {
  require_rank(signals.rank, signals.num_ranks, "peer_barrier");
  if (epoch == 0) throw Error("peer_barrier: epochs count from 1, because pads start at zero; got 0");
}

}  // namespace fsdp2x::cuda
