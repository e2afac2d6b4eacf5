// A device layer for tests.
#include "device/recording_layer.hpp"

#include <algorithm>
#include <utility>

#include "device/reference_kernels.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x {

struct NamedEvent final : DeviceEvent {
  explicit NamedEvent(std::string event_name) : name(std::move(event_name)) {}
  std::string name;
  uint64_t capture = 0;                         // the capture that recorded it last
  std::vector<MemoryRange> delivered;           // by the transfer that it followed
  std::shared_ptr<RecordingLayer::Place> last;  // where it was recorded last, if work may be late
};

namespace {

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

// Where it lies now, for work that runs later: views of buffers move to other memory.
at::Tensor as_now(const at::Tensor& memory) {
  return at::from_blob(memory.data_ptr(), memory.sizes(), memory.strides(), memory.options());
}

bool overlap(const MemoryRange& one, const MemoryRange& other) {
  const auto* const begin = static_cast<const std::byte*>(one.data);
  const auto* const other_begin = static_cast<const std::byte*>(other.data);
  return begin < other_begin + other.bytes && other_begin < begin + one.bytes;
}

bool overlap(const std::vector<MemoryRange>& some, const MemoryRange& other) {
  return std::any_of(some.begin(), some.end(), [&](const MemoryRange& one) { return overlap(one, other); });
}

// The engine's open profiler ranges, which name the unit that it works on.
thread_local std::vector<std::string> open_ranges;

std::unique_ptr<at::ObserverContext> begin_range(const at::RecordFunction& range) {
  open_ranges.emplace_back(range.name());
  return nullptr;
}

void end_range(const at::RecordFunction&, at::ObserverContext*) {
  if (!open_ranges.empty()) open_ranges.pop_back();  // empty: it began before the recorder was made
}

std::string current_unit() {
  for (auto range = open_ranges.rbegin(); range != open_ranges.rend(); ++range) {
    if (!range->starts_with("FSDP::")) continue;
    const size_t begin = range->find(" (");
    return begin == std::string::npos ? "<root>" : range->substr(begin + 2, range->size() - begin - 3);
  }
  return "";
}

// The reference kernels. Each launch also notes that it reads its plan.
RecordingLayer* launching = nullptr;

template <auto kKernel>
struct Recorded;
template <class List, class... Rest, void (*cuda::Kernels::*kKernel)(const List&, Rest...)>
struct Recorded<kKernel> {
  static void run(const List& list, Rest... rest) {
    launching->note_plan(list.segments);
    (cuda::reference_kernels().*kKernel)(list, rest...);
  }
};

const cuda::Kernels& recorded_kernels() {
  static const cuda::Kernels kernels = [] {
    cuda::Kernels table = cuda::reference_kernels();
    table.copy = Recorded<&cuda::Kernels::copy>::run;
    table.pack_gradients = Recorded<&cuda::Kernels::pack_gradients>::run;
    table.reduce = Recorded<&cuda::Kernels::reduce>::run;
    table.encode_wire = Recorded<&cuda::Kernels::encode_wire>::run;
    table.decode_wire = Recorded<&cuda::Kernels::decode_wire>::run;
    table.sum_wire = Recorded<&cuda::Kernels::sum_wire>::run;
    return table;
  }();
  return kernels;
}

bool is_slot(const std::string& event) { return event.starts_with("slot"); }

// Returns the key of a slot, which its two events share.
std::string slot_of(const std::string& event) {
  const size_t end = event.find(' ');
  return event.substr(0, event.find('.')) + (end == std::string::npos ? "" : event.substr(end));
}

}  // namespace

RecordingLayer::RecordingLayer(bool with_kernels)
    : DeviceLayer(at::kCPU, with_kernels ? &recorded_kernels() : nullptr),
      range_observer_(at::addGlobalCallback(
          at::RecordFunctionCallback(begin_range, end_range).scopes({at::RecordScope::USER_SCOPE}))) {}

