// Element types that the engine can cast between, and `byte` for types that it only moves.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp2x {

enum class DType : uint8_t { f32, f64, bf16, f16, byte };

// Returns the bytes of one element. `byte` counts as one: a tensor of any other type is stored as numel * itemsize
// bytes.
constexpr size_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::byte:
      return 1;
  }
  return 0;
}

const char* dtype_name(DType dtype);

}  // namespace fsdp2x
