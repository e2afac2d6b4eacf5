// Sums over the replicas of a 2-D mesh through shared memory, if all of them run on one host.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/slots.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

// Every rank copies its values into a separate scratch and sums those of all ranks, in rank order. This gives the same
// bits on every replica and in every run. Uses the reduction protocol of docs/engine/shared_memory.md alternately with
// two units, so that a rank may fill one scratch while its peers still read the other.
class HostAllReduce {
 public:
  static constexpr size_t kNumTurns = 2;  // scratches at once

  explicit HostAllReduce(std::shared_ptr<cpu::ShmGroup> group);

  // Sets values to their sum over all ranks, in fp32 (f64 for f64) and rounded once. `average`: divides by the number
  // of ranks. Values must be dense and on the CPU. Collective: every rank passes the same sizes and dtypes in the same
  // order.
  void run(const at::Tensor& values, bool average);

  // Returns the total bytes of scratches for summing values of these sizes (in bytes) one after the other.
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
