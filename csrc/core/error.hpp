// The only exception type of the engine. The binding maps it to Python's RuntimeError.
#pragma once

#include <stdexcept>
#include <string>

namespace fsdp2x {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what) : std::runtime_error(what) {}
};

}  // namespace fsdp2x
