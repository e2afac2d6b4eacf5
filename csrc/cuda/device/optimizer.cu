// Optimizer steps on the device.
#include "cuda/bodies/optimizer.hpp"
#include "cuda/device/functions.hpp"
#include "cuda/device/launch.hpp"

namespace fsdp2x::cuda::device {

void adamw(const AdamWList& list, const AdamWArgs& args, Stream stream) {
  if (args.stochastic) return launch_tiles("adamw", AdamWBody<true>{list, args}, list.num_tiles, stream);
  launch_tiles("adamw", AdamWBody<false>{list, args}, list.num_tiles, stream);
}

void sgd(const SgdList& list, const SgdArgs& args, Stream stream) {
  launch_tiles("sgd", SgdBody{list, args}, list.num_tiles, stream);
}

}  // namespace fsdp2x::cuda::device
