// Streams and events through torch's generic interface, and kernels that run copy plans.
#include "engine/transport/device/device_layer.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <array>

#include <algorithm>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/memory/device_kernels.hpp"
#include "engine/memory/uploaded_plan.hpp"
#include "engine/torch/gil.hpp"
#include "engine/transport/device/plan_runner.hpp"

namespace fsdp2x {

const char* lane_name(Lane lane) {
  static constexpr std::array kNames = {"compute", "copy_in", "gather", "reduce", "all_reduce", "copy_out", "host"};
  return kNames.at(static_cast<size_t>(lane));
}

// --- kernels ---

DeviceLayer::DeviceLayer(at::Device device, const cuda::Kernels* kernels)
    : device_(device), runner_(kernels == nullptr ? nullptr : std::make_unique<PlanRunner>(*kernels, *this)) {}

DeviceLayer::~DeviceLayer() = default;

at::Tensor DeviceLayer::allocate(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device_));
}

at::Tensor DeviceLayer::host_memory(at::ScalarType type, size_t numel) { return host_memory_for(device_, type, numel); }

void DeviceLayer::copy(const CopyProgram& program, const void* src, void* dst) {
  run_copies_on(device_, runner_ ? runner_->copy(program, src, dst, native_stream()) : program.copies, src, dst);
}

namespace {

// Zeros the segments of one parameter for `ranks` after their first `filled` elements, up to the next parameter.
void zero_behind(const SegmentPlan& plan, size_t param, const at::Tensor& buffer, RowRange ranks, int64_t filled) {
  const Layout& layout = *plan.layout;
  const ParamPlace& place = layout.params()[param];
  const size_t element = dtype_bytes(place.shape.reduce);
  const auto numel = static_cast<int64_t>(align_up(static_cast<size_t>(place.padded_shard_numel) * element) / element);
  if (ranks.size() <= 0 || filled >= numel) return;
  const auto bytes = static_cast<int64_t>(plan.segment_bytes) * layout.world();
  const at::Tensor rows = buffer.narrow(0, 0, bytes).view(torch_dtype(place.shape.reduce)).view({layout.world(), -1});
  const auto at = static_cast<int64_t>(place.reduce_segment_offset / element);
  rows.narrow(0, ranks.begin, ranks.size()).narrow(1, at + filled, numel - filled).zero_();
}

// The first ranks have a full set of rows, one has fewer, and the last ones have none.
void zero_pads(const SegmentPlan& plan, size_t param, const at::Tensor& buffer) {
  const Layout& layout = *plan.layout;
  const int64_t world = layout.world();
  const ParamPlace& place = layout.params()[param];
  const auto numel_of = [&](int64_t rank) {
    return place.shape.outer * shard_rows(place.shape.dim, layout.world(), static_cast<int>(rank)).size() *
           place.shape.inner;
  };
  int64_t whole = 0;
  while (whole < world && numel_of(whole) == place.padded_shard_numel) ++whole;
  zero_behind(plan, param, buffer, {0, whole}, place.padded_shard_numel);
  if (whole == world) return;
  zero_behind(plan, param, buffer, {whole, whole + 1}, numel_of(whole));
  zero_behind(plan, param, buffer, {whole + 1, world}, 0);
}

// Writes all flags of every segment, and zeros after them.
void write_flags(const SegmentPlan& plan, const std::vector<uint8_t>& flags, const at::Tensor& buffer) {
  const DType type = plan.flags_to_segments.dst;
  const at::Tensor values = host_memory_for(buffer.device(), at::kFloat, plan.flags_numel());
  values.zero_();
  std::copy(flags.begin(), flags.end(), values.mutable_data_ptr<float>());
  const int64_t world = plan.layout->world();
  const at::Tensor segments =
      buffer.narrow(0, 0, static_cast<int64_t>(plan.segment_bytes) * world).view(torch_dtype(type)).view({world, -1});
  const auto at = static_cast<int64_t>(plan.layout->reduce_segment_bytes() / dtype_bytes(type));
  segments.slice(1, at).copy_(values.to(buffer.device(), /*non_blocking=*/true));
}

}  // namespace

void DeviceLayer::launch_pack(SegmentPlan& plan, const Piece& piece, const std::vector<PackItem>& items,
                              const std::vector<uint8_t>& flags, const at::Tensor& buffer) {
  if (!runner_ || !PlanRunner::writes_flags(plan)) write_flags(plan, flags, buffer);
  for (const PackItem& item :
       runner_ ? runner_->launch_pack(plan, piece, items, flags, buffer.data_ptr(), native_stream()) : items) {
    if (item.source == nullptr) {
      zero_behind(plan, item.param, buffer, {0, plan.layout->world()}, 0);
    } else if (item.add) {
      add_on(device_, plan.copies_of(item.param, item.type), item.source, buffer.data_ptr());
    } else {
      run_copies_on(device_, plan.copies_of(item.param, item.type), item.source, buffer.data_ptr());
      zero_pads(plan, item.param, buffer);
    }
  }
}

void DeviceLayer::write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const at::Tensor& segment,
                             double divisor) {
  const auto* const rows = static_cast<const std::byte*>(segment.const_data_ptr());
  for (const RowItem& item : runner_ ? runner_->write_rows(plan, items, rows, divisor, native_stream()) : items) {
    const ParamPlace& place = plan.layout->params()[item.param];
    scale_into(device_, place.shape.grad(), item.target, place.shape.reduce, rows + place.reduce_segment_offset,
               place.shard_numel, divisor, item.accumulate);
  }
}

