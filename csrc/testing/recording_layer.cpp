// A device layer for tests.
#include "testing/recording_layer.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "testing/reference_kernels.hpp"

namespace fsdp2x {

namespace {

struct NamedEvent final : DeviceEvent {
  explicit NamedEvent(std::string event_name) : name(std::move(event_name)) {}
  std::string name;
  uint64_t capture = 0;  // the capture that recorded it last
};

// Streams by number: those of lanes, then the user's second one and the others.
constexpr int kFirstUserStream = static_cast<int>(kNumLanes);

size_t bytes_of(DType type, int64_t numel) { return static_cast<size_t>(numel) * dtype_bytes(type); }

// Returns the bytes that a plan touches on one side, piece by piece.
std::vector<MemoryRange> touched(const std::vector<Copy>& copies, const void* base, bool destination) {
  std::vector<MemoryRange> ranges;
  for (const Copy& copy : copies) {
    const DType type = destination ? copy.dst : copy.src;
    const size_t offset = destination ? copy.dst_offset : copy.src_offset;
    const int64_t stride = destination ? copy.dst_stride : copy.src_stride;
    for (int64_t piece = 0; piece < copy.count; ++piece) {
      ranges.push_back({static_cast<const std::byte*>(base) + offset + bytes_of(type, piece * stride),
                        bytes_of(type, copy.piece_numel)});
    }
  }
  return ranges;
}

std::vector<MemoryRange> touched_values(const WireProgram& program, const void* base) {
  std::vector<MemoryRange> ranges;
  for (const cuda::WireSegment& segment : program.segments) {
    for (int64_t piece = 0; piece < segment.numel / segment.piece_numel; ++piece) {
      const auto offset = static_cast<size_t>(segment.values_offset) + bytes_of(segment.type, piece * segment.stride);
      ranges.push_back({static_cast<const std::byte*>(base) + offset, bytes_of(segment.type, segment.piece_numel)});
    }
  }
  return ranges;
}

std::vector<MemoryRange> touched_codes(const WireProgram& program, const void* base, size_t segment_bytes = 0,
                                       int num_ranks = 1) {
  std::vector<MemoryRange> ranges;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto* const segments = static_cast<const std::byte*>(base) + static_cast<size_t>(rank) * segment_bytes;
    for (const cuda::WireSegment& segment : program.segments) {
      const DType type = segment.format == WireFormat::plain  ? DType::f32
                         : segment.format == WireFormat::bf16 ? DType::bf16
                                                              : DType::byte;
      ranges.push_back({segments + segment.codes_offset, bytes_of(type, segment.numel)});
      if (has_scales(segment.format)) {
        ranges.push_back({segments + segment.scales_offset, bytes_of(DType::f32, num_wire_blocks(segment.numel))});
      }
    }
  }
  return ranges;
}

MemoryRange range_of(const at::Tensor& memory) { return {memory.const_data_ptr(), memory.nbytes()}; }

std::vector<MemoryRange> ranges_of(at::TensorList tensors) {
  std::vector<MemoryRange> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) ranges.push_back(range_of(tensor));
  }
  return ranges;
}

std::vector<MemoryRange> ranges_of(PyObject* list) {
  std::vector<MemoryRange> ranges;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    ranges.push_back(range_of(THPVariable_Unpack(PyList_GET_ITEM(list, i))));
  }
  return ranges;
}

}  // namespace

RecordingLayer::RecordingLayer(bool with_kernels)
    : DeviceLayer(at::kCPU, with_kernels ? &cuda::reference_kernels() : nullptr) {}

std::unique_ptr<DeviceEvent> RecordingLayer::make_event(const std::string& name) {
  // Each transport has a separate event of a name.
  const int number = ++names_[name];
  return std::make_unique<NamedEvent>(number == 1 ? name : name + " (" + std::to_string(number) + ")");
}

// --- streams ---

int RecordingLayer::stream_of(Lane lane) const {
  if (lane != Lane::compute) return static_cast<int>(lane);
  return lane_ == Lane::compute ? current_ : home_;
}

std::string RecordingLayer::name_of(int stream) {
  if (stream < kFirstUserStream) return lane_name(static_cast<Lane>(stream));
  return "compute" + std::to_string(stream - kFirstUserStream + 1);
}

std::optional<c10::Stream> RecordingLayer::current_stream() {
  return c10::Stream(c10::Stream::UNSAFE, device(), current_);
}

