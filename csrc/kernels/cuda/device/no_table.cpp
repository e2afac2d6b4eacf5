// Replaces the device's table if fsdp2x is built without nvcc.
#include "kernels/cuda/kernels.hpp"
#include "kernels/cuda/probe.hpp"

namespace fsdp2x::cuda {

const Kernels* device_kernels() { return nullptr; }

std::string why_no_kernels_on(int) { return {}; }

}  // namespace fsdp2x::cuda
