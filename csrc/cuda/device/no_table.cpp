// In place of the device's table, where fsdp2x is built without nvcc.
#include "cuda/kernels.hpp"
#include "cuda/probe.hpp"

namespace fsdp2x::cuda {

const Kernels* device_kernels() { return nullptr; }

std::string why_no_kernels_on(int) { return {}; }

}  // namespace fsdp2x::cuda
