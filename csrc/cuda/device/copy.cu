// Copies, packing and the peer gather on the device.
#include "cuda/bodies/copy.hpp"
#include "cuda/checks.hpp"
#include "cuda/device/functions.hpp"
#include "cuda/device/launch.hpp"

namespace fsdp2x::cuda::device {

void copy(const CopyList& list, const void* src, void* dst, Stream stream) {
  launch_tiles("copy", CopyBody{list, src, dst}, list.num_tiles, stream);
}

void pack_gradients(const PackList& list, const PackTable& grads, void* dst, Stream stream) {
  launch_tiles("pack_gradients", PackBody{list, grads, dst}, list.num_tiles, stream);
}

void all_gather_peer(const CopyList& list, const PeerTable& peers, int rank, void* dst, Stream stream) {
  require_rank(rank, peers.num_ranks, "all_gather_peer");
  launch_tiles("all_gather_peer", GatherPeersBody{list, peers, rank, dst}, list.num_tiles * (peers.num_ranks - 1),
               stream);
}

}  // namespace fsdp2x::cuda::device
