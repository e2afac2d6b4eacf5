// A line of memory is compared at a time, and looked into where it differs.
#include "cpu/changes.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace fsdp2x::cpu {

namespace {

constexpr size_t kLineBytes = 64;

bool equal_lines(const std::byte* a, const std::byte* b) {
  std::array<uint64_t, kLineBytes / sizeof(uint64_t)> left, right;
  std::memcpy(left.data(), a, kLineBytes);
  std::memcpy(right.data(), b, kLineBytes);
  uint64_t differing = 0;
  for (size_t i = 0; i < left.size(); ++i) differing |= left[i] ^ right[i];
  return differing == 0;
}

// Memory need not be aligned. False: there are more than `max`.
template <size_t Bytes>
bool compare(const std::byte* held, const std::byte* now, int64_t first, size_t num, int64_t max, Changes& changes) {
  constexpr size_t kInLine = kLineBytes / Bytes;
  for (size_t i = 0; i < num; i += kInLine) {
    const size_t end = std::min(i + kInLine, num);
    if (end - i == kInLine && equal_lines(held + i * Bytes, now + i * Bytes)) continue;
    for (size_t k = i; k < end; ++k) {
      if (std::memcmp(held + k * Bytes, now + k * Bytes, Bytes) == 0) continue;
      if (static_cast<int64_t>(changes.positions.size()) == max) return false;
      changes.positions.push_back(first + static_cast<int64_t>(k));
      changes.values.insert(changes.values.end(), now + k * Bytes, now + (k + 1) * Bytes);
    }
  }
  return true;
}

using Compare = bool (*)(const std::byte*, const std::byte*, int64_t, size_t, int64_t, Changes&);

Compare compare_of(size_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return &compare<1>;
    case 2:
      return &compare<2>;
    case 4:
      return &compare<4>;
    case 8:
      return &compare<8>;
    case 16:
      return &compare<16>;
    default:
      throw Error("fsdp2x: elements of " + std::to_string(element_bytes) + " bytes are not compared");
  }
}

}  // namespace

void find_changes(const void* held, const void* now, size_t element_bytes, int64_t first, int64_t numel, int64_t max,
                  Changes& changes) {
  const auto* const before = static_cast<const std::byte*>(held);
  const auto* const values = static_cast<const std::byte*>(now);
  const auto num = static_cast<size_t>(numel);
  if (!compare_of(element_bytes)(before, values, first, num, max, changes)) changes.has_more = true;
}

}  // namespace fsdp2x::cpu
