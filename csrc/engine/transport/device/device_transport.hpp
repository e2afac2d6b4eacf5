// The transport on an accelerator: gathers and reductions on lanes of their own beside the compute, ordered by events;
// the host does not wait for the device, but for collectives that only it can `check`. Collectives are issued through
// torch.distributed in the order of the current lane, so libnccl is not linked and patches, counters and custom groups
// see them.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/gather_plan.hpp"
#include "core/reduction_window.hpp"
#include "engine/transport/device/device_buffers.hpp"
#include "engine/transport/segment_plans.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

// Python callables of the process groups. All are ordered by the current stream and return when they are enqueued.
struct DeviceCollectives {
  PyRef all_gather;        // (output, input)
  PyRef all_gather_group;  // ([output], [input]): in one launch; null: gather in one piece, packed
  PyRef reduce_scatter;    // (output, input, average: bool), or lists of outputs and inputs: in one launch
  PyRef allocate;          // (bytes) -> memory registered with the process group; null: torch's allocator
  PyRef check;  // (): raises when one of them has failed on the device; null: the host is told in another way
};

class DeviceTransport final : public Transport {
 public:
  // Smaller parameters are gathered packed, and smaller gradients reduced so: all of them with kPackEverything.
  DeviceTransport(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer, size_t pack_below_bytes,
                  size_t pack_gradients_below_bytes);
  ~DeviceTransport() override;

  const char* name() const override { return "process_group"; }
  void register_group(ParamGroup& group) override;
  void begin_forward(const PyRef& after) override;
  void end_forward() override;
  void begin_gather(ParamGroup& group) override;
  void finish_gather(ParamGroup& group) override;
  void release_gather(ParamGroup& group) override;
  void write_pool(ParamGroup& group, const CopyProgram& rows, const void* slot) override;
  void pack(ParamGroup& group, size_t param, const at::Tensor& gradient) override;
  void settle(ParamGroup& group) override;
  void begin_reduce(ParamGroup& group) override;
  bool needs_empty_reduction(const ParamGroup& group) const override;
  bool finish_reduce(ParamGroup& group, bool flush) override;
  std::shared_ptr<const Layout> segment_layout(ParamGroup& group) override;
  bool abandon_reduce(ParamGroup& group) override;
  void drop_partial(ParamGroup& group) override;
  void end_backward() override;
  void check_collectives() override;
  bool has_streams() const override { return true; }
  void publish_progress(uint64_t) override {}
  void release_idle() override;
  void set_max_reduce_buffers(size_t num) override { window_.set_max_buffers(num); }
  TransportStats stats() const override;
  std::vector<Loan> loans() const override;

