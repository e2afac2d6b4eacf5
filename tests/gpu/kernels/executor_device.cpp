// The executor of the kernels on a device; without one every test is skipped and says why.
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
};

class NeedsDevice final : public testing::Environment {
 public:
  void SetUp() override {
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
