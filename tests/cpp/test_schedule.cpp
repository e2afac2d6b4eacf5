// All small training programs on the schedule, with an exception at every effect. Each gather is released once, memory
// returns to its start, no gradient is silently lost or added twice, and ranks issue the same collectives.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "schedule/programs.hpp"

namespace fsdp2x {
namespace {

using programs::Count;
using programs::Program;
using programs::UnitSpec;

// Checks programs of `num` units. Takes every `stride`-th of the settings, with another start for each model.
Count check_all(int num, bool with_exceptions, size_t stride) {
  Count count;
  size_t turn = 0;
  programs::for_each_model(num, [&](const std::vector<UnitSpec>& units) {
    programs::for_each_setting([&](Program program) {
      if (turn++ % stride != 0) return;
      program.units = units;
      programs::check(program, with_exceptions, count);
    });
  });
  return count;
}

size_t stride_of(size_t usual) { return std::getenv("FSDP2X_FULL") != nullptr ? 1 : usual; }

TEST(SchedulePrograms, OneAndTwoUnitsRaiseAtEveryEffect) {
  for (const int num : {1, 2}) {
    const Count count = check_all(num, /*with_exceptions=*/true, 1);
    RecordProperty("programs_" + std::to_string(num), std::to_string(count.programs));
    RecordProperty("exceptions_" + std::to_string(num), std::to_string(count.exceptions));
    EXPECT_GT(count.exceptions, count.programs);
  }
}

TEST(SchedulePrograms, ThreeUnitsRaiseAtEveryEffect) {
  const Count count = check_all(3, /*with_exceptions=*/true, stride_of(61));
  RecordProperty("programs", std::to_string(count.programs));
  RecordProperty("exceptions", std::to_string(count.exceptions));
  EXPECT_GT(count.exceptions, count.programs);
}

TEST(SchedulePrograms, FourUnits) {
  const Count count = check_all(4, /*with_exceptions=*/false, stride_of(37));
  RecordProperty("programs", std::to_string(count.programs));
  EXPECT_GT(count.programs, 0U);
}

TEST(SchedulePrograms, TransitionsAreChecked) {
  programs::RecordedUnit unit(0, /*trains=*/true);
  programs::RecordedEffects effects({});
  Gathers gathers(effects);
  gathers.finish(unit);  // nothing has begun
  EXPECT_EQ(unit.param_state(), ParamState::sharded);
  gathers.begin(unit, ShardsNow::stand_still);
  gathers.begin(unit, ShardsNow::stand_still);  // once
  EXPECT_EQ(effects.num_gathered(), 1);
  gathers.reshard(unit);
  gathers.reshard(unit);
  EXPECT_EQ(effects.num_gathered(), 0);
}

}  // namespace
}  // namespace fsdp2x