 private:
  using TensorLists = std::pair<PyRef, PyRef>;  // outputs, inputs
  // A reduction that is enqueued and not attached.
  struct Running {
    at::Tensor rows;      // this rank's segment; undefined: kept as a partial sum
    int segment = -1;     // in segments_; else `rows` is in `buffer`, or the group's gradient pool
    int buffer = -1;      // in buffers_: one rank alone, whose packed gradients are its rows
    uint64_t number = 0;  // of the reduction in in_flight_; 0: in none
    SegmentPlan* plan = nullptr;
    Lane lane = Lane::reduce;
    double divisor = 1.0;               // left to divide by
    bool is_certain = true;             // every trainable parameter has a gradient here, or is reduced as zeros
    std::vector<at::Tensor> gradients;  // that are not packed, until InFlight holds them
  };
  // What a reduction holds until the compute lane has waited for it.
  struct InFlight {
    uint64_t number = 0;
    int buffer = -1;                    // in buffers_
    std::vector<int> segments;          // in segments_, once nobody on the host needs them
    std::vector<at::Tensor> gradients;  // that are not packed: memory in the order of `home`
    std::optional<c10::Stream> home;
  };
  // Reduced rows of a group that offloads, on their way to the host.
  struct Download {
    at::Tensor memory;     // of the host
    bool in_pool = false;  // `memory` is the gradient pool
    std::shared_ptr<const Layout> plan;
    std::vector<uint8_t> wanted;
    double divisor = 1.0;  // left to divide by
  };
  struct Gather {
    Gather() = default;
    explicit Gather(GatherPlan plan)
        : direct(std::move(plan.direct)),
          segment_bytes(plan.segment_bytes),
          to_slot(std::move(plan.shard_to_slot)),
          to_segment(std::move(plan.shard_to_segment)),
          copy_out(std::move(plan.staging_to_slot)) {}
    std::vector<DirectGather> direct;
    size_t segment_bytes = 0;  // of one rank in the staging; 0: nothing is packed
    CopyProgram to_slot, to_segment, copy_out;
  };
  struct PerGroup {
    const Gather& running_gather() const { return in_one_piece && packed ? *packed : gather; }
    Gather gather;
    std::optional<Gather> packed;                      // for collectives that gather in one piece, made for the first
    CopyProgram own_rows;                              // one rank alone: its pool -> the slot
    std::map<std::pair<int, int>, TensorLists> lists;  // by slot and staging
    std::unique_ptr<DeviceEvent> pool_event;           // the pool was written, by the compute lane
    bool in_one_piece = false;                         // of the running gather
    int staging = -1;                                  // likewise, in staging_
    int upload = -1;                                   // likewise, in uploads_
    bool is_finished = false;                          // the compute lane has waited for it
    at::Tensor pool;                                   // the group's shard pool, for records
    std::weak_ptr<Unit> unit;                          // likewise
    SegmentPlans plans;
    SegmentPlan* reduce = nullptr;      // of the open scratch
    std::vector<at::Tensor> held;       // gradients that are not packed yet
    std::map<size_t, at::Tensor> sums;  // of those that are not to be: of backwards without gradient sync, ours
    int buffer = -1;                    // in buffers_, of the open scratch
    Running running;
    int partial = -1;  // in segments_: reduced over the shards, waits for the all-reduce
    std::shared_ptr<const Layout> partial_plan;
    Offload offload = Offload::nothing;
    int resident = -1;                 // in residents_, once it was uploaded
    bool resident_is_current = false;  // nobody may have written to the shards since
    std::optional<Download> download;
    std::unique_ptr<DeviceEvent> downloaded;
  };

  // Whether memory is kept for the next borrower: where it is dear.
  bool keeps() const { return static_cast<bool>(collectives_.allocate); }
  PerGroup& per_group(const ParamGroup& group);
  // Work that `lane` is given next comes after everything that `other` has been given.
  void follow(Lane lane, Lane other);
  void follow_compute(Lane lane) { follow(lane, Lane::compute); }
  void join(Lane lane) { follow(Lane::compute, lane); }
  // `lane` is given a block of gradients next, and others may have used it last: see gave_blocks_.
  void follow_blocks(Lane lane);
  void note_use(const ParamGroup& group, const DeviceBuffer& slot);
  void note_rows(const char* operation, const ParamGroup& group, const at::Tensor& input, const at::Tensor& output);
  at::Tensor allocate(size_t bytes);
  void enqueue_gather(ParamGroup& group);
  // For records: what users do to pools between two steps, on the lane that owns them.
  void note_optimizer(bool with_shards);
  void call_all_gather(ParamGroup& group, PerGroup& mine, DeviceBuffer& slot, DeviceBuffer* staging);
  TensorLists make_lists(const ParamGroup& group, const PerGroup& mine, const DeviceBuffer& slot,
                         const DeviceBuffer* staging) const;
  // Gives back what a gather needed besides its slot; the compute lane has waited for it.
  void close_gather(PerGroup& mine);
  void note_collective(const std::string& name, const ParamGroup& group, const TensorLists& lists);

