// The executor of the kernels on a device. Without a device, every test is skipped with the reason.
#include <cstdlib>

#include "device_memory.hpp"
#include "executor.hpp"

namespace fsdp2x::cuda {

namespace {

class DeviceExecutor final : public Executor {
 public:
  const Kernels& kernels() const override { return *device_kernels(); }
  void* allocate(size_t bytes) override { return device_memory::allocate(bytes); }
  void release(void* memory) override { device_memory::release(memory); }
  void upload(void* memory, const void* host, size_t bytes) override { device_memory::upload(memory, host, bytes); }
  void download(void* host, const void* memory, size_t bytes) override { device_memory::download(host, memory, bytes); }
  Stream new_stream() override { return device_memory::new_stream(); }
};

class NeedsDevice final : public testing::Environment {
 public:
  void SetUp() override {
    // Set before the first call of the runtime: streams that wait for each other must not share a queue of the device.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
    if (const std::string reason = device_memory::unavailable(); !reason.empty()) GTEST_SKIP() << reason;
  }
};

[[maybe_unused]] const testing::Environment* const needs_device =
    testing::AddGlobalTestEnvironment(new NeedsDevice());  // GoogleTest deletes it

}  // namespace

Executor& executor() {
  static DeviceExecutor instance;
  return instance;
}

}  // namespace fsdp2x::cuda
