// A slot as the rank sees it whose shards rest there, see docs/engine/resting_shards.md.
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

// Two mappings of the same bytes: what is written to `shared` all ranks see, what is written to `isolated` this rank
// alone, until it is published. Lives as long as a tensor looks through it.
class ShardViews {
 public:
  // `position`, `bytes`: the slot in the memfd. `rows`: this rank's, ascending.
  ShardViews(int memory, size_t position, size_t bytes, std::vector<SlotRows> rows);

  std::byte* shared() const { return shared_.data(); }
  std::byte* isolated() const { return isolated_.data(); }
  size_t bytes() const { return shared_.bytes(); }

  // What of `isolated` this rank has written to.
  std::vector<PageRun> written(const PrivatePages& pages) const { return pages.find(isolated(), bytes()); }
  // Writes this rank's rows in `runs` where all ranks see them. Nobody may be reading them.
  void publish(const std::vector<PageRun>& runs) const;

  // Before a fork: the rows become pages of this process alone, which a child inherits as they are now. After it, in
  // the parent: later children get nothing. False when the kernel refused; errno says why.
  bool keep_for_child() const;
  void end_fork() const;
  // Memory of the rows goes back to the system, and they are zero; nobody may be reading them.
  void give_back(int memory) const;

 private:
  size_t position_;
  std::vector<SlotRows> rows_;
  Mapping shared_;
  Mapping isolated_;
};

}  // namespace fsdp2x::cpu
