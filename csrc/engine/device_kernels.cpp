// Devices and their current streams, as launches of kernels want them.
#include "engine/device_kernels.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace fsdp2x {

DeviceScope::DeviceScope(at::Device device) : guard_(device.is_cpu() ? std::nullopt : std::optional(device)) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl impl(device.type());
  stream_ = static_cast<cuda::Stream>(impl.getStream(device).native_handle());
}

}  // namespace fsdp2x