Lane RecordingLayer::enter(Lane lane) {
  before_.push_back(current_);
  if (lane_ == Lane::compute && lane != Lane::compute) home_ = current_;
  if (lane != Lane::host) current_ = stream_of(lane);
  return std::exchange(lane_, lane);
}

void RecordingLayer::leave(Lane before) {
  lane_ = before;
  current_ = before_.back();
  before_.pop_back();
}

int RecordingLayer::enter_stream(c10::Stream stream) {
  before_.push_back(current_);
  current_ = static_cast<int>(stream.id());
  return static_cast<int>(std::exchange(lane_, Lane::compute));
}

void RecordingLayer::leave_stream(int before) { leave(static_cast<Lane>(before)); }

void RecordingLayer::use_stream(int number) { current_ = number == 0 ? 0 : kFirstUserStream + number - 1; }

void RecordingLayer::wait_stream(int number) {
  const int other = number == 0 ? 0 : kFirstUserStream + number - 1;
  entries_.push_back({"record", name_of(other), "user", {}, {}});
  entries_.push_back({"wait", name_of(current_), "user", {}, {}});
}

void RecordingLayer::begin_capture() {
  ++num_captures_;
  in_capture_ = true;
  captured_ = {current_};
  entries_.push_back({"begin_capture", name_of(current_), "", {}, {}});
}

void RecordingLayer::end_capture() {
  in_capture_ = false;
  entries_.push_back({"end_capture", name_of(current_), "", {}, {}});
}

void RecordingLayer::record(DeviceEvent& event, Lane lane) {
  auto& named = static_cast<NamedEvent&>(event);
  const int on = stream_of(lane);
  named.capture = in_capture_ && captured_.contains(on) ? num_captures_ : 0;
  entries_.push_back({"record", name_of(on), named.name, {}, {}});
}

void RecordingLayer::wait(Lane lane, DeviceEvent& event) {
  auto& named = static_cast<NamedEvent&>(event);
  const int on = stream_of(lane);
  // As in TorchLayer, a wait across the border of a capture does nothing.
  const bool waits = named.capture == (in_capture_ ? num_captures_ : 0);
  if (waits && in_capture_) captured_.insert(on);
  entries_.push_back({waits ? "wait" : "skip", name_of(on), named.name, {}, {}});
}

void RecordingLayer::synchronize(DeviceEvent& event) {
  entries_.push_back({"wait", lane_name(Lane::host), static_cast<NamedEvent&>(event).name, {}, {}});
}

void RecordingLayer::hold(const at::Tensor& memory) { note("hold", "plan", {range_of(memory)}, {}); }

void RecordingLayer::note(const std::string& operation, const std::string& subject,
                          const std::vector<MemoryRange>& reads, const std::vector<MemoryRange>& writes) {
  const std::string lane = lane_ == Lane::host ? lane_name(Lane::host) : name_of(current_);
  entries_.push_back({operation, lane, subject, reads, writes});
}

void RecordingLayer::touches(const char* operation, const std::string& subject, at::TensorList reads,
                             at::TensorList writes) {
  note(operation, subject, ranges_of(reads), ranges_of(writes));
}

void RecordingLayer::gathers(const std::string& subject, PyObject* outputs, PyObject* inputs) {
  note("all_gather", subject, ranges_of(inputs), ranges_of(outputs));
}

void RecordingLayer::lands(const std::string& subject, const Layout& layout, const at::Tensor& memory,
                           const GradientTargets& targets) {
  std::vector<MemoryRange> written;
  bool in_place = false, is_new = false;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = layout.params()[i];
    is_new = is_new || targets[i]->is_new;
    if (place.shard_numel == 0) continue;
    const bool lies_there = static_cast<const std::byte*>(memory.const_data_ptr()) + place.reduce_segment_offset ==
                            static_cast<const std::byte*>(targets[i]->data);
    in_place = in_place || lies_there;
    if (!lies_there) written.push_back({targets[i]->data, bytes_of(place.shape.orig, place.shard_numel)});
  }
  // The device is the CPU, so new CPU memory may just have been a device gradient.
  if (is_new) written.clear();
  note(in_place ? "land in place" : "land by copy", subject, {range_of(memory)}, written);
}

