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

inline void require_signals(const SignalTable& signals, uint32_t epoch) {
  require_ranks(signals.num_ranks, "peer_barrier");
  if (signals.rank < 0 || signals.rank >= signals.num_ranks) {
    throw Error("peer_barrier: rank " + std::to_string(signals.rank) + " is not among " +
                std::to_string(signals.num_ranks) + " ranks");
  }
  if (epoch == 0) throw Error("peer_barrier: epochs count from 1, because pads start at zero; got 0");
}

}  // namespace fsdp2x::cuda
