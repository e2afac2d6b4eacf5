// Sums over the replicas of a 2-D mesh through shared memory, when all of them run on one host.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/slots.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

// Every rank copies its values into a scratch of its own and sums those of all ranks, in rank order: the same bits on
// every replica and in every run. Uses the reduction protocol of docs/engine/shared_memory.md with two units in turn,
// so that a rank may fill one scratch while its peers still read the other.
class HostAllReduce {
 public:
  static constexpr size_t kNumTurns = 2;  // scratches at once

  explicit HostAllReduce(std::shared_ptr<cpu::ShmGroup> group);

  // values = their sum over all ranks, in fp32 (f64 for f64) and rounded once; divided by the number of ranks when
  // `average`. Dense, on the CPU. Collective: the same sizes and dtypes in the same order on every rank.
  void run(const at::Tensor& values, bool average);

  // What the scratches take in all when values of these sizes, in bytes, are summed one after the other.
  static size_t scratch_bytes(const std::vector<size_t>& sizes, size_t page_bytes);

  const std::shared_ptr<cpu::ShmGroup>& shared_group() const { return group_; }

 private:
  struct Turn {
    uint64_t epoch = 0;
    int slot = -1;
  };

  std::shared_ptr<cpu::ShmGroup> group_;
  SlotLedger ledger_;
  std::array<Turn, kNumTurns> turns_;
  uint64_t num_runs_ = 0;
};

}  // namespace fsdp2x
