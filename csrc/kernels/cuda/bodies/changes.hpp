// One thread's share of finding changes between two arrays: a mask of its elements, then their places in a list.
//
//   mark   a mask of kMaskNumel elements a thread, and the number of changes in each tile
//   list   after these numbers are summed: positions and values, ascending
//
// A thread's place in its tile is the sum of the counts before it: complete groups of threads, then its own group.
#pragma once

#include "kernels/cuda/bodies/element.hpp"

namespace fsdp2x::cuda {

inline constexpr int kMaskNumel = kTileNumel / kThreads;
inline constexpr int kCountGroup = 16;  // threads whose counts are added up together
inline constexpr int kCountGroups = kThreads / kCountGroup;
static_assert(kMaskNumel == 16 && kCountGroup * kCountGroups == kThreads);

FSDP2X_HOST_DEVICE int num_bits(uint32_t mask) {
#ifdef __CUDA_ARCH__
  return __popc(mask);
#else
  return __builtin_popcount(mask);
#endif
}

// A 16-byte element.
struct alignas(16) PairOfWords {
  uint64_t words[2];
};

struct ChangesBody {
  ChangesArgs args;

  // Returns which of the thread's elements differ.
  FSDP2X_HOST_DEVICE uint32_t find(int64_t tile, int thread) const {
    const int64_t begin = first_of(tile, thread) * args.element_bytes;
    const int64_t left = args.numel * args.element_bytes - begin;
    const int64_t whole = int64_t{kMaskNumel} * args.element_bytes;
    const char* now = at(args.now, begin);
    const char* held = at(args.held, begin);
    if (left >= whole && is_word_aligned(now) && is_word_aligned(held)) return find_by_words(now, held);
    uint32_t mask = 0;
    FSDP2X_NO_UNROLL
    for (int64_t i = 0; i < whole && i < left; ++i) {
      if (now[i] != held[i]) mask |= bit_of(static_cast<uint32_t>(i));
    }
    return mask;
  }

  FSDP2X_HOST_DEVICE void mark(int64_t tile, int thread, uint32_t mask) const {
    args.masks[tile * kThreads + thread] = static_cast<uint16_t>(mask);
  }
  FSDP2X_HOST_DEVICE uint32_t marked(int64_t tile, int thread) const { return args.masks[tile * kThreads + thread]; }

  // `place`: of the thread's first change among all. `mask`: the result of find().
  FSDP2X_HOST_DEVICE void list(int64_t tile, int thread, uint32_t mask, int64_t place) const {
    const int64_t first = first_of(tile, thread);
    FSDP2X_NO_UNROLL
    for (int k = 0; k < kMaskNumel; ++k) {
      if ((mask >> k & 1) == 0) continue;
      args.positions[place] = first + k;
      move(first + k, place++);
    }
  }

 private:
  FSDP2X_HOST_DEVICE static int64_t first_of(int64_t tile, int thread) {
    return tile * kTileNumel + int64_t{thread} * kMaskNumel;
  }

  // Returns the bit of the element that contains byte `i` of a thread.
  FSDP2X_HOST_DEVICE uint32_t bit_of(uint32_t i) const { return 1u << (i >> args.element_shift); }

  FSDP2X_HOST_DEVICE uint32_t find_by_words(const char* now, const char* held) const {
    uint32_t mask = 0;
    FSDP2X_NO_UNROLL
    for (int word = 0; word < args.element_bytes; ++word) {
      const auto a = read<Packed<uint32_t, 4>>(now + word * kWordBytes);
      const auto b = read<Packed<uint32_t, 4>>(held + word * kWordBytes);
      FSDP2X_UNROLL
      for (int k = 0; k < 4; ++k) {
        const uint32_t differing = a.values[k] ^ b.values[k];
        if (differing == 0) continue;
        FSDP2X_UNROLL
        for (int byte = 0; byte < 4; ++byte) {
          const auto i = static_cast<uint32_t>(word * kWordBytes + k * 4 + byte);
          if ((differing >> (byte * 8) & 0xffu) != 0) mask |= bit_of(i);
        }
      }
    }
    return mask;
  }

  template <class U>
  FSDP2X_HOST_DEVICE void move_as(int64_t from, int64_t to) const {
    const auto size = static_cast<int64_t>(sizeof(U));
    const U value = read<U>(at(args.now, from * size));
    write(at(args.values, to * size), value);
    write(at(args.held, from * size), value);
  }

  FSDP2X_HOST_DEVICE void move(int64_t from, int64_t to) const {
    switch (args.element_bytes) {
      case 1:
        return move_as<uint8_t>(from, to);
      case 2:
        return move_as<uint16_t>(from, to);
      case 4:
        return move_as<uint32_t>(from, to);
      case 8:
        return move_as<uint64_t>(from, to);
      default:
        return move_as<PairOfWords>(from, to);
    }
  }
};

// Returns the sum of group `group` of a tile's counts.
FSDP2X_HOST_DEVICE int group_count(const int* counts, int group) {
  int sum = 0;
  FSDP2X_NO_UNROLL
  for (int k = 0; k < kCountGroup; ++k) sum += counts[group * kCountGroup + k];
  return sum;
}

// Returns the changes of the tile before those of `thread`. kThreads: all of them.
FSDP2X_HOST_DEVICE int num_before(const int* counts, const int* groups, int thread) {
  const int group = thread / kCountGroup;
  int sum = 0;
  FSDP2X_NO_UNROLL
  for (int k = 0; k < group; ++k) sum += groups[k];
  FSDP2X_NO_UNROLL
  for (int k = group * kCountGroup; k < thread; ++k) sum += counts[k];
  return sum;
}

}  // namespace fsdp2x::cuda
