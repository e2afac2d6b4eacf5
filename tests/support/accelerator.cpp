// An accelerator for torch whose memory is the host's: two devices, each with streams that run at once, and counts of
// what each of them was asked for. Torch's operations run on the CPU. Compiled and loaded by accelerator.py.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kNumDevices = 2;

struct Counts {
  std::atomic<long> allocations{0}, operations{0}, events{0};
  std::atomic<uint64_t> streams{0};  // those that operations ran on, a bit each, the last one for all from 63 on
};

std::array<Counts, kNumDevices> counts;
std::array<std::atomic<c10::StreamId>, kNumDevices> last_stream{};
std::atomic<long> num_faults{0};
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> current_streams{};

Counts& counts_of(c10::Device device) { return counts.at(static_cast<size_t>(device.index())); }

void count_operation(c10::Device device) {
  Counts& mine = counts_of(device);
  ++mine.operations;
  const c10::StreamId stream = current_streams.at(static_cast<size_t>(device.index()));
  mine.streams |= uint64_t{1} << std::min<c10::StreamId>(stream, 63);
}

// --- memory ---

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    const c10::Device device(kType, current_device);
    ++counts_of(device).allocations;
    // Nobody may rely on what new memory holds.
    void* const data = num_bytes == 0 ? nullptr : std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    if (data != nullptr) std::memset(data, 0xff, num_bytes);
    return {data, data, &std::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

Memory memory;

// The allocator takes memory of the current device.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : before_(current_device) {
    if (device.has_index()) current_device = device.index();
  }
  ~OnDevice() { current_device = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex before_;
};

// --- streams, events and the current device ---

c10::Stream stream_of(c10::DeviceIndex index, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, index}, id);
}

// Works on torch versions that know other functions of it: these are without `override`, or left to the base.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kNumDevices, "no device ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device;
    return stream_of(index, current_streams.at(static_cast<size_t>(index)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device.index(), 0); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const c10::DeviceIndex index = device.has_index() ? device.index() : current_device;
    return stream_of(index, ++last_stream.at(static_cast<size_t>(index)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*is_high_priority*/) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  // An event belongs to the device that it was first recorded on, as on CUDA.
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex index, c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new c10::DeviceIndex(stream.device_index());
    const bool matches = *static_cast<c10::DeviceIndex*>(*event) == stream.device_index();
    if (!matches || (index >= 0 && index != stream.device_index())) ++num_faults;
    TORCH_CHECK(matches, "an event of one device is recorded on a stream of another one");
    ++counts_of(stream.device()).events;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && *static_cast<c10::DeviceIndex*>(event) != stream.device_index()) ++num_faults;
  }
  bool queryEvent(void* /*event*/) const override { return true; }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<c10::DeviceIndex*>(event);
  }
  void synchronizeEvent(void* /*event*/) const override {}
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.device().index() != stream.device_index()) ++num_faults;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    const OnDevice scope(storage.device());
    c10::DataPtr data = memory.allocate(num_bytes);
    const size_t kept = std::min(num_bytes, storage.nbytes());
    if (kept > 0) std::memcpy(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(num_bytes);
  }
};

// --- torch's operations ---

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  count_operation(tensor.device());
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*pin*/,
                 std::optional<at::MemoryFormat> format) {
  const OnDevice scope(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> /*pin*/) {
  const OnDevice scope(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::kFloat));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool /*non_blocking*/) {
  on_host(to).copy_(on_host(self));
  return to;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> /*format*/) {
  if (self.sizes() == size) return self;  // and keeps its strides
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  resize(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Scalar item(const at::Tensor& self) { return on_host(self).item(); }

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (self.device() != stream.device()) ++num_faults;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  stride.empty() && !size.empty() ? impl->set_sizes_contiguous(size) : impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const c10::IValue& argument : *stack) {
    const auto count = [](const at::Tensor& tensor) {
      if (tensor.defined() && !tensor.is_cpu()) count_operation(tensor.device());
    };
    if (argument.isTensor()) count(argument.toTensor());
    if (argument.isTensorList()) {
      for (const at::Tensor& tensor : argument.toTensorVector()) count(tensor);
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

}  // namespace

// For ctypes.
extern "C" {
void start() {
  static Hooks hooks;
  c10::SetAllocator(kType, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int num_devices() { return kNumDevices; }
int get_device() { return current_device; }
void set_device(int index) { current_device = static_cast<c10::DeviceIndex>(index); }
long num_allocations(int device) { return counts[static_cast<size_t>(device)].allocations; }
long num_operations(int device) { return counts[static_cast<size_t>(device)].operations; }
long num_events(int device) { return counts[static_cast<size_t>(device)].events; }
uint64_t streams_used(int device) { return counts[static_cast<size_t>(device)].streams; }
long num_device_faults() { return num_faults; }
}
