// Copies pages of a rank's own rows, and passes them on to children.
#include "shm/shard_views.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "shm/huge_pages.hpp"

namespace fsdp2x::cpu {

ShardViews::ShardViews(int memory, size_t position, size_t bytes, std::vector<SlotRows> rows)
    : position_(position),
      rows_(std::move(rows)),
      shared_(memory, position, bytes, View::read_write),
      isolated_(memory, position, bytes, View::isolated) {
  fill_with_huge_pages(shared(), bytes);
}

void ShardViews::publish(const std::vector<PageRun>& runs) const {
  auto row = rows_.begin();
  for (const PageRun& run : runs) {
    const auto begin = static_cast<size_t>(run.begin - isolated());
    const size_t end = begin + run.bytes;
    while (row != rows_.end() && row->offset + row->bytes <= begin) ++row;
    for (auto inside = row; inside != rows_.end() && inside->offset < end; ++inside) {
      const size_t from = std::max(begin, inside->offset);
      const size_t to = std::min(end, inside->offset + inside->bytes);
      std::memcpy(shared() + from, isolated() + from, to - from);
    }
  }
}

bool ShardViews::keep_for_child() const {
  const size_t page = page_bytes();
  for (const SlotRows& rows : rows_) {
    const size_t end = rows.offset + rows.bytes;
    for (size_t i = rows.offset; i < end; i = (i / page + 1) * page) {
      auto* const byte = static_cast<volatile std::byte*>(isolated() + i);
      *byte = *byte;
    }
  }
  return ::madvise(isolated(), bytes(), MADV_DOFORK) == 0;
}

void ShardViews::end_fork() const { ::madvise(isolated(), bytes(), MADV_DONTFORK); }

void ShardViews::give_back(int memory) const {
  for (const SlotRows& rows : rows_) {
    if (rows.bytes == 0) continue;
    ::fallocate(memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(position_ + rows.offset),
                static_cast<off_t>(rows.bytes));
  }
}

}  // namespace fsdp2x::cpu
