// Unit settings that must be the same on every rank.
#include "core/unit_settings.hpp"

#include <algorithm>
#include <bit>

namespace fsdp2x {

namespace {

constexpr uint64_t kFlagMask = (uint64_t{1} << kUnitFlagNames.size()) - 1;

std::string text_of(double factor) {
  if (factor == 0.0) return "the default";
  std::string text = std::to_string(factor);
  text.erase(std::max(text.find_last_not_of('0'), text.find('.') + 1) + 1);
  return text;
}

}  // namespace

uint64_t UnitSettings::packed() const {
  return (std::bit_cast<uint64_t>(divide_factor) & ~kFlagMask) | (flags & kFlagMask);
}

UnitSettings UnitSettings::unpacked(uint64_t word) {
  return {static_cast<uint32_t>(word & kFlagMask), std::bit_cast<double>(word & ~kFlagMask)};
}

std::string difference(const UnitSettings& own, const UnitSettings& theirs) {
  std::string text;
  const auto add = [&text](const std::string& name, const std::string& here, const std::string& there) {
    if (here != there) text += (text.empty() ? "" : ", ") + name + " (" + here + " and " + there + ")";
  };
  for (size_t i = 0; i < kUnitFlagNames.size(); ++i) {
    const auto flag = [i](const UnitSettings& settings) { return (settings.flags >> i & 1) != 0 ? "True" : "False"; };
    add(kUnitFlagNames[i], flag(own), flag(theirs));
  }
  add("gradient_divide_factor", text_of(own.divide_factor), text_of(theirs.divide_factor));
  return text;
}

}  // namespace fsdp2x
