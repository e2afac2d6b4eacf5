// The CUDA runtime calls of tests and kernel benchmarks, as plain C++, so that only device_memory.cu needs nvcc. Throws
// fsdp2x::Error if a call fails.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda::device_memory {

// Returns why no kernel can run here. Empty: kernels can run.
std::string unavailable();
std::string device_name();

void* allocate(size_t bytes);
void release(void* memory);
// Returns after the bytes have arrived.
void upload(void* memory, const void* host, size_t bytes);
// Zeros the memory and waits for it.
void clear(void* memory, size_t bytes);
// Waits for every stream first.
void download(void* host, const void* memory, size_t bytes);
void copy(void* dst, const void* src, size_t bytes, Stream stream);

// Returns a stream that waits for no other stream, not even the default one. It lives as long as the process.
Stream new_stream();

// Returns milliseconds of one call of `work`: the median over `num_rounds` of the mean over `num_calls`, after one
// round that does not count.
double milliseconds(const std::function<void(Stream)>& work, int num_rounds, int num_calls);

}  // namespace fsdp2x::cuda::device_memory