RecordingLayer::~RecordingLayer() { at::removeCallback(range_observer_); }

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
  if (is_slot(named.name)) {
    if (named.name.find(".ready") != std::string::npos) slots_[slot_of(named.name)] = written_on(name_of(on));
    if (lane == Lane::compute && named.name.find(".free") != std::string::npos) note_use(named.name);
  }
  const bool follows_transfer =
      !entries_.empty() && entries_.back().operation == "transfer" && entries_.back().lane == name_of(on);
  named.delivered = follows_transfer ? entries_.back().writes : std::vector<MemoryRange>();
  entries_.push_back({"record", name_of(on), named.name, {}, {}});
  if (!delays_) return;
  named.last = std::make_shared<Place>(Place{on, !is_late(on)});
  if (is_late(on)) late_[on].push_back({{}, {}, named.last});
  stir();
}

void RecordingLayer::wait(Lane lane, DeviceEvent& event) {
  auto& named = static_cast<NamedEvent&>(event);
  const int on = stream_of(lane);
  // As in TorchLayer, a wait across the border of a capture does nothing.
  const bool waits = named.capture == (in_capture_ ? num_captures_ : 0);
  if (waits && in_capture_) captured_.insert(on);
  entries_.push_back({waits ? "wait" : "skip", name_of(on), named.name, {}, {}});
  if (lane == Lane::compute && is_slot(named.name) && named.name.find(".ready") != std::string::npos) {
    note_use(named.name);
  }
  const bool forgets = !forgetful_lane_.empty() && name_of(on) == forgetful_lane_ &&
                       named.name.find(forgotten_event_) != std::string::npos;
  if (named.last && !forgets) {
    if (is_late(on)) {
      late_[on].push_back({{}, named.last, {}});
    } else {
      run_until(*named.last);
    }
  }
  stir();
}

// --- work that is late ---

bool RecordingLayer::is_late(int stream) const {
  return delays_ && stream != static_cast<int>(Lane::compute) && stream < static_cast<int>(Lane::host);
}

void RecordingLayer::delay(uint64_t seed, std::string lane, std::string event) {
  finish();
  delays_.emplace(seed);
  forgetful_lane_ = std::move(lane);
  forgotten_event_ = std::move(event);
}

void RecordingLayer::defer(std::function<void()> work) {
  const int on = stream_of(lane_);
  if (lane_ == Lane::host || !is_late(on)) return work();
  late_[on].push_back({std::move(work), {}, {}});
}

void RecordingLayer::run_one(int stream) {
  const Late next = std::move(late_[stream].front());
  late_[stream].pop_front();
  if (next.waits_for) run_until(*next.waits_for);
  if (next.work) next.work();
  if (next.reaches) next.reaches->is_reached = true;
}

void RecordingLayer::run_until(Place& place) {
  while (!place.is_reached) run_one(place.stream);
}

void RecordingLayer::finish() {
  for (auto& [stream, queue] : late_) {
    while (!queue.empty()) run_one(stream);
  }
  kept_.clear();
}

void RecordingLayer::stir() {
  if (!delays_) return;
  while ((*delays_)() % 3 == 0) {
    const auto stream = static_cast<int>((*delays_)() % kNumLanes);
    if (!late_[stream].empty()) run_one(stream);
  }
}

void RecordingLayer::synchronize(DeviceEvent& event) {
  const auto& named = static_cast<const NamedEvent&>(event);
  if (named.last) run_until(*named.last);
  entries_.push_back({"wait", lane_name(Lane::host), named.name, {}, {}});
  if (!named.delivered.empty()) entries_.push_back({"read", lane_name(Lane::host), named.name, named.delivered, {}});
}

