// What a rank is told when it enters a shared-memory group.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fsdp2x::cpu {

struct ShmOptions {
  int rank = 0;
  int world = 1;
  // Name of the abstract unix socket, chosen at random by rank 0 and told to the others (no leading NUL).
  std::string socket_name;
  // 32 random bytes that a peer must show; told together with the name.
  std::string token;
  double timeout_s = 600.0;
  // Called every 50 ms of a long wait; may throw to end it (Ctrl-C).
  std::function<void()> on_wait;
  // What messages call each rank: its number in the whole job; empty: `rank`, counted in this group.
  std::vector<int> global_ranks;
  // Collective: what every rank says, in rank order. How ranks learn during set-up that one of them failed; it ends, or
  // throws, when a rank is gone. Not needed by a rank alone.
  std::function<std::vector<std::string>(const std::string&)> exchange;

  // "rank 3".
  std::string name(int of_rank) const {
    const auto index = static_cast<size_t>(of_rank);
    return "rank " + std::to_string(index < global_ranks.size() ? global_ranks[index] : of_rank);
  }
};

}  // namespace fsdp2x::cpu
