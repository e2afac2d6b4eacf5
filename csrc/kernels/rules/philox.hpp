// Philox-4x32-10 and stochastic rounding to bf16 based on it. It is counter-based, so that every device draws the same
// bits for an element in any order. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace fsdp2x {

struct PhiloxBlock {
  uint32_t words[4];
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxLeft = 0xd2511f53u, kPhiloxRight = 0xcd9e8d57u;  // factors of words 0 and 2
constexpr uint32_t kPhiloxKey0 = 0x9e3779b9u, kPhiloxKey1 = 0xbb67ae85u;   // increments of the keys

FSDP2X_HOST_DEVICE PhiloxBlock philox(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.words[0], c1 = counter.words[1], c2 = counter.words[2], c3 = counter.words[3];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t left = static_cast<uint64_t>(kPhiloxLeft) * c0;
    const uint64_t right = static_cast<uint64_t>(kPhiloxRight) * c2;
    c0 = static_cast<uint32_t>(right >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(right);
    c2 = static_cast<uint32_t>(left >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(left);
    key0 += kPhiloxKey0;
    key1 += kPhiloxKey1;
  }
  return {{c0, c1, c2, c3}};
}

// The purpose of an element's random bits. No bits may be used twice.
enum class Draw : uint32_t { param = 0, exp_avg = 1, exp_avg_sq = 2 };

// The source of the rounding of one optimizer step. Ranks that hold the same elements must have the same seed. `step`
// counts from 1.
struct RoundingKey {
  uint64_t seed = 0;
  uint64_t step = 0;
};

// A block serves kRoundingBlock consecutive elements, 16 bits each.
constexpr int kRoundingBlock = 8;

// Returns the counter of a block, by its number.
FSDP2X_HOST_DEVICE PhiloxBlock rounding_counter(RoundingKey key, Draw draw, uint64_t block) {
  return {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32) | (static_cast<uint32_t>(draw) << 30),
           static_cast<uint32_t>(key.step), static_cast<uint32_t>(key.step >> 32)}};
}

// Returns the block of elements index / 8 * 8 .. + 7, `index` < 2^61. An optimizer numbers all elements that it steps.
// No two elements of a rank have the same number, while replicas of an element do.
FSDP2X_HOST_DEVICE PhiloxBlock rounding_block(RoundingKey key, Draw draw, uint64_t index) {
  const PhiloxBlock counter = rounding_counter(key, draw, index / kRoundingBlock);
  return philox(counter, static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
}

// Returns the 16 bits of element `index` in its block: two elements a word, the even one in the low half.
FSDP2X_HOST_DEVICE uint32_t rounding_bits(const PhiloxBlock& block, uint64_t index) {
  const auto place = static_cast<uint32_t>(index % kRoundingBlock);
  // Do not write words[place / 2]: an indexed array would leave the device's registers.
  const uint32_t low = place < 2 ? block.words[0] : block.words[1];
  const uint32_t high = place < 6 ? block.words[2] : block.words[3];
  return ((place < 4 ? low : high) >> (place % 2 * 16)) & 0xffffu;
}

// Rounds the float with these bits to bf16: up with the probability of the part that is cut off, for random_bits <
// 2^16. Infinities stay, and NaN becomes quiet.
FSDP2X_HOST_DEVICE uint16_t stochastic_bf16(uint32_t float_bits, uint32_t random_bits) {
  const uint32_t magnitude = float_bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>((float_bits >> 16) | 0x40u);
  if (magnitude == 0x7f800000u) return static_cast<uint16_t>(float_bits >> 16);
  return static_cast<uint16_t>((float_bits + random_bits) >> 16);
}

}  // namespace fsdp2x