void RecordingLayer::lets_users_write(const std::function<std::vector<at::Tensor>(bool on_host)>& memory_of) {
  for (const bool on_host : {false, true}) {
    const std::vector<MemoryRange> pools = ranges_of(memory_of(on_host));
    if (on_host && pools.empty()) return;
    const LaneScope scope(*this, on_host ? Lane::host : Lane::compute);
    note("optimizer", "", pools, pools);
  }
}

// --- work ---

void RecordingLayer::copy(const CopyProgram& program, const void* src, void* dst) {
  note("copy", "", touched(program.copies, src, false), touched(program.copies, dst, true));
  DeviceLayer::copy(program, src, dst);
}

void RecordingLayer::pack(SegmentPlan& plan, const std::vector<PackItem>& items, const std::vector<uint8_t>& flags,
                          const at::Tensor& buffer) {
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  for (const PackItem& item : items) {
    const ParamPlace& place = plan.layout->params()[item.param];
    if (item.source != nullptr) reads.push_back({item.source, item.source_bytes});
    for (int rank = 0; rank < plan.layout->world(); ++rank) {
      const size_t at = static_cast<size_t>(rank) * plan.segment_bytes + place.reduce_segment_offset;
      writes.push_back({static_cast<const std::byte*>(buffer.const_data_ptr()) + at,
                        bytes_of(place.shape.reduce, place.padded_shard_numel)});
    }
  }
  // Gradients belong to autograd, in the order of this stream. The previous users of their memory were checked when
  // they gave it back. A device would not have given it to another stream.
  note("take", "gradients", {}, reads);
  const size_t flags_at = plan.layout->reduce_segment_bytes();
  for (int rank = 0; rank < plan.layout->world(); ++rank) {
    const size_t at = static_cast<size_t>(rank) * plan.segment_bytes + flags_at;
    writes.push_back({static_cast<const std::byte*>(buffer.const_data_ptr()) + at, plan.segment_bytes - flags_at});
  }
  note("pack", "", reads, writes);
  DeviceLayer::pack(plan, items, flags, buffer);
}

void RecordingLayer::write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const at::Tensor& segment,
                                double divisor) {
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  for (const RowItem& item : items) {
    const ParamPlace& place = plan.layout->params()[item.param];
    reads.push_back({static_cast<const std::byte*>(segment.const_data_ptr()) + place.reduce_segment_offset,
                     bytes_of(place.shape.reduce, place.shard_numel)});
    writes.push_back({item.target, bytes_of(place.shape.orig, place.shard_numel)});
    if (item.accumulate) reads.push_back(writes.back());
  }
  note("write_rows", "", reads, writes);
  DeviceLayer::write_rows(plan, items, segment, divisor);
}

void RecordingLayer::encode(const WireProgram& program, const void* values, void* segments, void* errors,
                            const std::vector<uint8_t>& filled) {
  std::vector<MemoryRange> reads = touched_values(program, values);
  std::vector<MemoryRange> writes = touched_codes(program, segments);
  if (errors != nullptr) {
    for (const MemoryRange& range : touched_codes(program, errors)) {
      reads.push_back(range);
      writes.push_back(range);
    }
  }
  note("encode", "", reads, writes);
  DeviceLayer::encode(program, values, segments, errors, filled);
}

void RecordingLayer::decode(const WireProgram& program, const void* segments, void* values) {
  note("decode", "", touched_codes(program, segments), touched_values(program, values));
  DeviceLayer::decode(program, segments, values);
}

void RecordingLayer::sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                               double divisor, void* values) {
  note("sum_codes", "", touched_codes(program, segments, segment_bytes, num_ranks), touched_values(program, values));
  DeviceLayer::sum_codes(program, segments, segment_bytes, num_ranks, divisor, values);
}

void RecordingLayer::divide(const at::Tensor& memory, double divisor) {
  note("divide", "", {range_of(memory)}, {range_of(memory)});
  DeviceLayer::divide(memory, divisor);
}

void RecordingLayer::add(const at::Tensor& target, const at::Tensor& source) {
  note("add", "", {range_of(source), range_of(target)}, {range_of(target)});
  DeviceLayer::add(target, source);
}

void RecordingLayer::assign(const at::Tensor& target, const at::Tensor& source) {
  note("assign", "", {range_of(source)}, {range_of(target)});
  DeviceLayer::assign(target, source);
}

void RecordingLayer::transfer(const at::Tensor& target, const at::Tensor& source) {
  note("transfer", "", {range_of(source)}, {range_of(target)});
  DeviceLayer::transfer(target, source);
}

}  // namespace fsdp2x
