// Model checking of the schedule between ranks. 2 and 3 ranks run it over the real protocol of shared memory, and over
// a process group, in every order of their accesses within a number of delays.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "model/schedule_ranks.hpp"

namespace fsdp2x {
namespace {

using programs::Program;

struct Case {
  const char* name;
  Program program;
  int num_ranks;
  int max_delays;
  // Changes a rank's program.
  std::function<void(int rank, Program&)> change = [](int, Program&) {};
};
std::ostream& operator<<(std::ostream& out, const Case& one) { return out << one.name << one.num_ranks; }

Program chain(int num, bool is_collective) {
  Program program;
  for (int i = 0; i < num; ++i) program.units.push_back({i - 1, true, false, true});
  program.connection.is_collective = is_collective;
  return program;
}

Program siblings(int num, bool is_collective) {
  Program program = chain(num, is_collective);
  for (auto& unit : program.units) unit.parent = std::min(unit.parent, 0);
  return program;
}

// The unit gets no gradient on rank 1.
void leave_out(int rank, Program& program) {
  if (rank == 1) program.without_gradient = static_cast<int>(program.units.size()) - 1;
}

void expect_all_well(const Case& one, model::Options options, const std::function<void()>& begin,
                     const std::function<void(int)>& run) {
  options.world = one.num_ranks;
  options.max_delays = one.max_delays;
  options.max_states = 3'000'000;
  const model::Result result = model::explore(options, begin, run, [](const model::Ends& ends) {
    for (const std::string& end : ends) model::require(end.empty(), "no error, got: " + end);
  });
  EXPECT_EQ(result.violation, "");
  EXPECT_TRUE(result.is_complete) << "more than " << result.num_states << " states";
  EXPECT_GT(result.num_ends, 0U);
  std::printf("[          ] %llu states, %llu runs\n", static_cast<unsigned long long>(result.num_states),
              static_cast<unsigned long long>(result.num_runs));
}

class OverSharedMemory : public testing::TestWithParam<Case> {};

TEST_P(OverSharedMemory, RanksEndWell) {
  const Case& one = GetParam();
  const auto world = std::make_unique<model::World>(one.num_ranks);
  std::vector<std::unique_ptr<model::ModelRank>> ranks;
  model::Options options;
  options.name = [&](const void* address) { return model::name_of(*world, one.num_ranks, address); };
  expect_all_well(
      one, options,
      [&] {
        ranks.clear();
        for (int rank = 0; rank < one.num_ranks; ++rank) {
          ranks.push_back(std::make_unique<model::ModelRank>(*world, rank, one.num_ranks));
        }
      },
      [&](int rank) {
        Program program = one.program;
        one.change(rank, program);
        programs::Rank<model::ProtocolEffects> runs(program, program.connection, *ranks[static_cast<size_t>(rank)]);
        runs.step();
        if (one.num_ranks == 2) runs.step();  // slots, scratches and records serve again
      });
}

INSTANTIATE_TEST_SUITE_P(Programs, OverSharedMemory,
                         testing::Values(Case{"chain", chain(2, false), 2, 2},
                                         Case{"siblings", siblings(3, false), 2, 1},
                                         Case{"without_a_gradient", siblings(3, false), 2, 1, leave_out},
                                         Case{"chain", chain(2, false), 3, 1},
                                         Case{"without_a_gradient", chain(2, false), 3, 1, leave_out}),
                         testing::PrintToStringParamName());

class OverProcessGroup : public testing::TestWithParam<Case> {};

TEST_P(OverProcessGroup, RanksIssueTheSameCollectives) {
  const Case& one = GetParam();
  // Made once: words are known by their addresses, and the explorer has their values.
  const auto world = std::make_unique<model::GroupWorld>(one.num_ranks);
  expect_all_well(
      one, {}, [] {},
      [&](int rank) {
        Program program = one.program;
        one.change(rank, program);
        programs::Rank<model::GroupEffects> runs(program, program.connection, *world, rank);
        runs.step();
        if (one.num_ranks == 2) runs.step();
      });
}

INSTANTIATE_TEST_SUITE_P(Programs, OverProcessGroup,
                         testing::Values(Case{"chain", chain(3, true), 2, 3}, Case{"siblings", siblings(3, true), 2, 3},
                                         Case{"without_a_gradient", siblings(3, true), 2, 3, leave_out},
                                         Case{"siblings", siblings(3, true), 3, 2},
                                         Case{"without_a_gradient", siblings(3, true), 3, 2, leave_out}),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace fsdp2x
