// Windows of several MiB, whose pages become huge: ranks write and see the same as with small pages.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "ranks.hpp"
#include "shm/file_descriptor.hpp"
#include "shm/huge_pages.hpp"
#include "shm/shm_group.hpp"
#include "shm/shm_windows.hpp"

namespace fsdp2x {
namespace {

using cpu::GatherPost;
using cpu::GatherWindow;
using cpu::kHugePageBytes;
using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::expect_all_ok;
using ranks::fresh_options;
using ranks::require;

constexpr size_t kBytes = 2 * kHugePageBytes + 300 * 4096 + 100;

// Returns a slot offset as after small slots: at any page.
size_t odd_offset() { return 7 * ShmGroup::page_bytes(); }

// Returns the bytes of [data, ..), a mapping of this process, that are in huge pages of shared memory.
size_t huge_bytes_at(const std::byte* data) {
  std::ifstream smaps("/proc/self/smaps");
  char begin[32];
  std::snprintf(begin, sizeof(begin), "%lx-", static_cast<unsigned long>(reinterpret_cast<uintptr_t>(data)));
  bool is_here = false;
  const std::string key = "ShmemPmdMapped:";
  for (std::string line; std::getline(smaps, line);) {
    if (line.starts_with(begin)) is_here = true;
    if (is_here && line.starts_with(key)) return std::stoul(line.substr(key.size())) * 1024;
  }
  return 0;
}

// Returns whether the system makes huge pages of a memfd on request.
bool has_huge_pages() {
  const cpu::FileDescriptor memory(::memfd_create("fsdp2x-test", MFD_CLOEXEC));
  if (!memory.valid() || ::ftruncate(memory.get(), kHugePageBytes) != 0) return false;
  const cpu::Mapping mapping(memory.get(), 0, kHugePageBytes, cpu::View::read_write);
  cpu::fill_with_huge_pages(mapping.data(), mapping.bytes());
  return huge_bytes_at(mapping.data()) > 0;
}

std::vector<uint8_t> values(int rank, uint64_t sequence, size_t bytes) {
  std::vector<uint8_t> found(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    found[i] = static_cast<uint8_t>(static_cast<uint64_t>(rank) * 101 + sequence * 31 + i / 509);
  }
  return found;
}

void require_values(const std::byte* data, int rank, uint64_t sequence, size_t bytes) {
  std::string what = "what rank " + std::to_string(rank);
  what += " wrote at #" + std::to_string(sequence);
  require(std::memcmp(data, values(rank, sequence, bytes).data(), bytes) == 0, what);
}

class ShmHuge : public testing::TestWithParam<int> {};

// A rank maps a slot after another rank has written its rows there, and must not change them.
TEST_P(ShmHuge, RowsStayWhenAnotherRankMakesThePagesHuge) {
  expect_all_ok(ranks::run(fresh_options(GetParam()), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const size_t rows_bytes = kBytes / static_cast<size_t>(options.world);
    for (uint64_t sequence = 1; sequence <= 12; ++sequence) {
      const auto slot = static_cast<uint32_t>(sequence % 3);
      const uint64_t offset = odd_offset() + slot * (kBytes / 4096 + 3) * 4096;
      const uint64_t num_uses = (sequence + 2) / 3;
      const GatherPost post = {sequence, 0, slot, offset, kBytes};
      if (options.rank == static_cast<int>(sequence) % options.world) ranks::sleep_ms(3);
      const GatherWindow window = group->gather_window(offset, kBytes);
      group->acquire_slot(post, num_uses);
      std::memcpy(window.shared + rows_bytes * static_cast<size_t>(options.rank),
                  values(options.rank, sequence, rows_bytes).data(), rows_bytes);
      group->post_gather(post);
      group->join_gather(post);
      for (int rank = 0; rank < options.world; ++rank) {
        require_values(window.isolated + static_cast<size_t>(rank) * rows_bytes, rank, sequence, rows_bytes);
      }
      // One write in a huge page, and one in a small page after the last huge one. Both stay private until they are
      // dropped.
      const std::vector<std::byte> shared(window.shared, window.shared + kBytes);
      ranks::meet_all(options);
      for (const size_t at : {kHugePageBytes + 5, kBytes - 1}) {
        window.isolated[at] = ~shared[at];
        require(window.isolated[at] == ~shared[at], "the writer sees its write");
      }
      ranks::meet_all(options);
      require(std::memcmp(window.shared, shared.data(), kBytes) == 0, "nobody else sees it");
      group->discard_private_pages(window.isolated, kBytes);
      require(std::memcmp(window.isolated, window.shared, kBytes) == 0, "what was written is dropped");
      group->release_slot(slot, num_uses);
    }
  }));
}

TEST_P(ShmHuge, ScratchesAreReadWhole) {
  expect_all_ok(ranks::run(fresh_options(GetParam()), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    std::byte* const scratch = group->scratch_window(options.rank, odd_offset(), kBytes);
    std::memcpy(scratch, values(options.rank, 1, kBytes).data(), kBytes);
    ranks::meet_all(options);
    for (int rank = 0; rank < options.world; ++rank) {
      require_values(group->scratch_window(rank, odd_offset(), kBytes), rank, 1, kBytes);
    }
    ranks::meet_all(options);
  }));
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmHuge, testing::Values(2, 3));

TEST(ShmHugePages, AreThereWhereTheSystemHasThem) {
  if (!has_huge_pages()) GTEST_SKIP() << "this system makes no huge pages of a memfd";
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const GatherWindow window = group->gather_window(odd_offset(), kBytes);
    std::byte* const scratch = group->scratch_window(options.rank, odd_offset(), kBytes);
    ranks::meet_all(options);
    // Two complete ones fit, wherever the window begins, or one fewer if both ends are cut.
    for (std::byte* const data : {window.shared, window.isolated, scratch}) {
      size_t sum = 0;
      for (size_t i = 0; i < kBytes; i += 4096) sum += static_cast<size_t>(*const_cast<volatile std::byte*>(data + i));
      require(sum == 0, "nobody has written");
      require(huge_bytes_at(data) >= kHugePageBytes, "a huge page of three views");
    }
    ranks::meet_all(options);
  }));
}

TEST(ShmHugePages, AreAskedForInsideOnly) {
  // Memory next to complete huge pages must not change: a range that is too short for one is left alone.
  std::vector<std::byte> small(100, std::byte{3});
  cpu::fill_with_huge_pages(small.data(), small.size());
  cpu::prefer_huge_pages(small.data(), small.size());
  std::vector<std::byte> large(3 * kHugePageBytes + 17, std::byte{4});
  cpu::prefer_huge_pages(large.data() + 1, large.size() - 1);
  for (const std::byte one : large) ASSERT_EQ(one, std::byte{4});
  ASSERT_EQ(small, std::vector<std::byte>(100, std::byte{3}));
}

}  // namespace
}  // namespace fsdp2x
