// Copies and packing on the device.
#include "kernels/cuda/bodies/copy.hpp"
#include "kernels/cuda/device/functions.hpp"
#include "kernels/cuda/device/launch.hpp"

namespace fsdp2x::cuda::device {

void copy(const CopyList& list, const void* src, void* dst, Stream stream) {
  launch_tiles("copy", CopyBody{list, src, dst}, list.num_tiles, stream);
}

void pack_gradients(const PackList& list, const PackTable& grads, void* dst, Stream stream) {
  launch_tiles("pack_gradients", PackBody{list, grads, dst}, list.num_tiles, stream);
}

}  // namespace fsdp2x::cuda::device
