// 8-bit moments (kernels/rules/moment_codes.hpp) as tensors: encodes and decodes them where states are loaded and
// saved.
#pragma once

#include <ATen/ATen.h>

#include <utility>

namespace fsdp2x {

// Returns the number of scales for `numel` codes.
int64_t num_moment_blocks(int64_t numel);

// Decodes codes and scales to float32, in the memory format of the codes. All tensors are on the CPU.
at::Tensor decode_moments(const at::Tensor& codes, const at::Tensor& scales, bool is_signed);

// Encodes dense float32 CPU values to the nearest codes and returns (codes, scales). Codes have the memory format of
// the values.
std::pair<at::Tensor, at::Tensor> encode_moments(const at::Tensor& values, bool is_signed);

}  // namespace fsdp2x
