// The transport over a torch.distributed process group: any backend, any number of hosts. Collectives are issued
// through Python so that CommDebugMode, patches and custom groups see them; buffers are rank-major, with one fused
// copy-out.
#pragma once

#include <map>
#include <vector>

#include "engine/reduce_plans.hpp"
#include "engine/transport.hpp"

namespace fsdp2x {

// Python callables of one process group, all asynchronous: all_gather(output, input) -> work,
// reduce_scatter(output, input, average: bool) -> work, wait(work).
struct Collectives {
  PyRef all_gather;
  PyRef reduce_scatter;
  PyRef wait;
};

class GroupTransport final : public Transport {
 public:
  GroupTransport(Collectives collectives, at::Device device);

  const char* name() const override { return "process_group"; }
  bool is_frugal() const override { return frugal_; }
  void register_group(Group& group) override;
  void begin_gather(Group& group) override;
  void finish_gather(Group& group) override;
  void release_gather(Group& group) override;
  void pack(Group& group, size_t param, const at::Tensor& gradient) override;
  void begin_reduce(Group& group) override;
  bool needs_empty_reduction(const Group& group) const override;
  bool finish_reduce(Group& group, bool flush) override;
  std::shared_ptr<const Layout> reduce_plan(Group& group) override;
  bool abandon_reduce(Group& group) override;
  void publish_progress(uint64_t) override {}
  TransportStats stats() const override;
  std::vector<Loan> loans() const override;
  void release_idle() override { free_.clear(); }

 private:
  // Staging of one gather or one reduction, kept for the next that fits.
  struct Staging {
    at::Tensor memory;
    PyRef work;
  };
  struct PerGroup {
    const Group* group = nullptr;
    Staging gather;
    Staging reduction;                   // W segments laid end to end
    Staging reduced;                     // this rank's summed segment
    std::vector<Copy> segments_to_slot;  // of all ranks, laid end to end
    ReducePlans plans;
    ReducePlan* plan = nullptr;  // of the open scratch
  };
  void open_slot(Group& group);
  void open_scratch(Group& group);
  void fill_gaps(Group& group);  // zeros and flags
  at::Tensor take(size_t bytes);
  void give_back(at::Tensor& memory);
  void wait(const Group& group, Staging& staging, const char* operation);
  at::Tensor as_type(const at::Tensor& memory, at::ScalarType type, size_t offset, size_t bytes) const;
  PerGroup& per_group(const Group& group);

  Collectives collectives_;
  at::Device device_;
  // On the CPU collectives copy what they are given (gloo does), and stock FSDP2 runs them one at a time. So as not to
  // need more memory than stock, free memory goes back at once, and gathers that are on their way end before a unit's
  // gradients take memory.
  const bool frugal_;
  SlotLedger gather_ledger_;
  std::vector<at::Tensor> slot_memory_;     // by slot, undefined while the slot is free
  std::multimap<size_t, at::Tensor> free_;  // serves slots, gathers and reductions
  uint32_t num_groups_ = 0;
  size_t num_scratches_ = 0;
  size_t num_allocations_ = 0;
  size_t memory_bytes_ = 0;  // of what was taken and not freed
  size_t peak_memory_bytes_ = 0;
  std::map<uint32_t, PerGroup> groups_;
};

}  // namespace fsdp2x
