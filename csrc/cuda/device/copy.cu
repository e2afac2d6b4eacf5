// Copies, packing and the peer gather on the device.
#include "cuda/bodies/copy.hpp"
#include "cuda/checks.hpp"
#include "cuda/device/functions.hpp"
#include "cuda/device/launch.hpp"

namespace fsdp2x::cuda::device {

void copy(const CopyList& list, const void* src, void* dst, Stream stream) {
  with_body<CopyBody>([&](const auto& body, int64_t num_tiles) { launch_tiles("copy", body, num_tiles, stream); }, list,
                      src, dst);
}

void pack_gradients(const CopyList& list, const PackTable& grads, void* dst, Scale scale, Stream stream) {
  with_body<PackBody>(
      [&](const auto& body, int64_t num_tiles) { launch_tiles("pack_gradients", body, num_tiles, stream); }, list,
      grads, dst, scale);
}

void all_gather_peer(const CopyList& list, const PeerTable& peers, void* dst, Stream stream) {
  require_ranks(peers.num_ranks, "all_gather_peer");
  with_body<GatherPeersBody>(
      [&](const auto& body, int64_t num_tiles) { launch_tiles("all_gather_peer", body, num_tiles, stream); }, list,
      peers, dst);
}

}  // namespace fsdp2x::cuda::device
