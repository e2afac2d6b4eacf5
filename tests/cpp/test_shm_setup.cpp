// Setup of a shared-memory group, rejected peers, and cleanup.
#include <fcntl.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "ranks.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {
namespace {

using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::expect_all_ok;
using ranks::expect_error;
using ranks::fresh_options;
using ranks::require;

std::string file_text(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Returns this process' descriptors of a group's memfd or sockets.
std::vector<int> group_descriptors() {
  std::vector<int> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.find("memfd:fsdp2x") != std::string::npos || target.find("pidfd") != std::string::npos) {
      found.push_back(std::stoi(entry.path().filename()));
    }
  }
  return found;
}

class ShmWorld : public testing::TestWithParam<int> {};

TEST_P(ShmWorld, RanksMayComeInAnyOrder) {
  const int world = GetParam();
  for (int last = 0; last < world; ++last) {
    expect_all_ok(ranks::run(fresh_options(world), [&](const ShmOptions& options) {
      if (options.rank == last) ranks::sleep_ms(150);
      ranks::enter(options);
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmWorld, testing::Values(2, 3, 4));

TEST(ShmSetup, SeveralGroupsLiveSideBySide) {
  const ShmOptions second = fresh_options(2);
  expect_all_ok(ranks::run(fresh_options(2), [&](const ShmOptions& options) {
    ShmOptions reversed = second;  // rank 0 of one group is rank 1 of the other
    reversed.rank = 1 - options.rank;
    reversed.exchange = options.exchange;
    const auto a = ranks::enter(options);
    const auto b = ranks::enter(reversed);
    const auto window_a = a->gather_window(0, 4096);
    const auto window_b = b->gather_window(0, 4096);
    if (options.rank == 0) window_a.shared[0] = std::byte{1};
    if (options.rank == 0) window_b.shared[0] = std::byte{2};
    ranks::meet_all(options);
    require(window_a.shared[0] == std::byte{1} && window_b.shared[0] == std::byte{2}, "separate memory");
    ranks::meet_all(options);
  }));
}

// Expects that every rank ends with the same message, whichever rank failed.
void expect_same_error(const std::vector<ranks::Outcome>& outcomes, const std::vector<std::string>& parts) {
  for (const auto& outcome : outcomes) {
    expect_error(outcome, parts);
    EXPECT_EQ(outcome.message, outcomes[0].message);
    EXPECT_LT(outcome.seconds, 8.0);
  }
}

TEST(ShmSetup, WrongOptionsOfOneRankAreRefusedOnAll) {
  struct Wrong {
    int world, rank;
    void (*change)(ShmOptions&);
    std::vector<std::string> parts;
  };
  const auto flip_token = [](ShmOptions& own) { own.token[31] = static_cast<char>(own.token[31] ^ 1); };
  for (const Wrong& wrong : {
           Wrong{3, 1, flip_token, {"rank 0 got no connection from rank 1", "rejected process", "wrong token"}},
           Wrong{2, 1, [](ShmOptions& own) { own.world = 3; }, {"no connection from rank 1", "number of ranks"}},
           Wrong{3, 2, [](ShmOptions& own) { own.rank = 1; }, {"no connection from rank 2", "already connected"}},
           Wrong{3, 2, [](ShmOptions& own) { own.token = "short"; }, {"rank 2 needs", "token of 32 bytes", "got 5"}},
       }) {
    const auto outcomes = ranks::run(fresh_options(wrong.world), [&wrong](const ShmOptions& options) {
      ShmOptions own = options;
      if (options.rank == wrong.rank) wrong.change(own);
      ranks::enter(own);
    });
    expect_same_error(outcomes, wrong.parts);
  }
}

TEST(ShmSetup, BadOptionsAreRefused) {
  ShmOptions options = fresh_options(2);
  options.exchange = [](const std::string& mine) { return std::vector<std::string>{mine, ""}; };
  const auto refused = [&options](const std::function<void(ShmOptions&)>& change) {
    ShmOptions bad = options;
    change(bad);
    std::string reason;
    EXPECT_EQ(ShmGroup::create(bad, reason), nullptr);
    return reason;
  };
  EXPECT_NE(refused([](ShmOptions& bad) { bad.socket_name.clear(); }).find("socket name"), std::string::npos);
  EXPECT_NE(refused([](ShmOptions& bad) { bad.socket_name.assign(101, 'x'); }).find("101"), std::string::npos);
  EXPECT_NE(refused([](ShmOptions& bad) { bad.rank = 2; }).find("not a rank of its group of"), std::string::npos);
  EXPECT_NE(refused([](ShmOptions& bad) { bad.rank = -1; }).find("not a rank of its group of"), std::string::npos);
  EXPECT_NE(refused([](ShmOptions& bad) { bad.world = 1 << 20; }).find("1024 ranks"), std::string::npos);
}

TEST(ShmSetup, NothingStaysBehind) {
  const ShmOptions shared = fresh_options(2);
  expect_all_ok(ranks::run(shared, [](const ShmOptions& options) {
    {
      const auto group = ranks::enter(options);
      group->gather_window(0, 1 << 20).shared[0] = std::byte{1};
      group->scratch_window(options.rank, 0, 1 << 20)[0] = std::byte{1};
      const std::vector<int> descriptors = group_descriptors();
      require(descriptors.size() == 2 || descriptors.size() == 1, "a memfd, and where there are such a pidfd");
      for (const int fd : descriptors) require((::fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0, "closed on exec");
      const std::string maps = file_text("/proc/self/maps");
      require(maps.find("/memfd:fsdp2x (deleted)") != std::string::npos, "the memory has no name");
      require(file_text("/proc/net/unix").find(options.socket_name) == std::string::npos || options.rank == 1,
              "rank 0 listens no more");
      ranks::meet_all(options);
    }
    require(group_descriptors().empty(), "descriptors are closed");
    require(file_text("/proc/self/maps").find("memfd:fsdp2x") == std::string::npos, "windows are unmapped");
  }));
  EXPECT_EQ(file_text("/proc/net/unix").find(shared.socket_name), std::string::npos);
  for (const char* folder : {"/dev/shm", "/tmp"}) {
    if (!std::filesystem::exists(folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      EXPECT_EQ(entry.path().string().find(shared.socket_name), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace fsdp2x
