// The device interface of the device transport: lanes (streams), events, and kernels that run complete plans.
// TorchLayer implements it for any accelerator through torch's generic interface. The test extension simulates it on
// CPU memory.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "engine/memory/copy_program.hpp"
#include "engine/memory/wire_program.hpp"
#include "engine/params/gradients.hpp"
#include "engine/transport/segment_plans.hpp"

struct CUstream_st;

namespace fsdp2x::cuda {
struct Kernels;
}

namespace fsdp2x {

// `compute` is the caller's current stream, outside of all scopes. The others belong to the layer. `host` is not a
// device lane: it stands for work of the calling thread, in records.
enum class Lane : uint8_t { compute, copy_in, gather, reduce, all_reduce, copy_out, host };
inline constexpr size_t kNumLanes = 6;

// May be recorded repeatedly. A wait refers to the latest record before it. It does nothing if there was none, or if
// only one of both was captured into a graph: see `TorchLayer::capture`.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// One parameter of a packing launch: its full gradient, dense.
struct PackItem {
  size_t param = 0;
  DType type = DType::f32;
  const void* source = nullptr;  // null: zeros
  size_t source_bytes = 0;
  bool add = false;  // add to the packed values
};

// This rank's reduced rows of one parameter on their way into a gradient.
struct RowItem {
  size_t param = 0;
  void* target = nullptr;
  bool accumulate = false;
};

class PlanRunner;

// The test extension derives a layer from this one. These two names are visible to it, the rest of the engine is not.
#define FSDP2X_VISIBLE __attribute__((visibility("default")))
FSDP2X_VISIBLE const char* lane_name(Lane lane);

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wattributes"  // for members whose types stay hidden

class FSDP2X_VISIBLE DeviceLayer {
 public:
  // `kernels`: run the plans. Null: torch's operations run them piece by piece.
  DeviceLayer(at::Device device, const cuda::Kernels* kernels);
  virtual ~DeviceLayer();
  DeviceLayer(const DeviceLayer&) = delete;
  DeviceLayer& operator=(const DeviceLayer&) = delete;

  at::Device device() const { return device_; }

  // --- lanes and events: these calls never wait on the host ---
  // `name` only appears in records of a run.
  virtual std::unique_ptr<DeviceEvent> make_event(const std::string& name) = 0;
  virtual void record(DeviceEvent& event, Lane lane) = 0;
  virtual void wait(Lane lane, DeviceEvent& event) = 0;
  // Waits in the calling thread, without the GIL.
  virtual void synchronize(DeviceEvent& event) = 0;
  // nullopt: the current stream.
  virtual std::optional<c10::Stream> stream(Lane lane) = 0;
  virtual Lane current_lane() const = 0;
  // Returns the stream in whose order torch's allocator gives memory now. nullopt: there is only one order.
  virtual std::optional<c10::Stream> current_stream() { return std::nullopt; }

  // --- memory ---
  // Takes memory from torch's allocator in the order of the current stream, and gives it back.
  virtual at::Tensor allocate(size_t bytes);
  virtual void free(at::Tensor /*memory*/) {}
  // Keeps `memory`, of another stream's order, from its allocator until the work that the current stream has is done.
  virtual void hold(const at::Tensor& memory) { memory.record_stream(*current_stream()); }
  // Returns CPU memory for copies from and to the device.
  virtual at::Tensor host_memory(at::ScalarType type, size_t numel);

