// Every system call and every allocation of a group fails once, on each rank. Either all ranks continue with correct
// numbers, or all of them end soon and report the rank that failed. No rank hangs or crashes, and no file stays open.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "faults.hpp"
#include "ranks.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {
namespace {

using cpu::GatherPost;
using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::require;

constexpr size_t kFunctions = faults::kFunctions.size();
constexpr double kSoonS = 8.0;  // below the group's timeout, on a busy machine

// Errors that the system may return.
const std::map<std::string, std::vector<int>>& errors_of_functions() {
  static const std::map<std::string, std::vector<int>> errors = {
      {"memfd_create", {EMFILE, ENFILE, ENOMEM, EPERM}},
      {"ftruncate", {EFBIG, EINTR, ENOSPC}},
      {"fcntl", {EPERM, EBUSY}},
      {"socket", {EMFILE, EAFNOSUPPORT, ENOBUFS}},
      {"bind", {EADDRINUSE, EACCES}},
      {"listen", {EADDRINUSE}},
      {"accept4", {EMFILE, EINTR, ECONNABORTED, EAGAIN, ENOMEM}},
      {"connect", {ECONNREFUSED, EAGAIN, EINTR, EACCES}},
      {"send", {EPIPE, EINTR, EAGAIN, ENOBUFS}},
      {"recv", {EAGAIN, EINTR, ECONNRESET}},
      {"sendmsg", {EPIPE, EINTR, ETOOMANYREFS, ENOBUFS}},
      {"recvmsg", {EAGAIN, EINTR, ENOMEM}},
      {"getsockopt", {ENOBUFS}},
      {"fstat", {EOVERFLOW}},
      {"mmap", {ENOMEM, EAGAIN, ENODEV}},
      {"madvise", {EAGAIN, EINVAL}},
      {"open", {EMFILE, EACCES}},
      {"pread", {EIO, EPERM}},
      {"poll", {EINTR, ENOMEM}},
      {"syscall", {EMFILE, ENOSYS, EINTR, EPERM, EINVAL}},
      {"operator new", {ENOMEM}},
  };
  return errors;
}

// Interrupted: nothing happened, and the same call may be made again.
bool is_transient(int error) { return error == EINTR; }

std::byte value_of(int rank, uint64_t step) { return std::byte(1 + 7 * static_cast<unsigned>(rank) + step); }

// Runs two steps of a gather and a reduction over pages that the group maps during the steps.
void train(const ShmOptions& options, ShmGroup& group) {
  const size_t page = ShmGroup::page_bytes();
  const auto world = static_cast<size_t>(options.world);
  const auto rank = static_cast<size_t>(options.rank);
  group.set_unit_name(0, "unit");
  for (uint64_t step = 1; step <= 2; ++step) {
    const size_t bytes = world * page;
    const uint64_t offset = (step - 1) * bytes;
    const GatherPost post = {step, 0, static_cast<uint32_t>(step - 1), offset, bytes};
    const cpu::GatherWindow window = group.gather_window(offset, bytes);
    group.acquire_slot(post, 1);
    window.shared[rank * page] = value_of(options.rank, step);
    group.post_gather(post);
    group.join_gather(post);
    for (int peer = 0; peer < options.world; ++peer) {
      require(window.isolated[static_cast<size_t>(peer) * page] == value_of(peer, step), "what a peer gathered");
    }
    window.isolated[0] = std::byte{255};  // a user's write, gone with the slot
    group.discard_private_pages(window.isolated, bytes);
    require(window.isolated[0] == value_of(0, step), "the write is gone");
    group.release_slot(static_cast<uint32_t>(step - 1), 1);

    group.scratch_window(options.rank, offset, page)[0] = value_of(options.rank, 10 * step);
    group.post_reduction(0, step, 5, offset);
    require(group.join_reduction(0, step, 5, step, true) == cpu::Joined::ready, "a flush waits");
    for (int peer = 0; peer < options.world; ++peer) {
      const std::byte found = group.scratch_window(peer, group.peer_scratch_offset(0, peer), page)[0];
      const uint64_t expected_offset = peer == options.rank ? offset : group.peer_scratch_offset(0, peer);
      require(expected_offset == offset && found == value_of(peer, 10 * step), "what a peer reduces");
    }
    group.consume_reduction(0, step);
    group.wait_consumed(0, step);
  }
  // No rank leaves while a peer may wait for it.
  group.post_gather({3, 0, 5, 0, page});
  group.join_gather({3, 0, 5, 0, page});
}

std::vector<std::string> open_files() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    // The directory being read, and the harness' pipes and files, are not the group's.
    if (!gone && target.find("/fd") == std::string::npos) found.push_back(target);
  }
  std::sort(found.begin(), found.end());
  return found;
}

struct Fault {
  int world;
  int victim;
  size_t function;
  int call;
  int error;
};

std::string text_of(const Fault& fault) {
  return "call " + std::to_string(fault.call) + " of " + faults::kFunctions[fault.function] + " fails (" +
         std::strerror(fault.error) + ") on rank " + std::to_string(fault.victim) + " of " +
         std::to_string(fault.world);
}

