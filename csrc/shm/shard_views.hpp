// A slot as seen by the rank whose shards are stored there, see docs/engine/resting_shards.md.
#pragma once

#include <cstddef>
#include <vector>

#include "shm/private_pages.hpp"
#include "shm/shm_windows.hpp"

namespace fsdp2x::cpu {

// Bytes of a slot that belong to one rank.
struct SlotRows {
  size_t offset = 0;
  size_t bytes = 0;
};

// Two mappings of the same bytes. All ranks see writes to `shared`. Only this rank sees writes to `isolated`, until
// they are published. Lives as long as a tensor uses it.
class ShardViews {
 public:
  // `position`, `bytes`: the slot in the memfd. `rows`: this rank's rows, ascending.
  ShardViews(int memory, size_t position, size_t bytes, std::vector<SlotRows> rows);

  std::byte* shared() const { return shared_.data(); }
  std::byte* isolated() const { return isolated_.data(); }
  size_t bytes() const { return shared_.bytes(); }

  // Returns the pages of `isolated` that this rank has written to.
  std::vector<PageRun> written(const PrivatePages& pages) const { return pages.find(isolated(), bytes()); }
  // Writes this rank's rows in `runs` where all ranks see them. No rank may be reading them.
  void publish(const std::vector<PageRun>& runs) const;

  // Before a fork, turns the rows into private pages of this process, which a child inherits with their current values.
  // end_fork() undoes that in the parent for later children. Returns false if the kernel refused, with errno set.
  bool keep_for_child() const;
  void end_fork() const;
  // Returns the memory of the rows to the system, which makes them zero. No rank may be reading them.
  void give_back(int memory) const;

 private:
  size_t position_;
  std::vector<SlotRows> rows_;
  Mapping shared_;
  Mapping isolated_;
};

}  // namespace fsdp2x::cpu
