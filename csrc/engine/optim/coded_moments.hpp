// Moments in 8 bits (kernels/rules/moment_codes.hpp) as tensors: into codes and out of them, where states are loaded
// and saved.
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace fsdp2x {

// Scales of the codes of so many elements.
int64_t num_moment_blocks(int64_t numel);

// What codes and scales say, in float32 and in the memory format of the codes. All lie on the CPU.
at::Tensor decode_moments(const at::Tensor& codes, const at::Tensor& scales, bool is_signed);

// (codes, scales) of dense values in float32 on the CPU, to the nearest code; codes have the memory format of values.
std::pair<at::Tensor, at::Tensor> encode_moments(const at::Tensor& values, bool is_signed);

}  // namespace fsdp2x
