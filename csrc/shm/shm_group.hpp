// Shared memory between the ranks of one host: one sparse memfd, the windows mapped from it, and the protocol in its
// control area. Not thread-safe: one thread of a rank at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "shm/file_descriptor.hpp"
#include "shm/private_pages.hpp"
#include "shm/shard_views.hpp"
#include "shm/shm_map.hpp"
#include "shm/shm_options.hpp"
#include "shm/shm_protocol.hpp"
#include "shm/shm_windows.hpp"

namespace fsdp2x::cpu {

// Two views of a gather slot: the engine writes to `shared`, tensors read through `isolated`.
struct GatherWindow {
  std::byte* shared = nullptr;
  std::byte* isolated = nullptr;
};

// A group's memory and its protocol. If a window cannot be mapped, the group ends on every rank, see fail().
class ShmGroup final : public ShmProtocol {
 public:
  // Collective over the group's ranks: creates (rank 0) or receives the memfd, checks the peers, and maps the control
  // area. If that failed on any rank, returns null on all of them. `reason` then says where and why, with the same text
  // on every rank.
  static std::unique_ptr<ShmGroup> create(const ShmOptions& options, std::string& reason);
  ~ShmGroup();  // marks this rank closed, wakes the peers, unmaps everything

  static size_t page_bytes() { return cpu::page_bytes(); }

  // Windows are mapped at the first call and kept. The same arguments give the same pointers.
  GatherWindow gather_window(uint64_t offset, size_t bytes);
  std::byte* isolated_window(uint64_t offset, size_t bytes);  // only the tensors' view
  std::byte* scratch_window(int owner_rank, uint64_t offset, size_t bytes);
  // Drops this rank's private copies of the pages that [isolated, isolated + bytes) of an isolated view touches.
  void discard_private_pages(std::byte* isolated, size_t bytes);

  // Returns the room for permanent slots: half of the gather arena, because the needs of the other slots are unknown.
  size_t reservable_bytes() const { return map_.gather_bytes() / 2; }
  // Returns views of a slot for this rank's shards. Maps them at each call.
  std::shared_ptr<ShardViews> shard_views(uint64_t offset, size_t bytes, std::vector<SlotRows> rows);
  std::vector<PageRun> written(const ShardViews& views) const { return views.written(private_pages_); }
  // Makes written rows visible to all ranks. No rank may be reading this rank's rows.
  void publish(const ShardViews& views, const std::vector<PageRun>& runs);
  void give_back(const ShardViews& views) const { views.give_back(memory_.get()); }
  // Ends every wait of every rank with a message that this rank cannot do what its peers wait for. Throws it.
  [[noreturn]] void give_up(const std::string& why);
  size_t num_windows() const;  // mapped so far. A steady step maps none

 private:
  ShmGroup(const ShmOptions& options, const ShmMap& map, Mapping control_area);
  std::byte* map(Windows& windows, size_t position, size_t bytes);
  void drop(const std::vector<PageRun>& runs);

  FileDescriptor memory_;
  ShmMap map_;
  Mapping control_area_;
  Windows shared_{View::read_write};
  Windows isolated_{View::isolated};
  Windows own_scratch_{View::read_write};
  Windows peer_scratch_{View::read_only};
  PrivatePages private_pages_;
};

}  // namespace fsdp2x::cpu
