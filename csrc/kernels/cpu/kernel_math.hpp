// Shared by kernels.cpp and reduce.cpp: checks types, and chooses between dividing and multiplying.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "kernels/cpu/kernel_table.hpp"

namespace fsdp2x::cpu {

inline void require_summable(DType type, const char* operation) {
  if (type == DType::byte) {
    throw Error(std::string("kernels: cannot ") + operation + " elements of type byte: bytes are only moved");
  }
}

// Returns whether x * (1 / divisor) has the same bits as x / divisor for every x. That holds if the divisor is a power
// of two and its reciprocal is normal as well.
template <class A>
bool reciprocal_is_exact(A divisor) {
  int exponent = 0;
  return std::fabs(std::frexp(divisor, &exponent)) == A(0.5) && std::isnormal(divisor) && std::isnormal(A(1) / divisor);
}

template <class A>
void divide_all(const Arithmetic<A>& ops, A* values, int64_t numel, double divisor) {
  const A typed = static_cast<A>(divisor);
  if (typed == A(1)) return;
  if (reciprocal_is_exact(typed)) return ops.multiply(values, numel, A(1) / typed);
  ops.divide(values, numel, typed);
}

}  // namespace fsdp2x::cpu
