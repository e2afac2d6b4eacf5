// Replaces the CUDA runtime on the host: memory is malloc's, and a launch runs translated PTX before it returns.
// Unchanged programs of tests/gpu/kernels link to it, with nvcc's host code of their launches.
//
// The environment selects what runs. FSDP2X_PTX_KERNELS is the library of translated kernels. FSDP2X_PTX_ORDER is the
// order of blocks and threads (forward, reverse, random). FSDP2X_PTX_REACHED is a file for the reached instructions of
// each kernel. Without kernels there is no device.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <regex>
#include <stdexcept>
#include <string>

#include "grid.hpp"

namespace {

using fsdp2x::ptx::Kernel;
using fsdp2x::ptx::Order;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Names of functions by their address in nvcc's host code, registered before main.
std::map<const void*, std::string>& registered() {
  static std::map<const void*, std::string> names;
  return names;
}

// The translated kernels by name.
class Kernels {
 public:
  Kernels() {
    const std::string path = variable("FSDP2X_PTX_KERNELS");
    if (path.empty()) return;
    void* const library = ::dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) throw std::runtime_error(::dlerror());
    using List = const Kernel* const* (*)(size_t*);
    size_t num = 0;
    const Kernel* const* all = reinterpret_cast<List>(::dlsym(library, "fsdp2x_ptx_kernels"))(&num);
    for (size_t i = 0; i < num; ++i) by_name_[all[i]->name] = all[i];
    const std::map<std::string, Order> orders = {
        {"", Order::forward}, {"forward", Order::forward}, {"reverse", Order::reverse}, {"random", Order::random}};
    order_ = orders.at(variable("FSDP2X_PTX_ORDER"));
  }
  ~Kernels() {
    const std::string path = variable("FSDP2X_PTX_REACHED");
    if (path.empty()) return;
    std::ofstream file(path);
    for (const auto& [name, kernel] : by_name_) {
      file << name << ' ';
      for (const uint8_t mark : kernel->reached) file << (mark != 0 ? '1' : '0');
      file << '\n';
    }
  }
  bool exist() const { return !by_name_.empty(); }
  Order order() const { return order_; }
  // The name of an anonymous namespace contains its source's path and compilation.
  const Kernel* find(const std::string& name) const {
    static const std::regex anonymous("[0-9]+_GLOBAL__N__[0-9a-f]{8}_[0-9]+_\\w+?_cu_[0-9a-f]{8}");
    const auto found = by_name_.find(std::regex_replace(name, anonymous, ""));
    return found == by_name_.end() ? nullptr : found->second;
  }

 private:
  std::map<std::string, const Kernel*> by_name_;
  Order order_ = Order::forward;
};

Kernels& kernels() {
  static Kernels instance;
  return instance;
}

thread_local cudaError_t g_last_error = cudaSuccess;
thread_local dim3 g_grid, g_block;

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes) {
  const Kernel* const kernel = kernels().find(registered().at(function));
  if (kernel == nullptr) return g_last_error = cudaErrorInvalidDeviceFunction;
  const bool is_flat = grid.y == 1 && grid.z == 1 && block.y == 1 && block.z == 1;
  if (!is_flat || shared_bytes != 0 || grid.x == 0 || block.x == 0) {
    return g_last_error = cudaErrorInvalidConfiguration;
  }
  fsdp2x::ptx::run_grid(*kernel, arguments, grid.x, block.x, kernels().order());
  return cudaSuccess;
}

}  // namespace

extern "C" {

// --- what nvcc's host code calls ---

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  registered()[function] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t, cudaStream_t) {
  g_grid = grid;
  g_block = block;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = g_grid;
  *block = g_block;
  *shared_bytes = 0;
  *static_cast<cudaStream_t*>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                               cudaStream_t) {
  return launch(kernel, grid, block, arguments, shared_bytes);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                             cudaStream_t) {
  return launch(function, grid, block, arguments, shared_bytes);
}

// --- what the launches and the tests call ---

cudaError_t cudaGetLastError() { return std::exchange(g_last_error, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoDevice ? "FSDP2X_PTX_KERNELS names no library" : "refused by the host's runtime";
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = kernels().exist() ? 1 : 0;
  return kernels().exist() ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return ::posix_memalign(memory, 256, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
  std::memcpy(dst, src, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}

// --- what benchmarks call ---

cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return cudaErrorNotSupported; }
cudaError_t cudaMemset(void*, int, size_t) { return cudaErrorNotSupported; }
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaErrorNotSupported; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaErrorNotSupported; }
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) { return cudaErrorNotSupported; }

}  // extern "C"
