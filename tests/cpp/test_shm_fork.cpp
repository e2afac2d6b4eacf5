// A forked child has its parent's group in its memory, but is not its rank: it can neither use the group nor end it.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "ranks.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {
namespace {

using cpu::GatherPost;
using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::expect_all_ok;
using ranks::fresh_options;
using ranks::require;

// Runs `body` in a forked child. An exception in it also fails the parent.
void in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    int code = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in a forked child: %s\n", error.what());
      code = 1;
    }
    ::_exit(code);
  }
  int status = 0;
  require(::waitpid(child, &status, 0) == child, "the child ended");
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child was content");
}

// All calls of a rank, by name.
std::vector<std::pair<std::string, std::function<void(ShmGroup&)>>> all_calls() {
  const GatherPost post = {2, 0, 0, 0, 4096};
  return {
      {"acquire_slot", [=](ShmGroup& group) { group.acquire_slot(post, 2); }},
      {"post_gather", [=](ShmGroup& group) { group.post_gather(post); }},
      {"gather_is_complete", [=](ShmGroup& group) { group.gather_is_complete(post); }},
      {"join_gather", [=](ShmGroup& group) { group.join_gather(post); }},
      {"release_slot", [](ShmGroup& group) { group.release_slot(0, 1); }},
      {"slot_is_released", [](ShmGroup& group) { group.slot_is_released(0, 1); }},
      {"shard_views", [](ShmGroup& group) { group.shard_views(0, 4096, {}); }},
      {"isolated_window", [](ShmGroup& group) { group.isolated_window(0, 4096); }},
      {"post_reduction", [](ShmGroup& group) { group.post_reduction(0, 1, 7, 0); }},
      {"join_reduction", [](ShmGroup& group) { group.join_reduction(0, 1, 7, 0, true); }},
      {"peer_scratch_offset", [](ShmGroup& group) { group.peer_scratch_offset(0, 0); }},
      {"consume_reduction", [](ShmGroup& group) { group.consume_reduction(0, 1); }},
      {"reduction_is_consumed", [](ShmGroup& group) { group.reduction_is_consumed(0, 1); }},
      {"wait_consumed", [](ShmGroup& group) { group.wait_consumed(0, 1); }},
      {"wait_consumed_in_order", [](ShmGroup& group) { group.wait_consumed_in_order(0, 1, 1); }},
      {"publish_progress", [](ShmGroup& group) { group.publish_progress(9); }},
      {"gather_window", [](ShmGroup& group) { group.gather_window(0, 4096); }},
      {"scratch_window", [](ShmGroup& group) { group.scratch_window(0, 0, 4096); }},
      {"discard_private_pages",
       [](ShmGroup& group) { group.discard_private_pages(reinterpret_cast<std::byte*>(&group), 1); }},
  };
}

TEST(ShmFork, EveryUseInAChildIsRefusedAndTheParentGoesOn) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const auto window = group->gather_window(0, 4096);
    if (options.rank == 0) std::memset(window.shared, 1, 4096);
    const GatherPost post = {1, 0, 0, 0, 4096};
    group->acquire_slot(post, 1);
    group->post_gather(post);
    group->join_gather(post);
    in_child([&] {
      for (const auto& [name, call] : all_calls()) {
        try {
          call(*group);
        } catch (const Error& error) {
          const std::string text = error.what();
          require(text.find("a forked child (pid ") != std::string::npos, name + ": " + text);
          require(text.find("spawn") != std::string::npos, name + " says what to do: " + text);
          continue;
        }
        require(false, name + " was refused");
      }
      group->fail("nobody hears this");
    });
    // The gather after the child: the parent's rank did not change.
    group->release_slot(0, 1);
    const GatherPost next = {2, 0, 0, 0, 4096};
    group->acquire_slot(next, 2);
    if (options.rank == 0) std::memset(window.shared, 2, 4096);
    group->post_gather(next);
    group->join_gather(next);
    require(window.isolated[100] == std::byte{2}, "the second gather's bytes");
    group->release_slot(0, 2);
  }));
}

// A data loader's worker ends with the group in its memory.
TEST(ShmFork, TheEndOfAChildIsNotTheRanks) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    auto group = ranks::enter(options);
    const GatherPost post = {1, 0, 0, 0, 4096};
    if (options.rank == 0) {
      in_child([&] { group.reset(); });
      ranks::sleep_ms(100);
      group->post_gather(post);
    } else {
      group->post_gather(post);
      group->join_gather(post);
    }
    ranks::meet_all(options);
  }));
}

// The windows do not belong to the child. Its own mappings may take their place, and the group's end in the child must
// not unmap these.
TEST(ShmFork, AChildHasNoWindowsAndMayUseTheirPlace) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    auto group = ranks::enter(options);
    const size_t page = ShmGroup::page_bytes();
    const auto window = group->gather_window(0, 4 * page);
    in_child([&] {
      unsigned char resident = 0;
      for (std::byte* view : {window.shared, window.isolated}) {
        require(::mincore(view, page, &resident) != 0 && errno == ENOMEM, "no window");
        void* own =
            ::mmap(view, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        require(own == view, "the place is free");
        view[5] = std::byte{7};
      }
      group.reset();
      require(window.shared[5] == std::byte{7} && window.isolated[5] == std::byte{7}, "memory of the child's own");
    });
    window.shared[0] = std::byte{1};
    require(window.isolated[0] == std::byte{1}, "the parent has its windows");
  }));
}

// A grandchild is no rank either.
TEST(ShmFork, GenerationsAreToldApart) {
  const cpu::ProcessGuard guard;
  require(guard.is_here(), "the process that made it");
  in_child([&] {
    require(!guard.is_here(), "a child");
    const cpu::ProcessGuard own;
    require(own.is_here(), "the child's own");
    in_child([&] { require(!guard.is_here() && !own.is_here(), "a grandchild"); });
    own.require("stand here");
  });
  guard.require("stand here");
}

}  // namespace
}  // namespace fsdp2x