  // --- kernels, on the current lane: one launch each if the device has fsdp2x kernels ---
  // Casts into the slot or the staging, and copies out of the staging.
  virtual void copy(const CopyProgram& program, const void* src, void* dst);
  // Packs full gradients into a piece of the W segments of `plan`, laid end to end in `buffer`, and zeros their pads.
  // `flags`, by parameter: those of the items, and of parameters that are never packed. They follow the rows of every
  // segment. Several pieces need fsdp2x kernels.
  virtual void launch_pack(SegmentPlan& plan, const Piece& piece, const std::vector<PackItem>& items,
                           const std::vector<uint8_t>& flags, const at::Tensor& buffer);
  bool has_kernels() const { return runner_ != nullptr; }
  // Writes the rows of a segment to gradients: target (+)= cast(rows / divisor), the quotient rounded to the rows'
  // type.
  virtual void write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const at::Tensor& segment,
                          double divisor);
  // Does the same on the host: `rows` is a copy of a segment of `layout` in CPU memory.
  virtual void write_host_rows(const Layout& layout, const at::Tensor& rows, const GradientTargets& targets,
                               double divisor);
  // Encodes values into the segments of a wire format. Needs fsdp2x kernels. `errors`: int8 rounding errors, read from
  // the last call and updated. Null: errors are dropped. Parameters that are not `filled` are coded as zeros. Empty:
  // all are filled.
  virtual void encode(const WireProgram& program, const void* values, void* segments, void* errors,
                      const std::vector<uint8_t>& filled);
  virtual void decode(const WireProgram& program, const void* segments, void* values);
  // Decodes the segments of `num_ranks` ranks, laid end to end, sums them in fp32, and divides.
  virtual void sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                         double divisor, void* values);
  // Work on flat memory.
  virtual void zero(const at::Tensor& memory);
  virtual void divide(const at::Tensor& memory, double divisor);
  virtual void add(const at::Tensor& target, const at::Tensor& source);
  virtual void assign(const at::Tensor& target, const at::Tensor& source);
  // Copies between device and host memory. Pinned memory stays alive until the copy is done.
  virtual void transfer(const at::Tensor& target, const at::Tensor& source);

  // Returns whether work on the compute lane is captured into a graph.
  virtual bool in_capture() { return false; }

 protected:
  friend class LaneScope;
  friend class StreamScope;
  // Returns the previous lane.
  virtual Lane enter(Lane lane) { return lane; }
  virtual void leave(Lane /*before*/) {}
  // Makes the stream current, whatever lane it is. Returns the argument for `leave_stream`.
  virtual int enter_stream(c10::Stream /*stream*/) { return 0; }
  virtual void leave_stream(int /*before*/) {}
  // Returns the current stream for kernel launches.
  virtual CUstream_st* native_stream() { return nullptr; }

 private:
  const PlanRunner& coder() const;

  at::Device device_;
  std::unique_ptr<PlanRunner> runner_;
};

#pragma GCC diagnostic pop

// While it lives, `lane` is current: kernels, collectives, and torch operations go there.
class LaneScope {
 public:
  LaneScope(DeviceLayer& layer, Lane lane) : layer_(layer) {
    const auto stream = layer.stream(lane);
    before_ = layer.enter(lane);
    if (stream) guard_.reset_stream(*stream);
  }
  ~LaneScope() { layer_.leave(before_); }
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;

 private:
  DeviceLayer& layer_;
  Lane before_;
  c10::OptionalStreamGuard guard_;
};

// While it lives, `stream` is the current one, and the compute lane.
class StreamScope {
 public:
  StreamScope(DeviceLayer& layer, c10::Stream stream) : layer_(layer), before_(layer.enter_stream(stream)) {
    guard_.reset_stream(stream);
  }
  ~StreamScope() { layer_.leave_stream(before_); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  DeviceLayer& layer_;
  int before_;
  c10::OptionalStreamGuard guard_;
};

// Works on any accelerator with streams and events in torch. It has five streams of high priority, as FSDP2 does.
class TorchLayer final : public DeviceLayer {
 public:
  explicit TorchLayer(at::Device device);
  std::unique_ptr<DeviceEvent> make_event(const std::string& name) override;
  void record(DeviceEvent& event, Lane lane) override;
  void wait(Lane lane, DeviceEvent& event) override;
  void synchronize(DeviceEvent& event) override;
  std::optional<c10::Stream> stream(Lane lane) override;
  Lane current_lane() const override { return lane_; }
  std::optional<c10::Stream> current_stream() override { return current(); }
  bool in_capture() override { return capture() != 0; }

 protected:
  Lane enter(Lane lane) override;
  void leave(Lane before) override { lane_ = before; }
  int enter_stream(c10::Stream) override { return static_cast<int>(std::exchange(lane_, Lane::compute)); }
  void leave_stream(int before) override { lane_ = static_cast<Lane>(before); }
  CUstream_st* native_stream() override;

 private:
  c10::Stream current() const;
  bool is_capturing(const c10::Stream& stream) const;
  // Returns the number of the capture that takes the compute lane's work. 0: the work runs. Work before a capture is
  // over when it begins. Its replays come in the order of the compute lane, which the other lanes follow at every
  // forward. So eager events have no meaning in a capture, and captured events none after it. CUDA rejects both.
  uint64_t capture();

  const cuda::Kernels* kernels_;
  std::vector<c10::Stream> streams_;  // of the lanes after compute
  Lane lane_ = Lane::compute;         // the current one
  std::optional<c10::Stream> home_;   // the compute lane, while another one is current
  uint64_t num_captures_ = 0;
  bool in_capture_ = false;
};

}  // namespace fsdp2x
