// Whether a device can run the kernels: drivers may be older than nvcc was, and devices other than those it compiled
// for.
#pragma once

#include <string>

namespace fsdp2x::cuda {

// Why the driver cannot run the kernels on a device; empty: it can, or there are none. Launches nothing, and leaves the
// current device as it is.
std::string why_no_kernels_on(int device);

}  // namespace fsdp2x::cuda
