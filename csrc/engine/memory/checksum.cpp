// Blocks of one size are hashed by one thread each and joined in their order.
#include "engine/memory/checksum.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "engine/torch/parallel.hpp"

namespace fsdp2x {

namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kLanes = 4;  // multiplications that do not wait for each other

// For each `sum` another result for every `word`, and the other way round: what differs once differs at the end.
uint64_t mix(uint64_t sum, uint64_t word) { return std::rotl((sum ^ word) * 0x9E3779B97F4A7C15ULL, 29); }

uint64_t hash_block(const std::byte* data, size_t bytes) {
  std::array<uint64_t, kLanes> lanes{1, 2, 3, 4};
  std::array<uint64_t, kLanes> words{};
  while (bytes >= sizeof(words)) {
    std::memcpy(words.data(), data, sizeof(words));
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
    data += sizeof(words);
    bytes -= sizeof(words);
  }
  words = {};
  if (bytes > 0) std::memcpy(words.data(), data, bytes);
  uint64_t sum = bytes;
  for (size_t i = 0; i < kLanes; ++i) sum = mix(sum, mix(lanes[i], words[i]));
  return sum;
}

}  // namespace

uint64_t checksum(const at::Tensor& tensor) {
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const size_t bytes = tensor.nbytes();
  std::vector<uint64_t> sums((bytes + kBlockBytes - 1) / kBlockBytes);
  run_parallel(static_cast<int64_t>(sums.size()), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      sums[i] = hash_block(data + i * kBlockBytes, std::min(kBlockBytes, bytes - i * kBlockBytes));
    }
  });
  uint64_t total = bytes;
  for (const uint64_t sum : sums) total = mix(total, sum);
  return total;
}

}  // namespace fsdp2x
