// The transport over a torch.distributed process group for parameters on the CPU, on any number of hosts. Collectives
// are issued through Python so that CommDebugMode, patches, and custom groups see them. Buffers are rank-major, with
// one fused copy-out. Over gloo, unless a dispatch mode or a patch watches, large parameters are gathered straight into
// the slot. Gradients are exchanged and summed here, which sends half the bytes of gloo's own reduce-scatter.
//
// gloo copies the arguments of a collective, and FSDP2 runs one collective at a time. To need no more memory than
// FSDP2, this transport is synchronous, and ends running gathers into temporaries before a unit's gradients take
// memory. It keeps freed memory only within a pass, for the next unit, because the system clears new pages. A larger
// request frees kept memory first, so the peak stays the same.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "core/buffers.hpp"
#include "engine/transport/cpu_transport.hpp"
#include "engine/transport/gather_program.hpp"
#include "engine/transport/process_group/kept_memory.hpp"
#include "engine/transport/wire_gradients.hpp"

namespace fsdp2x {

// Python callables of one process group. The last two are synchronous.
struct Collectives {
  PyRef all_gather;       // (output, input) -> work
  PyRef gather_in_place;  // (list of outputs, list of inputs) -> work; this rank's part of an output is not written
  PyRef reduce_scatter;   // (output, input, average: bool) -> work
  PyRef all_to_all;       // (output, input) -> work; may leave this rank's part of the output unwritten
  PyRef wait;             // (work)
  PyRef may_replace;      // () -> bool: whether gather_in_place and all_to_all may replace the others now, null: never
  // Of this size and more, segments travel as messages (if may_replace), and memory is kept for the next unit.
  size_t message_bytes = 0;
  size_t pack_below_bytes = kPackEverything;  // parameters of this size and more are gathered in place
};

class ProcessGroupTransport final : public CpuTransport {
 public:
  explicit ProcessGroupTransport(Collectives collectives);

  const char* name() const override { return "process_group"; }
  bool is_synchronous() const override { return true; }
  bool may_overlap(const ParamGroup& group) override;
  void register_group(const std::shared_ptr<ParamGroup>& group) override;
  void begin_forward(const PyRef& after) override;
  void end_forward() override;
  void begin_gather(ParamGroup& group, bool pools_stand_still) override;
  void finish_gather(ParamGroup& group) override;
  void release_gather(ParamGroup& group) override;
  void end_prefetch() override;
  void make_room(ParamGroup& group) override;
  bool abandon_reduce(ParamGroup& group) override;
  void end_backward() override { kept_.clear(); }
  void release_idle() override;
  TransportStats stats() const override;
  std::vector<Loan> loans() const override;

 private:
  // How the bytes of a gather or a reduction travel.
  enum class Route : uint8_t {
    collective,  // one collective of rank-major segments
    messages,    // straight into the slot, or gradients from each rank to each other, which are summed here
    coded,       // in a wire format
  };
  // The last posted gather or reduction. Its memory is in bytes unless a custom collective allocated it.
  struct Posted {
    at::Tensor memory;
    PyRef work;
    bool is_open = false;  // from before the post until a wait has ended: the backend may use the memory
    Route route = Route::collective;
  };
  // Weights in a wire format. This rank's rows are encoded once for a forward and its backward. Every rank decodes the
  // rows of all ranks, including its own, so all ranks compute with the same bits.
  struct Coded {
    GatherProgram program;
    WireFormat format = WireFormat::plain;
    at::Tensor segment = {};      // of this rank
    uint64_t for_forward = 0;     // the forward whose rows it has, 0: it must be encoded again
    uint64_t shard_versions = 0;  // when it was encoded
  };
  struct PerGroup {
    const ParamGroup* group = nullptr;
    Posted gather;
    Posted reduced;                       // this rank's summed segment, with messages those of the other ranks
    at::Tensor packed;                    // gradients: W segments laid end to end
    GatherProgram whole;                  // gathers everything packed
    GatherProgram in_place;               // gathers large parameters straight into the slot
    std::optional<Coded> coded;           // none: weights travel in the compute dtype
    std::unique_ptr<WireGradients> wire;  // null: likewise for gradients
  };
  SegmentPlan& plan_of(ParamGroup& group, bool is_wide) override;
  std::byte* open_packed(ParamGroup& group, size_t bytes) override;
  void close_packed(ParamGroup& group) override;
  void post_reduce(ParamGroup& group, ForwardCounts forwards) override;
  std::optional<Joined> join_reduce(ParamGroup& group, bool flush) override;
  at::Tensor take(size_t bytes) override;  // from `kept_`, if one fits
  PerGroup& per_group(const ParamGroup& group) { return groups_[group.index()]; }

  bool may_replace(const ParamGroup& group);  // see Collectives, asked once in each pass
  Route gather_route(ParamGroup& group);
  Route reduce_route(ParamGroup& group);
  // Returns the outputs of a packed gather that runs as messages, in bytes of a rank. Empty if it does not.
  std::vector<size_t> message_parts(const ParamGroup& group, size_t segment_bytes);
  // Starts a collective with (output, input, `option` unless it is null) and stores its work in `posted`.
  void start(ParamGroup& group, const PyRef& collective, Posted& posted, const at::Tensor& output,
             const at::Tensor& input, const char* operation, PyObject* option = nullptr);
  const GatherProgram& gather_of(const PerGroup& state) const;  // that runs
  void begin_packed_gather(ParamGroup& group, bool pools_stand_still);
  // Returns this rank's segment in its format, as bytes. It is encoded again unless it was made for this forward, and
  // torch's version counters show no write to a shard since. Gathers outside of a forward always encode, because the
  // user may have written to the shards.
  const at::Tensor& coded_segment(ParamGroup& group, bool pools_stand_still);
  void begin_gather_in_place(ParamGroup& group, bool pools_stand_still);
  // Whether a gather in place can send the shards from their pool. Otherwise, for example after a cast, it sends this
  // rank's rows in the slot.
  bool can_send_pool(const ParamGroup& group) const;
  void begin_coded_reduce(ParamGroup& group);
  void begin_exchange(ParamGroup& group);
  void begin_reduce_scatter(ParamGroup& group);
  void sum_coded(ParamGroup& group);
  // Returns a flat tensor that a custom collective allocates. `memory`: a tuple of the collective and of
  // (tensor, numel, dtype), which raises if `tensor` is not as asked. The tally does not count it.
  at::Tensor allocate(const ParamGroup& group, const PyRef& memory, DType type, size_t bytes, const char* operation);
  // Ends the use of memory. `keeps`: the next unit will need as much soon.
  void give_back(at::Tensor& memory, bool keeps = false);
  void wait(const ParamGroup& group, Posted& posted, const char* operation);
  // Waits for a collective whose result is not needed, unless it may never end. Then the backend keeps its memory.
  // Calls `close` in any case.
  template <typename Close>
  void end(const ParamGroup& group, Posted& posted, const char* operation, const Close& close);

  Collectives collectives_;
  Pass asked_in_;  // the pass of the last answer of may_replace
  bool may_replace_ = false;
  uint64_t num_forwards_ = 0;
  bool is_in_forward_ = false;
  size_t num_scratches_ = 0;
  MemoryTally tally_;  // all memory that is taken
  KeptMemory kept_;
  const PerGroup* ahead_ = nullptr;  // began the last gather, null: that one has finished
  std::deque<PerGroup> groups_;
};

}  // namespace fsdp2x
