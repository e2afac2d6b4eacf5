// Compares a cache line at a time, and looks into lines that differ.
#include "kernels/cpu/changes.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "core/error.hpp"

namespace fsdp2x::cpu {

namespace {

constexpr size_t kLineBytes = 64;
using Line = std::array<uint64_t, kLineBytes / sizeof(uint64_t)>;

// Returns the differing bits.
Line differing_bits(const std::byte* a, const std::byte* b) {
  Line left, right;
  std::memcpy(left.data(), a, kLineBytes);
  std::memcpy(right.data(), b, kLineBytes);
  for (size_t i = 0; i < left.size(); ++i) left[i] ^= right[i];
  return left;
}

bool is_zero(const Line& line) {
  uint64_t any = 0;
  for (const uint64_t word : line) any |= word;
  return any == 0;
}

// Adds an element of those that begin at `now`. Returns false if there are already `max`.
template <size_t Bytes>
bool add(const std::byte* now, int64_t first, size_t index, int64_t max, Changes& changes) {
  if (static_cast<int64_t>(changes.positions.size()) == max) return false;
  changes.positions.push_back(first + static_cast<int64_t>(index));
  changes.values.insert(changes.values.end(), now + index * Bytes, now + (index + 1) * Bytes);
  return true;
}

// Uses the bits of each word to find the elements that changed in it: most lines with a change have one or two.
template <size_t Bytes>
bool add_line(const Line& differing, const std::byte* now, int64_t first, size_t begin, int64_t max, Changes& changes) {
  static_assert(std::endian::native == std::endian::little);
  constexpr size_t kBits = 8 * std::min(Bytes, sizeof(uint64_t));
  constexpr uint64_t kElement = ~uint64_t{0} >> (64 - kBits);
  for (size_t word = 0; word < differing.size(); ++word) {
    uint64_t left = differing[word];
    if constexpr (Bytes > sizeof(uint64_t)) {
      if (word % 2 == 1) continue;
      left |= differing[word + 1];
    }
    while (left != 0) {
      const auto place = static_cast<size_t>(std::countr_zero(left)) / kBits;
      if (!add<Bytes>(now, first, begin + word * sizeof(uint64_t) / Bytes + place, max, changes)) return false;
      left &= ~(kElement << (place * kBits));
    }
  }
  return true;
}

// Memory need not be aligned. Returns false if there are more than `max`.
template <size_t Bytes>
bool compare(std::byte* held, const std::byte* now, int64_t first, size_t num, int64_t max, Changes& changes) {
  constexpr size_t kInLine = kLineBytes / Bytes;
  size_t i = 0;
  for (; i + kInLine <= num; i += kInLine) {
    const Line differing = differing_bits(held + i * Bytes, now + i * Bytes);
    if (is_zero(differing)) continue;
    if (!add_line<Bytes>(differing, now, first, i, max, changes)) return false;
    std::memcpy(held + i * Bytes, now + i * Bytes, kLineBytes);
  }
  for (; i < num; ++i) {
    if (std::memcmp(held + i * Bytes, now + i * Bytes, Bytes) == 0) continue;
    if (!add<Bytes>(now, first, i, max, changes)) return false;
    std::memcpy(held + i * Bytes, now + i * Bytes, Bytes);
  }
  return true;
}

using Compare = bool (*)(std::byte*, const std::byte*, int64_t, size_t, int64_t, Changes&);

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
      throw Error("changes: expected elements of 1, 2, 4, 8, or 16 bytes, got " + std::to_string(element_bytes));
  }
}

}  // namespace

void take_changes(void* held, const void* now, size_t element_bytes, int64_t first, int64_t numel, int64_t max,
                  Changes& changes) {
  auto* const before = static_cast<std::byte*>(held);
  const auto* const values = static_cast<const std::byte*>(now);
  const auto num = static_cast<size_t>(numel);
  if (!compare_of(element_bytes)(before, values, first, num, max, changes)) changes.has_more = true;
}

}  // namespace fsdp2x::cpu
