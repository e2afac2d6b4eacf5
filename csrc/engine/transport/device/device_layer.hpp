// What the device transport needs of a device: lanes (streams), events, and kernels that run whole plans. TorchLayer
// has them of any accelerator through torch's generic interface, the test extension plays them on CPU memory.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <functional>
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

// `compute` is the stream that is current where the caller is, outside of all scopes; the others belong to the layer.
// `host` is no lane of the device: what the calling thread does itself, for records.
enum class Lane : uint8_t { compute, copy_in, gather, reduce, all_reduce, copy_out, host };
inline constexpr size_t kNumLanes = 6;

// May be recorded again and again; a wait refers to the latest record before it, and is nothing if there was none, or
// if one of both was captured into a graph and the other was not: see `TorchLayer::capture`.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
};

// One parameter of a packing launch: its whole gradient, dense.
struct PackItem {
  size_t param = 0;
  DType type = DType::f32;
  const void* source = nullptr;  // null: zeros
  size_t source_bytes = 0;
  bool add = false;  // to what was packed before
};

// This rank's reduced rows of one parameter on their way into a gradient.
struct RowItem {
  size_t param = 0;
  void* target = nullptr;
  bool accumulate = false;
};

class PlanRunner;

// The test extension derives a layer of its own: these two names are visible there, the rest of the engine is not.
#define FSDP2X_VISIBLE __attribute__((visibility("default")))
FSDP2X_VISIBLE const char* lane_name(Lane lane);

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wattributes"  // of members whose types stay hidden

class FSDP2X_VISIBLE DeviceLayer {
 public:
  // `kernels`: what runs the plans; null: torch's operations, piece by piece.
  DeviceLayer(at::Device device, const cuda::Kernels* kernels);
  virtual ~DeviceLayer();
  DeviceLayer(const DeviceLayer&) = delete;
  DeviceLayer& operator=(const DeviceLayer&) = delete;

  at::Device device() const { return device_; }

  // --- lanes and events: never wait on the host ---
  // `name` is for records of a run only.
  virtual std::unique_ptr<DeviceEvent> make_event(const std::string& name) = 0;
  virtual void record(DeviceEvent& event, Lane lane) = 0;
  virtual void wait(Lane lane, DeviceEvent& event) = 0;
  // The calling thread waits, without the GIL.
  virtual void synchronize(DeviceEvent& event) = 0;
  // nullopt: the current stream.
  virtual std::optional<c10::Stream> stream(Lane lane) = 0;
  virtual Lane current_lane() const = 0;
  // The stream in whose order torch's allocator gives memory now; nullopt: there is only one order.
  virtual std::optional<c10::Stream> current_stream() { return std::nullopt; }

  // --- kernels, on the current lane; one launch each where the device has them as kernels of ours ---
  // Casts into the slot or the staging, and copies out of the staging.
  virtual void copy(const CopyProgram& program, const void* src, void* dst);
  // Whole gradients -> the W segments of `plan` laid end to end in `buffer`, with their pads zeroed. `flags`, by
  // parameter: those of the items, and of what is never packed, lie behind the rows of every segment then.
  virtual void pack(SegmentPlan& plan, const std::vector<PackItem>& items, const std::vector<uint8_t>& flags,
                    const at::Tensor& buffer);
  // The rows of a segment -> gradients: target (+)= cast(rows / divisor), the quotient rounded to the type of the rows.
  virtual void write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const at::Tensor& segment,
                          double divisor);
  // Values -> codes in the segments of a wire format, by kernels of ours alone. `errors`: what int8 rounded away the
  // last time, and does now; null: it is dropped. Parameters that are not `filled` are coded as zeros; empty: all are.
  virtual void encode(const WireProgram& program, const void* values, void* segments, void* errors,
                      const std::vector<uint8_t>& filled);
  virtual void decode(const WireProgram& program, const void* segments, void* values);
  // The same segments of `num_ranks` ranks, end to end -> the sums of their values in fp32, divided.
  virtual void sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                         double divisor, void* values);
  // Over flat memory.
  virtual void divide(const at::Tensor& memory, double divisor);
  virtual void add(const at::Tensor& target, const at::Tensor& source);
  virtual void assign(const at::Tensor& target, const at::Tensor& source);
  // Between the device and host memory. Pinned memory stays alive until the copy is done.
  virtual void transfer(const at::Tensor& target, const at::Tensor& source);

  // `memory`, of another stream's order, goes back to its allocator behind what the current stream has been given.
  virtual void hold(const at::Tensor& memory) { memory.record_stream(*current_stream()); }

  // Whether what the compute lane is given now becomes a graph.
  virtual bool in_capture() { return false; }

  // --- what others do with memory on the current lane, which a device does not ask ---
  // Torch, a collective or a hook of the user's. Undefined tensors are left out.
  virtual void touches(const char* /*operation*/, const std::string& /*subject*/, at::TensorList /*reads*/,
                       at::TensorList /*writes*/) {}
  // A collective over Python lists of tensors.
  virtual void gathers(const std::string& /*subject*/, PyObject* /*outputs*/, PyObject* /*inputs*/) {}
  // The host writes reduced rows, which lie in `memory` as in a segment of `layout`, into gradients.
  virtual void lands(const std::string& /*subject*/, const Layout& /*layout*/, const at::Tensor& /*memory*/,
                     const GradientTargets& /*targets*/) {}
  // Users may write to what `memory_of` tells, on the device or on the host, as an optimizer does.
  virtual void lets_users_write(const std::function<std::vector<at::Tensor>(bool on_host)>& /*memory_of*/) {}

 protected:
  friend class LaneScope;
  friend class StreamScope;
  // Returns the lane before.
  virtual Lane enter(Lane lane) { return lane; }
  virtual void leave(Lane /*before*/) {}
  // The stream is the current one, whatever lane it is; returns what `leave_stream` takes.
  virtual int enter_stream(c10::Stream /*stream*/) { return 0; }
  virtual void leave_stream(int /*before*/) {}
  // The current stream as kernels take it.
  virtual CUstream_st* native_stream() { return nullptr; }

 private:
  const PlanRunner& coder() const;

  at::Device device_;
  std::unique_ptr<PlanRunner> runner_;
};

#pragma GCC diagnostic pop

// While it lives, `lane` is the current one: kernels, collectives and torch operations go there.
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

// Any accelerator that torch knows streams and events of. Five streams of its own, of high priority as upstream's.
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
  // The number of the capture that takes the compute lane's work; 0: it runs. What happened before a capture is over
  // when it begins, and its replays come in the order of the compute lane, which every forward lets the other lanes
  // follow. So events of eager work mean nothing in a capture, those of a capture nothing behind it; CUDA refuses both.
  uint64_t capture();

  const cuda::Kernels* kernels_;
  std::vector<c10::Stream> streams_;  // of the lanes behind compute
  Lane lane_ = Lane::compute;         // the current one
  std::optional<c10::Stream> home_;   // the compute lane, while another one is current
  uint64_t num_captures_ = 0;
  bool in_capture_ = false;
};

}  // namespace fsdp2x
