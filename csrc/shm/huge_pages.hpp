// Huge pages where the system has them: a pass over memory in pages of 4 KiB spends half of its time on finding them.
#pragma once

#include <cstddef>

namespace fsdp2x::cpu {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Whole huge pages inside of [data, data + bytes), a shared mapping of a file, become huge, with what is in them and
// zeros where nothing is; other ranks may write there meanwhile. A request: where the system refuses, all is as before.
void fill_with_huge_pages(std::byte* data, size_t bytes);

// The same for private memory, of which what was never written becomes huge when it is.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace fsdp2x::cpu