void DeviceLayer::write_host_rows(const Layout& layout, const at::Tensor& rows, const GradientTargets& targets,
                                  double divisor) {
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = layout.params()[i];
    const auto* const row = static_cast<const std::byte*>(rows.const_data_ptr()) + place.reduce_segment_offset;
    if (row == targets[i]->data || place.shard_numel == 0) continue;
    scale_into(at::kCPU, place.shape.grad(), targets[i]->data, place.shape.reduce, row, place.shard_numel, divisor,
               targets[i]->accumulate);
  }
}

const PlanRunner& DeviceLayer::coder() const {
  if (runner_) return *runner_;
  throw Error("fsdp2x: wire formats need fsdp2x's kernels, and there are none for " + device_.str() +
              ". Do not call set_wire_dtype there, or build fsdp2x with nvcc.");
}

void DeviceLayer::encode(const WireProgram& program, const void* values, void* segments, void* errors,
                         const std::vector<uint8_t>& filled) {
  coder().encode(program, values, segments, errors, filled, native_stream());
}

void DeviceLayer::decode(const WireProgram& program, const void* segments, void* values) {
  coder().decode(program, segments, values, native_stream());
}

void DeviceLayer::sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                            double divisor, void* values) {
  coder().sum_codes(program, segments, segment_bytes, num_ranks, divisor, values, native_stream());
}

void DeviceLayer::zero(const at::Tensor& memory) { memory.zero_(); }

void DeviceLayer::divide(const at::Tensor& memory, double divisor) { memory.div_(divisor); }

void DeviceLayer::add(const at::Tensor& target, const at::Tensor& source) { target.add_(source); }

void DeviceLayer::assign(const at::Tensor& target, const at::Tensor& source) { target.copy_(source); }

void DeviceLayer::transfer(const at::Tensor& target, const at::Tensor& source) {
  target.copy_(source, /*non_blocking=*/true);
}

// --- torch's streams ---

namespace {

struct TorchEvent final : DeviceEvent {
  explicit TorchEvent(c10::DeviceType type) : event(type) {}
  c10::Event event;
  uint64_t capture = 0;  // the capture that recorded it last
};

}  // namespace

TorchLayer::TorchLayer(at::Device device) : DeviceLayer(device, kernels_on(device)), kernels_(kernels_on(device)) {
  if (device.is_cpu()) throw Error("fsdp2x: the CPU has no streams. Use a transport for the CPU.");
  const c10::impl::VirtualGuardImpl guard(device.type());
  for (size_t lane = 1; lane < kNumLanes; ++lane) {
    streams_.push_back(guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
  }
}

std::unique_ptr<DeviceEvent> TorchLayer::make_event(const std::string&) {
  return std::make_unique<TorchEvent>(device().type());
}

c10::Stream TorchLayer::current() const { return c10::impl::VirtualGuardImpl(device().type()).getStream(device()); }

CUstream_st* TorchLayer::native_stream() { return static_cast<CUstream_st*>(current().native_handle()); }

std::optional<c10::Stream> TorchLayer::stream(Lane lane) {
  if (lane == Lane::host || (lane == Lane::compute && lane_ == Lane::compute)) return std::nullopt;
  if (lane == Lane::compute) return home_;
  return streams_[static_cast<size_t>(lane) - 1];
}

namespace {

// For torch versions whose streams report a capture, which excludes 2.11.
template <class Stream>
bool tells_of_capture(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) {
    try {
      return stream.is_capturing();
    } catch (const c10::Error&) {  // the legacy stream was queried during a capture on another stream
    }
  }
  return false;
}

}  // namespace

Lane TorchLayer::enter(Lane lane) {
  if (lane_ == Lane::compute && lane != Lane::compute) home_ = current();
  return std::exchange(lane_, lane);
}

bool TorchLayer::is_capturing(const c10::Stream& stream) const {
  if (kernels_ == nullptr) return tells_of_capture(stream);
  return kernels_->is_capturing(static_cast<CUstream_st*>(stream.native_handle()));
}

uint64_t TorchLayer::capture() {
  if (lane_ == Lane::compute) {
    const bool now = is_capturing(current());
    if (now && !in_capture_) ++num_captures_;
    in_capture_ = now;
  }
  return in_capture_ ? num_captures_ : 0;
}

void TorchLayer::record(DeviceEvent& event, Lane lane) {
  auto& torch_event = static_cast<TorchEvent&>(event);
  const c10::Stream on = stream(lane).value_or(current());
  torch_event.event.record(on);
  const uint64_t running = capture();
  // A lane that has not followed the compute lane into its capture is not part of it.
  torch_event.capture = running != 0 && is_capturing(on) ? running : 0;
}

void TorchLayer::wait(Lane lane, DeviceEvent& event) {
  auto& torch_event = static_cast<TorchEvent&>(event);
  if (torch_event.capture == capture()) torch_event.event.block(stream(lane).value_or(current()));
}

void TorchLayer::synchronize(DeviceEvent& event) {
  const ReleaseGil released;
  static_cast<TorchEvent&>(event).event.synchronize();
}

}  // namespace fsdp2x
