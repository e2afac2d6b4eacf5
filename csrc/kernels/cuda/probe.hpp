// Tells whether a device can run the kernels. Drivers may be older than nvcc, and devices may differ from those that it
// compiled for.
#pragma once

#include <string>

namespace fsdp2x::cuda {

// Returns why the driver cannot run the kernels on a device. Empty: it can, or there are no kernels. Launches nothing
// and does not change the current device.
std::string why_no_kernels_on(int device);

}  // namespace fsdp2x::cuda
