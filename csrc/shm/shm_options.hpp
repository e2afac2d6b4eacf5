// The options of a rank that enters a shared-memory group.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace fsdp2x::cpu {

struct ShmOptions {
  int rank = 0;
  int world = 1;
  // Name of the abstract unix socket, chosen at random by rank 0 and sent to the others (no leading NUL).
  std::string socket_name;
  // 32 random bytes that a peer must present, sent together with the name.
  std::string token;
  double timeout_s = 600.0;
  // Called every 50 ms of a long wait. May throw to end it (Ctrl-C).
  std::function<void()> on_wait;
  // The number of each rank in messages: its rank in the whole job. Empty: `rank`, counted in this group.
  std::vector<int> global_ranks;
  // Collective: exchanges strings and returns those of all ranks in rank order. Through it, ranks learn during setup
  // that one of them failed. It ends, or throws, if a rank is gone. A single rank does not need it.
  std::function<std::vector<std::string>(const std::string&)> exchange;

  // Returns, for example, "rank 3".
  std::string name(int of_rank) const {
    const auto index = static_cast<size_t>(of_rank);
    return "rank " + std::to_string(index < global_ranks.size() ? global_ranks[index] : of_rank);
  }
};

}  // namespace fsdp2x::cpu
