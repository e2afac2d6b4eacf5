// The executor of the reference kernels: host memory, no streams.
#include <cstdlib>

#include "device/reference_kernels.hpp"
#include "executor.hpp"

namespace fsdp2x::cuda {

namespace {

class HostExecutor final : public Executor {
 public:
  const Kernels& kernels() const override { return reference_kernels(); }
  void* allocate(size_t bytes) override { return std::aligned_alloc(256, (bytes + 255) / 256 * 256); }
  void release(void* memory) override { std::free(memory); }
  void upload(void* memory, const void* host, size_t bytes) override {
    if (bytes > 0) std::memcpy(memory, host, bytes);
  }
  void download(void* host, const void* memory, size_t bytes) override {
    if (bytes > 0) std::memcpy(host, memory, bytes);
  }
  Stream new_stream() override { return nullptr; }
};

}  // namespace

Executor& executor() {
  static HostExecutor instance;
  return instance;
}

}  // namespace fsdp2x::cuda
