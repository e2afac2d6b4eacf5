// The CPU transport whose ranks can read each other's memory: all ranks of the group on one host, or a single rank.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "cpu/shm_group.hpp"
#include "engine/transport.hpp"

namespace fsdp2x {

class HostTransport final : public Transport {
 public:
  // `group` is null for a world of one rank: slots and scratches are then private memory.
  explicit HostTransport(std::unique_ptr<cpu::ShmGroup> group);
  ~HostTransport() override;

  const char* name() const override { return group_ ? "shm" : "local"; }
  void register_unit(const Unit& unit) override;
  void begin_gather(Unit& unit) override;
  void finish_gather(Unit& unit) override;
  void release_gather(Unit& unit) override;
  void discard_writes(std::byte* data, size_t bytes) override;
  void pack(Unit& unit, size_t param, const at::Tensor& gradient) override;
  void begin_reduce(Unit& unit) override;
  bool needs_empty_reduction(const Unit& unit) const override;
  bool finish_reduce(Unit& unit, bool flush) override;
  void abandon_reduce(Unit& unit) override;
  void publish_progress(uint64_t position) override;
  TransportStats stats() const override;

 private:
  struct Closing {  // a scratch some peer may still read
    uint32_t unit;
    uint64_t epoch;
    int slot;
  };
  void open_scratch(Unit& unit);
  void close_scratch(Unit& unit);
  void sweep_closing();
  void sum(Unit& unit);
  std::byte* private_memory(std::vector<at::Tensor>& memory, const Slot& slot);

  std::unique_ptr<cpu::ShmGroup> group_;
  SlotLedger gather_ledger_;
  SlotLedger scratch_ledger_;
  std::vector<at::Tensor> gather_memory_;   // per slot id; only without a group
  std::vector<at::Tensor> scratch_memory_;  // per slot id; only without a group
  std::deque<Closing> closing_;
  size_t num_allocations_ = 0;  // private memory; a group counts its windows
  uint64_t gather_sequence_ = 0;
  std::vector<uint64_t> epochs_;  // reductions posted, per unit
};

}  // namespace fsdp2x