  // Packing (device_pack.cpp).
  // No other rank has gradients of these parameters.
  static bool is_alone(const ParamGroup& group);
  void open_scratch(ParamGroup& group);
  void open_buffer(ParamGroup& group);
  // How many reductions may be on their way when `bytes` of gradients are packed for one more.
  size_t reductions_before(const ParamGroup& group, size_t bytes);
  // The compute lane goes on behind all reductions, whose buffers are given back.
  void end_reductions();
  // Gives back the buffers of the oldest reductions until `num` are left; the compute lane waits for them.
  void retire_reductions(ParamGroup& group, size_t num);
  // Rows that are attached, by the lane that is given to do that: their memory goes with the reduction's buffer.
  void retire_segment(int id, uint64_t reduction, Lane lane);
  // The gradient pool, where a rank that is alone packs its gradients; undefined: into a buffer.
  at::Tensor pool_to_pack(ParamGroup& group);
  // Returns where to; undefined if there was nothing to pack.
  at::Tensor pack_held(ParamGroup& group, bool for_reduction);
  // Which plan a reduction of the group that opens now has.
  SegmentPlan& plan_of(ParamGroup& group);
  // Held gradients that are not to be packed become sums.
  void add_to_sums(ParamGroup& group);
  // What is reduced without being packed, in the order of the plan's list: gradients as autograd made them where that
  // can be, sums, or zeros.
  std::vector<at::Tensor> take_direct(ParamGroup& group);
  // Gradients that were not packed go back to their allocator, behind their reduction.
  void drop_gradients(InFlight& reduction);
  // By parameter: whether it has a gradient, or is reduced as zeros.
  static std::vector<uint8_t> flags_of(const ParamGroup& group, const Layout& plan);

  // Reducing and attaching (device_reduce.cpp).
  at::Tensor rows_for(ParamGroup& group, Running& running);
  void call_reduce_scatter(ParamGroup& group, const Running& running, const at::Tensor& packed);
  void reduce_over_replicas(ParamGroup& group, Running& running);
  void keep_partial(ParamGroup& group, Running& running);
  void close_scratch(ParamGroup& group);
  void attach(ParamGroup& group, Running& running, const Layout& plan, std::vector<uint8_t> wanted);

  // Shards and gradients in host memory (device_offload.cpp).
  // The device's copy of a pool, for one gather.
  struct Upload {
    DeviceBuffer* buffer = nullptr;  // null: the pool is the device's
    bool is_current = false;         // holds the shards already
    bool stays_current = false;      // for the next gather
    bool is_new = false;
  };
  Upload open_upload(ParamGroup& group, bool pools_stand_still);
  void upload(ParamGroup& group, const Upload& target, Lane lane);
  void shards_may_change();
  void host_waits_for(Lane lane);
  void download(ParamGroup& group, Running& running, std::vector<uint8_t> wanted);
  void land(ParamGroup& group);
  bool drop_download(ParamGroup& group);

  DeviceCollectives collectives_;
  std::shared_ptr<DeviceLayer> layer_;
  size_t pack_below_bytes_;
  size_t pack_gradients_below_bytes_;
  ReductionWindow window_;
  MemoryTally tally_;  // of what comes and goes, slots aside
  DeviceBuffers slots_, staging_, buffers_, segments_;
  DeviceBuffers uploads_;                                                // shard pools that lie on the host
  DeviceBuffers residents_;                                              // likewise, kept by their groups
  bool offloads_ = false;                                                // some group does
  std::deque<std::pair<std::shared_ptr<Unit>, ParamGroup*>> downloads_;  // oldest first
  std::deque<InFlight> in_flight_;                                       // reductions that are enqueued, oldest first
  uint64_t num_reductions_ = 0;
  // Lanes on which blocks of gradients were given back in this backward: of gradients that hooks took at once, as an
  // optimizer in backward does. Whoever takes such a block next may be on another lane: groups differ in theirs.
  std::array<bool, kNumLanes> gave_blocks_{};
  std::vector<at::Tensor> foreign_sums_;                   // of this backward, added to gradients that are not ours
  std::vector<std::unique_ptr<DeviceEvent>> lane_events_;  // per lane: its work so far
  std::map<uint32_t, PerGroup> groups_;
  size_t num_scratches_ = 0;
};

}  // namespace fsdp2x
