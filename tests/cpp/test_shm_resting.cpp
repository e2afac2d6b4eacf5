// Shards that are stored in the slot, docs/engine/resting_shards.md: the contents of each view, and of a child's.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <memory>
#include <vector>

#include "ranks.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {
namespace {

using cpu::ShmGroup;
using cpu::ShmOptions;
using ranks::expect_all_ok;
using ranks::fresh_options;
using ranks::require;

// Rank r owns the r-th quarter of each of 3.5 pages. It sees what it has written, and its peer sees what is published.
TEST(ShmResting, RowsThatRestArePublishedByThePage) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const size_t page = ShmGroup::page_bytes();
    std::vector<cpu::SlotRows> rows, of_peer;
    for (size_t i = 0; i < 14; ++i) {
      (static_cast<int>(i) % 2 == options.rank ? rows : of_peer).push_back({i * page / 4, page / 4 - 8});
    }
    const auto views = group->shard_views(0, 4 * page, rows);
    require(views->bytes() == 4 * page, "both views have the whole slot");
    for (const cpu::SlotRows& row : rows) std::memset(views->shared() + row.offset, 1 + options.rank, row.bytes);
    ranks::meet_all(options);
    require(group->written(*views).empty(), "nothing is this rank's alone");
    const auto shows = [&](const std::byte* view, const std::vector<cpu::SlotRows>& which, size_t i, int value) {
      const auto* begin = view + which[i].offset;
      return std::all_of(begin, begin + which[i].bytes, [=](std::byte b) { return b == std::byte(value); });
    };
    require(shows(views->isolated(), of_peer, 2, 2 - options.rank), "the peer's rows");
    ranks::meet_all(options);

    // In the second page, and on both sides of the border to the third.
    std::memset(views->isolated() + rows[2].offset, 7, rows[2].bytes);
    std::memset(views->isolated() + 2 * page - 1, 9, 1);  // not a row of this rank, so it stays unchanged
    ranks::meet_all(options);
    require(shows(views->isolated(), rows, 2, 7), "the writer sees its write");
    require(shows(views->shared(), rows, 2, 1 + options.rank), "nobody else");
    require(shows(views->shared(), of_peer, 2, 2 - options.rank), "not the peer's either");
    const std::vector<cpu::PageRun> runs = group->written(*views);
    require(runs.size() == 1 && runs[0].begin == views->isolated() + page && runs[0].bytes == page, "one page");
    ranks::meet_all(options);
    group->publish(*views, runs);
    ranks::meet_all(options);
    require(group->written(*views).empty(), "all is published");
    require(shows(views->isolated(), rows, 2, 7) && shows(views->isolated(), of_peer, 2, 7), "to everybody");
    require(shows(views->isolated(), rows, 1, 1 + options.rank), "rows beside it are as they were");
    require(views->isolated()[2 * page - 1] == std::byte{0}, "bytes between the rows are nobody's");

    ranks::meet_all(options);
    if (options.rank == 0) group->give_back(*views);
    ranks::meet_all(options);
    const auto& of_0 = options.rank == 0 ? rows : of_peer;
    const auto& of_1 = options.rank == 0 ? of_peer : rows;
    for (size_t i = 0; i < rows.size(); ++i) {
      require(shows(views->shared(), of_0, i, 0), "what was given back is zero");
      require(shows(views->shared(), of_1, i, i == 2 ? 7 : 2), "other rows are not");
    }
  }));
}

// A child has its own copy of resting rows, as they were at the fork. Without keep_for_child() it has none.
TEST(ShmResting, AChildHasTheRowsThatRest) {
  expect_all_ok(ranks::run(fresh_options(2), [](const ShmOptions& options) {
    const auto group = ranks::enter(options);
    const size_t bytes = 3 * ShmGroup::page_bytes();
    const auto views = group->shard_views(0, bytes, {{100, bytes - 200}});
    ranks::meet_all(options);
    if (options.rank != 0) return;
    std::memset(views->shared() + 100, 5, bytes - 200);
    int forth[2], back[2];
    require(::pipe(forth) == 0 && ::pipe(back) == 0, "pipes");
    require(views->keep_for_child(), "the system hands pages on");
    const pid_t child = ::fork();
    if (child == 0) {
      char byte = 0;
      bool ok = ::read(forth[0], &byte, 1) == 1;  // the parent has changed them
      for (size_t i = 100; i < bytes - 100; ++i) ok = ok && views->isolated()[i] == std::byte{5};
      std::memset(views->isolated() + 100, 6, bytes - 200);
      ::_exit(ok && ::write(back[1], &byte, 1) == 1 ? 0 : 1);
    }
    views->end_fork();
    std::memset(views->shared() + 100, 8, bytes - 200);
    group->publish(*views, {});
    char byte = 1;
    require(::write(forth[1], &byte, 1) == 1 && ::read(back[0], &byte, 1) == 1, "the child has looked, and written");
    int status = 0;
    require(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "it saw its own");
    require(views->shared()[200] == std::byte{8}, "what a child writes is not the parent's");
    const pid_t second = ::fork();
    if (second == 0) {
      ::signal(SIGSEGV, [](int) { ::_exit(9); });
      ::_exit(static_cast<int>(const_cast<volatile std::byte&>(views->isolated()[200])));
    }
    require(::waitpid(second, &status, 0) == second && WIFEXITED(status) && WEXITSTATUS(status) == 9, "no rows");
  }));
}

}  // namespace
}  // namespace fsdp2x
