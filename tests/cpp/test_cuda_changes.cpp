// Masks and lists of changes, against a loop over single elements.
#include <algorithm>
#include <bit>
#include <random>

#include "core/error.hpp"
#include "executor.hpp"

namespace fsdp2x::cuda {

namespace {

struct Listed {
  std::vector<int64_t> positions;
  std::vector<std::byte> values;
  std::vector<std::byte> held;
};

// Returns the list of the kernels. Memory is `shift` bytes off a multiple of 256.
Listed listed(const std::vector<std::byte>& now, const std::vector<std::byte>& held, size_t bytes, size_t shift) {
  const Region now_region(now, shift), held_region(held, shift);
  ChangesArgs args;
  args.now = now_region.data();
  args.held = held_region.data();
  args.numel = static_cast<int64_t>(now.size() / bytes);
  args.element_bytes = static_cast<int>(bytes);
  args.element_shift = std::countr_zero(bytes);
  const Region masks(static_cast<size_t>(args.num_masks()) * sizeof(uint16_t));
  const Region counts(static_cast<size_t>(args.num_tiles()) * sizeof(int64_t));
  args.masks = masks.as<uint16_t>();
  args.tile_counts = counts.as<int64_t>();
  kernels().mark_changes(args, nullptr);
  std::vector<int64_t> ends = counts.read_as<int64_t>();
  masks.read();
  for (size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
  const size_t total = ends.empty() ? 0 : static_cast<size_t>(ends.back());
  Region ends_region(ends.size() * sizeof(int64_t));
  ends_region.write(std::as_bytes(std::span(ends)));
  const Region positions(total * sizeof(int64_t)), values(total * bytes);
  args.tile_ends = ends_region.as<int64_t>();
  args.positions = positions.as<int64_t>();
  args.values = values.data();
  kernels().list_changes(args, nullptr);
  EXPECT_EQ(now_region.read(), now);
  return {positions.read_as<int64_t>(), values.read(), held_region.read()};
}

void expect_listed(const std::vector<std::byte>& now, const std::vector<std::byte>& held, size_t bytes, size_t shift) {
  std::vector<int64_t> positions;
  std::vector<std::byte> values;
  for (size_t i = 0; i < now.size(); i += bytes) {
    const auto begin = now.begin() + static_cast<std::ptrdiff_t>(i), end = begin + static_cast<std::ptrdiff_t>(bytes);
    if (std::equal(begin, end, held.begin() + static_cast<std::ptrdiff_t>(i))) continue;
    positions.push_back(static_cast<int64_t>(i / bytes));
    values.insert(values.end(), begin, end);
  }
  const Listed got = listed(now, held, bytes, shift);
  EXPECT_EQ(got.positions, positions);
  EXPECT_TRUE(got.values == values);
  EXPECT_TRUE(got.held == now);
}

TEST(CudaChanges, AreListedInElementsOfAnySize) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> share(0, 1);
  for (const size_t bytes : {1, 2, 4, 8, 16}) {
    for (const size_t numel : {0, 1, 15, 16, 17, 4095, 4096, 4097, 3 * 4096 + 300}) {
      for (const double changed : {0.0, 0.002, 0.3, 1.0}) {
        std::vector<std::byte> now(numel * bytes);
        for (std::byte& byte : now) byte = static_cast<std::byte>(random());
        std::vector<std::byte> held = now;
        for (size_t i = 0; i < numel; ++i) {
          if (share(random) < changed) held[i * bytes + random() % bytes] ^= std::byte{1};
        }
        for (const size_t shift : {size_t{0}, bytes}) {
          SCOPED_TRACE(std::to_string(numel) + " elements of " + std::to_string(bytes) + " bytes, shift " +
                       std::to_string(shift));
          expect_listed(now, held, bytes, shift);
        }
      }
    }
  }
}

TEST(CudaChanges, MayBeFarApart) {
  std::vector<std::byte> now(4 * 9 * 4096), held = now;
  for (const size_t i : {size_t{3}, size_t{4096} * 4 * 4, now.size() - 1}) held[i] = std::byte{0x80};
  expect_listed(now, held, 4, 0);
}

TEST(CudaChanges, OfOtherElementsAreRefused) {
  for (const int bytes : {0, 3, 32}) {
    ChangesArgs args;
    args.element_bytes = bytes;
    args.element_shift = bytes == 32 ? 5 : 1;
    EXPECT_THROW(kernels().mark_changes(args, nullptr), Error);
    EXPECT_THROW(kernels().list_changes(args, nullptr), Error);
  }
}

}  // namespace

}  // namespace fsdp2x::cuda