// Runs a rank. The fault occurs between entering the group and leaving it. Setup errors start with "refused: ".
void body_with(const ShmOptions& given, const Fault& fault) {
  ShmOptions options = given;
  options.exchange = [&given](const std::string& mine) {  // the harness' part
    const faults::Pause pause;
    return given.exchange(mine);
  };
  ranks::meet_all(options);
  const std::vector<std::string> before = open_files();
  std::string told;
  {
    std::unique_ptr<ShmGroup> group;
    if (options.rank == fault.victim) faults::arm(fault.function, fault.call, fault.error);
    try {
      std::string reason;
      group = ShmGroup::create(options, reason);
      if (group) {
        train(options, *group);
      } else {
        told = "refused: " + reason;
      }
    } catch (const std::bad_alloc& error) {
      told = std::string("failed: ") + error.what();
    } catch (const Error& error) {
      told = std::string("failed: ") + error.what();
    }
    group.reset();
    faults::disarm();
  }
  require(open_files() == before, "all descriptors are closed");
  if (!told.empty()) throw Error(told);
}

// Returns how many calls of each function a rank makes.
std::vector<std::vector<int>> calls_of(int world) {
  std::vector<std::vector<int>> found;
  for (int victim = 0; victim < world; ++victim) {
    const Fault none = {world, victim, kFunctions, 0, 0};
    const auto outcomes = ranks::run(ranks::fresh_options(world), [&](const ShmOptions& options) {
      body_with(options, none);
      std::string text;
      for (size_t i = 0; i < kFunctions; ++i) text += std::to_string(faults::num_calls(i)) + " ";
      throw Error(text);
    });
    std::vector<int> calls;
    std::stringstream text(outcomes[static_cast<size_t>(victim)].message);
    for (int num; text >> num;) calls.push_back(num);
    EXPECT_EQ(calls.size(), kFunctions) << outcomes[static_cast<size_t>(victim)].message;
    found.push_back(calls);
  }
  return found;
}

std::vector<Fault> all_faults(int world) {
  std::vector<Fault> found;
  const std::vector<std::vector<int>> calls = calls_of(world);
  for (int victim = 0; victim < world; ++victim) {
    for (size_t function = 0; function < kFunctions; ++function) {
      const std::vector<int>& errors = errors_of_functions().at(faults::kFunctions[function]);
      // Waits call these any number of times.
      const bool is_many = std::strcmp(faults::kFunctions[function], "syscall") == 0 ||
                           std::strcmp(faults::kFunctions[function], "poll") == 0;
      const int num = is_many ? std::min(calls[static_cast<size_t>(victim)][function], 6)
                              : calls[static_cast<size_t>(victim)][function];
      for (int call = 1; call <= num; ++call) {
        for (const int error : errors) found.push_back({world, victim, function, call, error});
      }
    }
  }
  return found;
}

// Returns true if the ranks continued.
bool try_fault(const Fault& fault) {
  SCOPED_TRACE(text_of(fault));
  const auto outcomes =
      ranks::run(ranks::fresh_options(fault.world), [&](const ShmOptions& options) { body_with(options, fault); });
  size_t num_refused = 0;
  size_t num_ok = 0;
  for (const ranks::Outcome& outcome : outcomes) {
    EXPECT_TRUE(outcome.exit_code == 0 || outcome.exit_code == 1) << "ended with " << outcome.exit_code;
    EXPECT_LT(outcome.seconds, kSoonS) << outcome.message;
    EXPECT_EQ(outcome.message.find("not true"), std::string::npos) << outcome.message;
    num_refused += outcome.message.starts_with("refused: ") ? 1 : 0;
    num_ok += outcome.ok ? 1 : 0;
  }
  if (num_ok == outcomes.size()) return true;
  const auto victim = static_cast<size_t>(fault.victim);
  EXPECT_FALSE(is_transient(fault.error)) << outcomes[victim].message;
  if (num_refused > 0) {
    for (const ranks::Outcome& outcome : outcomes) EXPECT_EQ(outcome.message, outcomes[0].message);
    return false;
  }
  // After a failed allocation, the rank itself has a std::bad_alloc, whose stack says where.
  for (const ranks::Outcome& outcome : outcomes) {
    if (outcome.message.find("bad_alloc") != std::string::npos && &outcome == &outcomes[victim]) continue;
    EXPECT_NE(outcome.message.find("rank " + std::to_string(fault.victim)), std::string::npos)
        << "not told: '" << outcome.message << "'; the rank that failed says: '" << outcomes[victim].message << "'";
  }
  return false;
}

class ShmFaults : public testing::TestWithParam<int> {};

// FSDP2X_FULL=1 tries every one of them.
TEST_P(ShmFaults, EveryCallFailsOnce) {
  std::vector<Fault> faults = all_faults(GetParam());
  const size_t stride = std::getenv("FSDP2X_FULL") != nullptr ? 1 : (faults.size() + 119) / 120;
  size_t num_tried = 0;
  size_t num_survived = 0;
  for (size_t i = 0; i < faults.size() && !testing::Test::HasFailure(); i += stride, ++num_tried) {
    num_survived += try_fault(faults[i]) ? 1 : 0;
  }
  RecordProperty("tried", static_cast<int>(num_tried));
  std::printf("%zu of %zu faults on %d ranks; the ranks went on after %zu\n", num_tried, faults.size(), GetParam(),
              num_survived);
  EXPECT_GT(num_survived, 0u);
  EXPECT_LT(num_survived, num_tried);
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmFaults, testing::Values(2, 3));

}  // namespace
}  // namespace fsdp2x
