// Prints the first violation of the programs of up to three units, or nothing.
#include <cstdio>

#include "schedule/programs.hpp"

int main() {
  using namespace fsdp2x::programs;
  Count count;
  size_t turn = 0;
  try {
    for (const int num : {1, 2, 3}) {
      for_each_model(num, [&](const std::vector<UnitSpec>& units) {
        for_each_setting([&](Program program) {
          if (turn++ % (num < 3 ? 1 : 211) != 0) return;
          program.units = units;
          check(program, /*with_exceptions=*/true, count);
        });
      });
    }
  } catch (const Violation& violation) {
    std::puts(violation.what());
  }
  return 0;
}
