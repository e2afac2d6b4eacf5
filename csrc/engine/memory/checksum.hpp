// A number for the bits of a tensor: what replicas compare.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace fsdp2x {

// Of a dense tensor on the CPU, in one pass on torch's threads, with one result whatever their number. Tensors that
// differ in one word of 8 bytes never have the same. Does not need the GIL.
uint64_t checksum(const at::Tensor& tensor);

}  // namespace fsdp2x
