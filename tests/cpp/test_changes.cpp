// Changes since an earlier copy, against a loop over single elements.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "core/error.hpp"
#include "kernels/cpu/changes.hpp"

namespace fsdp2x {
namespace {

constexpr int64_t kSizes[] = {0, 1, 3, 31, 32, 33, 64, 1000, 20011};
constexpr double kShares[] = {0.0, 0.001, 0.05, 1.0};

std::vector<int64_t> differing(const std::byte* now, const std::byte* held, size_t bytes, int64_t numel) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < numel; ++i) {
    const auto at = static_cast<size_t>(i) * bytes;
    if (std::memcmp(now + at, held + at, bytes) != 0) positions.push_back(i);
  }
  return positions;
}

void expect_found(const std::vector<std::byte>& now, const std::vector<std::byte>& held, size_t bytes, int64_t numel,
                  const cpu::Changes& changes) {
  EXPECT_FALSE(changes.has_more);
  EXPECT_EQ(changes.positions, differing(now.data(), held.data(), bytes, numel));
  std::vector<std::byte> mended = held;
  ASSERT_EQ(changes.values.size(), changes.positions.size() * bytes);
  for (size_t i = 0; i < changes.positions.size(); ++i) {
    std::memcpy(mended.data() + static_cast<size_t>(changes.positions[i]) * bytes, changes.values.data() + i * bytes,
                bytes);
  }
  EXPECT_EQ(mended, now);
}

TEST(Changes, AreFoundInElementsOfAnySize) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> share(0, 1);
  for (const size_t bytes : {1, 2, 4, 8, 16}) {
    for (const int64_t numel : kSizes) {
      for (const double changed : kShares) {
        std::vector<std::byte> now(static_cast<size_t>(numel) * bytes);
        for (std::byte& byte : now) byte = static_cast<std::byte>(random());
        std::vector<std::byte> held = now;
        for (size_t i = 0; i < static_cast<size_t>(numel); ++i) {
          if (share(random) < changed) held[i * bytes + random() % bytes] ^= std::byte{0x80};
        }
        const std::vector<std::byte> before = held;
        cpu::Changes changes;
        const int64_t half = numel / 2;
        const size_t skipped = static_cast<size_t>(half) * bytes;
        cpu::take_changes(held.data(), now.data(), bytes, 0, half, numel, changes);
        cpu::take_changes(held.data() + skipped, now.data() + skipped, bytes, half, numel - half, numel, changes);
        expect_found(now, before, bytes, numel, changes);
        EXPECT_EQ(held, now);
      }
    }
  }
  cpu::Changes changes;
  EXPECT_THROW(cpu::take_changes(nullptr, nullptr, 3, 0, 0, 0, changes), Error);
}

TEST(Changes, AreGivenUpWhereThereAreMore) {
  const std::vector<float> now(100, 1.0F);
  for (const int64_t max : {0, 1, 99, 100}) {
    std::vector<float> held(100, 2.0F);
    cpu::Changes changes;
    cpu::take_changes(held.data(), now.data(), sizeof(float), 0, 100, max, changes);
    EXPECT_EQ(changes.has_more, max < 100);
    EXPECT_LE(static_cast<int64_t>(changes.positions.size()), max);
  }
}

TEST(Changes, AreBits) {
  const std::vector<float> now{0.0F, 1.0F};
  std::vector<float> held{-0.0F, 1.0F};
  cpu::Changes changes;
  cpu::take_changes(held.data(), now.data(), sizeof(float), 0, 2, 2, changes);
  EXPECT_EQ(changes.positions, std::vector<int64_t>{0});
}

}  // namespace
}  // namespace fsdp2x