std::vector<MemoryRange> RecordingLayer::written_on(const std::string& lane) const {
  auto begin = entries_.rbegin();
  const auto is_wait = [&](const Entry& entry) {
    return entry.lane == lane && (entry.operation == "wait" || entry.operation == "skip");
  };
  while (begin != entries_.rend() && !is_wait(*begin)) ++begin;
  std::vector<MemoryRange> written;
  for (auto entry = begin.base(); entry != entries_.end(); ++entry) {
    if (entry->lane != lane) continue;
    std::erase_if(written, [&](const MemoryRange& range) { return overlap(entry->reads, range); });
    written.insert(written.end(), entry->writes.begin(), entry->writes.end());
  }
  return written;
}

void RecordingLayer::note_use(const std::string& event) {
  entries_.push_back({"use", name_of(stream_of(Lane::compute)), current_unit(), slots_[slot_of(event)], {}});
}

// --- memory ---

std::string RecordingLayer::current_name() const {
  return lane_ == Lane::host ? lane_name(Lane::host) : name_of(current_);
}

at::Tensor RecordingLayer::allocate(size_t bytes) {
  at::Tensor memory = DeviceLayer::allocate(bytes);
  note("take", "", {}, {range_of(memory)});
  return memory;
}

void RecordingLayer::free(at::Tensor memory) {
  // Late work that nothing waits for would write to memory of others.
  if (!forgetful_lane_.empty()) kept_.push_back(memory);
  entries_.push_back({"give_back", name_of(stream_of(Lane::compute)), "", {}, {range_of(memory)}});
  std::erase_if(slots_, [&](const auto& slot) { return overlap(slot.second, range_of(memory)); });
}

void RecordingLayer::hold(const at::Tensor& memory) { note("hold", "plan", {range_of(memory)}, {}); }

at::Tensor RecordingLayer::host_memory(at::ScalarType type, size_t numel) {
  at::Tensor memory = DeviceLayer::host_memory(type, numel);
  entries_.push_back({"take", lane_name(Lane::host), "flags", {}, {range_of(memory)}});
  return memory;
}

// --- notes ---

void RecordingLayer::note(const std::string& operation, const std::string& subject,
                          const std::vector<MemoryRange>& reads, const std::vector<MemoryRange>& writes) {
  launching = this;
  entries_.push_back({operation, current_name(), subject, reads, writes});
}

void RecordingLayer::note_work(const std::string& operation, at::TensorList reads, at::TensorList writes,
                               bool on_host) {
  const std::string lane = on_host ? lane_name(Lane::host) : current_name();
  entries_.push_back({operation, lane, current_unit(), ranges_of(reads), ranges_of(writes)});
}

void RecordingLayer::note_plan(const void* segments) { note("read plan", "", {{segments, 1}}, {}); }

// --- work ---

void RecordingLayer::copy(const CopyProgram& program, const void* src, void* dst) {
  note("copy", "", touched(program.copies, src, false), touched(program.copies, dst, true));
  defer([this, &program, src, dst] { DeviceLayer::copy(program, src, dst); });
}

void RecordingLayer::launch_pack(SegmentPlan& plan, const Piece& piece, const std::vector<PackItem>& items,
                                 const std::vector<uint8_t>& flags, const at::Tensor& buffer) {
  std::vector<MemoryRange> reads;
  std::vector<MemoryRange> writes;
  const auto write = [&](int rank, size_t begin, size_t end) {
    begin = std::max(begin, piece.begin);
    end = std::min(end, piece.end);
    const size_t at = static_cast<size_t>(rank) * piece.size() + begin - piece.begin;
    if (begin < end) writes.push_back({static_cast<const std::byte*>(buffer.const_data_ptr()) + at, end - begin});
  };
  for (const PackItem& item : items) {
    const ParamPlace& place = plan.layout->params()[item.param];
    if (item.source != nullptr) reads.push_back({item.source, item.source_bytes});
    for (int rank = 0; rank < plan.layout->world(); ++rank) {
      const size_t at = place.reduce_segment_offset;
      write(rank, at, at + bytes_of(place.shape.reduce, place.padded_shard_numel));
    }
  }
  // Gradients belong to autograd, in the order of this stream. The previous users of their memory were checked when
  // they gave it back. A device would not have given it to another stream.
  note("take", "gradients", {}, reads);
  const size_t flags_at = plan.layout->reduce_segment_bytes();
  for (int rank = 0; rank < plan.layout->world(); ++rank) write(rank, flags_at, plan.segment_bytes);
  note("pack", "", reads, writes);
  defer([=, this, &plan, now = as_now(buffer)] { DeviceLayer::launch_pack(plan, piece, items, flags, now); });
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
  defer([=, this, &plan, now = as_now(segment)] { DeviceLayer::write_rows(plan, items, now, divisor); });
}

