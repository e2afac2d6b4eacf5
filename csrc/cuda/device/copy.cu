// Copies, packing and the peer gather on the device.
#include "cuda/bodies/copy.hpp"
#include "cuda/checks.hpp"
#include "cuda/device/functions.hpp"
#include "cuda/device/launch.hpp"

namespace fsdp2x::cuda::device {

void copy(const CopyList& list, const void* src, void* dst, Stream stream) {
  launch_tiles("copy", CopyBody{list, src, dst}, list.num_tiles, stream);
}

void pack_gradients(const CopyList& list, const PackTable& grads, void* dst, Scale scale, Stream stream) {
  launch_tiles("pack_gradients", PackBody{list, grads, dst, scale}, list.num_tiles, stream);
}

void all_gather_peer(const CopyList& list, const PeerTable& peers, void* dst, Stream stream) {
  require_ranks(peers.num_ranks, "all_gather_peer");
  launch_tiles("all_gather_peer", GatherPeersBody{list, peers, dst}, list.num_tiles, stream);
}

}  // namespace fsdp2x::cuda::device
