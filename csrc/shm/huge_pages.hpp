// Asks for huge pages: a pass over memory in pages of 4 KiB spends half of its time on finding them.
#pragma once

#include <cstddef>

namespace fsdp2x::cpu {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Turns complete huge pages inside of [data, data + bytes), a shared mapping of a file, into huge pages. Contents stay,
// and gaps become zeros. Other ranks may write there meanwhile. If the system refuses the request, nothing changes.
void fill_with_huge_pages(std::byte* data, size_t bytes);

// Does the same for private memory. Memory that was never written becomes huge at its first write.
void prefer_huge_pages(void* data, size_t bytes);

}  // namespace fsdp2x::cpu
