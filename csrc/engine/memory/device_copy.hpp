// Runs copy plans on the device of the pools: the CPU kernels on a CPU, strided torch copies elsewhere.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "core/layout.hpp"

namespace fsdp2x {

at::ScalarType torch_dtype(DType dtype);

void run_copies_on(at::Device device, const std::vector<Copy>& copies, const void* src, void* dst);

// dst (+)= cast(src / divisor), the quotient rounded to src_type, for `numel` contiguous elements.
void scale_into(at::Device device, DType dst_type, void* dst, DType src_type, const void* src, int64_t numel,
                double divisor, bool accumulate);

// dst += src, cast to dst's type.
void add_on(at::Device device, const std::vector<Copy>& copies, const void* src, void* dst);

}  // namespace fsdp2x
