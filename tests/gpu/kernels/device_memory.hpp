// The few calls of the CUDA runtime that tests and benchmarks of the kernels make, behind plain C++: only
// device_memory.cu needs nvcc. Throws fsdp2x::Error when a call fails.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda::device_memory {

// Why no kernel can run here; empty when one can.
std::string unavailable();
std::string device_name();

void* allocate(size_t bytes);
void release(void* memory);
// Returns when the bytes have arrived.
void upload(void* memory, const void* host, size_t bytes);
// To zeros; returns when they are there.
void clear(void* memory, size_t bytes);
// Waits for every stream first.
void download(void* host, const void* memory, size_t bytes);
void copy(void* dst, const void* src, size_t bytes, Stream stream);

// Waits for no other stream, the default one included; lives as long as the process.
Stream new_stream();

// Milliseconds of one call of `work`, the median over `num_rounds` of the mean over `num_calls`, after one round that
// does not count.
double milliseconds(const std::function<void(Stream)>& work, int num_rounds, int num_calls);

}  // namespace fsdp2x::cuda::device_memory
