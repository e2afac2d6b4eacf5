// The table of the kernels on the device.
#include "kernels/cuda/device/functions.hpp"

namespace fsdp2x::cuda {

const Kernels* device_kernels() {
  static const Kernels kernels = {
      .name = "device",
      .copy = device::copy,
      .pack_gradients = device::pack_gradients,
      .reduce = device::reduce,
      .sum_squares = device::sum_squares,
      .add_up = device::add_up,
      .clip_factor = device::clip_factor,
      .scale_gradients = device::scale_gradients,
      .adamw = device::adamw,
      .is_capturing = device::is_capturing,
      .mark_changes = device::mark_changes,
      .list_changes = device::list_changes,
      .encode_wire = device::encode_wire,
      .decode_wire = device::decode_wire,
      .sum_wire = device::sum_wire,
  };
  return &kernels;
}

}  // namespace fsdp2x::cuda
