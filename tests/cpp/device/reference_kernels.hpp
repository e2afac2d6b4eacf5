// The kernels on the host, for tests: the same bodies, tile after tile and thread after thread.
#pragma once

#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda {

const Kernels& reference_kernels();

}  // namespace fsdp2x::cuda
