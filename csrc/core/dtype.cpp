// Names of the element types, as they appear in error messages.
#include "core/dtype.hpp"

namespace fsdp2x {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f64:
      return "f64";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::byte:
      return "byte";
  }
  return "unknown";
}

}  // namespace fsdp2x
