// madvise for huge pages.
#include "shm/huge_pages.hpp"

#include <sys/mman.h>

#include <cstdint>

#include "core/layout.hpp"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1, rejected by older kernels
#endif

namespace fsdp2x::cpu {
namespace {

struct Inside {
  std::byte* data;
  size_t bytes;
};

Inside huge_pages_inside(void* data, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = align_up(begin, kHugePageBytes);
  const uintptr_t end = (begin + bytes) / kHugePageBytes * kHugePageBytes;
  return {reinterpret_cast<std::byte*>(first), end > first ? end - first : 0};
}

}  // namespace

void fill_with_huge_pages(std::byte* data, size_t bytes) {
  const Inside inside = huge_pages_inside(data, bytes);
  if (inside.bytes == 0) return;
  // Collapsing needs a page that exists. A read makes the system put one there, and changes nothing.
  for (size_t i = 0; i < inside.bytes; i += kHugePageBytes) {
    static_cast<void>(*static_cast<const volatile std::byte*>(inside.data + i));
  }
  ::madvise(inside.data, inside.bytes, MADV_COLLAPSE);
}

void prefer_huge_pages(void* data, size_t bytes) {
  const Inside inside = huge_pages_inside(data, bytes);
  if (inside.bytes == 0) return;
  ::madvise(inside.data, inside.bytes, MADV_HUGEPAGE);
  ::madvise(inside.data, inside.bytes, MADV_COLLAPSE);  // an allocator may return memory that was written before
}

}  // namespace fsdp2x::cpu
