// Names of the element types, as they appear in error messages.
#include "core/dtype.hpp"

#include <array>

namespace fsdp2x {

const char* dtype_name(DType dtype) {
  static constexpr std::array kNames = {"f32", "f64", "bf16", "f16", "byte"};
  return kNames.at(static_cast<size_t>(dtype));
}

}  // namespace fsdp2x