void RecordingLayer::write_host_rows(const Layout& layout, const at::Tensor& rows, const GradientTargets& targets,
                                     double divisor) {
  std::vector<MemoryRange> written;
  bool in_place = false, is_new = false;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    const ParamPlace& place = layout.params()[i];
    is_new = is_new || targets[i]->is_new;
    if (place.shard_numel == 0) continue;
    const bool lies_there = static_cast<const std::byte*>(rows.const_data_ptr()) + place.reduce_segment_offset ==
                            static_cast<const std::byte*>(targets[i]->data);
    in_place = in_place || lies_there;
    if (!lies_there) written.push_back({targets[i]->data, bytes_of(place.shape.orig, place.shard_numel)});
  }
  // The device is the CPU, so new CPU memory may just have been a device gradient.
  if (is_new) written.clear();
  entries_.push_back(
      {in_place ? "land in place" : "land by copy", lane_name(Lane::host), current_unit(), {range_of(rows)}, written});
  DeviceLayer::write_host_rows(layout, rows, targets, divisor);
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
  defer([=, this, &program] { DeviceLayer::encode(program, values, segments, errors, filled); });
}

void RecordingLayer::decode(const WireProgram& program, const void* segments, void* values) {
  note("decode", "", touched_codes(program, segments), touched_values(program, values));
  defer([=, this, &program] { DeviceLayer::decode(program, segments, values); });
}

void RecordingLayer::sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                               double divisor, void* values) {
  note("sum_codes", "", touched_codes(program, segments, segment_bytes, num_ranks), touched_values(program, values));
  defer([=, this, &program] { DeviceLayer::sum_codes(program, segments, segment_bytes, num_ranks, divisor, values); });
}

void RecordingLayer::zero(const at::Tensor& memory) {
  note("zero", "", {}, {range_of(memory)});
  defer([this, now = as_now(memory)] { DeviceLayer::zero(now); });
}

void RecordingLayer::divide(const at::Tensor& memory, double divisor) {
  note("divide", "", {range_of(memory)}, {range_of(memory)});
  defer([=, this, now = as_now(memory)] { DeviceLayer::divide(now, divisor); });
}

void RecordingLayer::add(const at::Tensor& target, const at::Tensor& source) {
  note("add", "", {range_of(source), range_of(target)}, {range_of(target)});
  defer([this, to = as_now(target), from = as_now(source)] { DeviceLayer::add(to, from); });
}

void RecordingLayer::assign(const at::Tensor& target, const at::Tensor& source) {
  note("assign", "", {range_of(source)}, {range_of(target)});
  defer([this, to = as_now(target), from = as_now(source)] { DeviceLayer::assign(to, from); });
}

void RecordingLayer::transfer(const at::Tensor& target, const at::Tensor& source) {
  note("transfer", "", {range_of(source)}, {range_of(target)});
  if (!forgetful_lane_.empty()) kept_.insert(kept_.end(), {target, source});
  defer([this, to = as_now(target), from = as_now(source)] { DeviceLayer::transfer(to, from); });
}

}  // namespace fsdp2x
