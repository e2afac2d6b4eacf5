// Calls of the CUDA runtime for tests and benchmarks.
#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "core/error.hpp"
#include "device_memory.hpp"

namespace fsdp2x::cuda::device_memory {

namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw Error(std::string(call) + " failed: " + cudaGetErrorString(status));
}

}  // namespace

std::string unavailable() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(status);
  return count == 0 ? "no CUDA device" : "";
}

std::string device_name() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  return properties.name;
}

void* allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, std::max<size_t>(bytes, 1)), "cudaMalloc");
  return memory;
}

void release(void* memory) { check(cudaFree(memory), "cudaFree"); }

void upload(void* memory, const void* host, size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpy(memory, host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  // From pageable memory it returns when the bytes are staged, and streams of `new_stream` would not wait for them.
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

void clear(void* memory, size_t bytes) {
  check(cudaMemset(memory, 0, bytes), "cudaMemset");
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

void download(void* host, const void* memory, size_t bytes) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (bytes > 0) check(cudaMemcpy(host, memory, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy to the host");
}

void copy(void* dst, const void* src, size_t bytes, Stream stream) {
  check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
}

Stream new_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

double milliseconds(const std::function<void(Stream)>& work, int num_rounds, int num_calls) {
  static const Stream stream = new_stream();
  cudaEvent_t begin_event, end_event;
  check(cudaEventCreate(&begin_event), "cudaEventCreate");
  check(cudaEventCreate(&end_event), "cudaEventCreate");
  std::vector<double> rounds;
  for (int round = 0; round <= num_rounds; ++round) {
    check(cudaEventRecord(begin_event, stream), "cudaEventRecord");
    for (int call = 0; call < num_calls; ++call) work(stream);
    check(cudaEventRecord(end_event, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end_event), "cudaEventSynchronize");
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin_event, end_event), "cudaEventElapsedTime");
    if (round > 0) rounds.push_back(static_cast<double>(ms) / num_calls);
  }
  check(cudaEventDestroy(begin_event), "cudaEventDestroy");
  check(cudaEventDestroy(end_event), "cudaEventDestroy");
  std::sort(rounds.begin(), rounds.end());
  return rounds[rounds.size() / 2];
}

}  // namespace fsdp2x::cuda::device_memory
