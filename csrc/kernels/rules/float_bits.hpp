// Conversions between float and the 16-bit types: by instructions on the device, by hand with the same bits on the
// host. Rounding is to nearest even. NaN stays NaN: the device returns one NaN for all, the host keeps the upper bits.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cstdint>

#include "core/host_device.hpp"

namespace fsdp2x {

FSDP2X_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FSDP2X_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

FSDP2X_HOST_DEVICE float bf16_to_float(uint16_t code) { return float_of(static_cast<uint32_t>(code) << 16); }

FSDP2X_HOST_DEVICE uint16_t float_to_bf16(float value) {
#ifdef __CUDA_ARCH__
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  // A selection, because a branch would not vectorize.
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
#endif
}

FSDP2X_HOST_DEVICE float f16_to_float(uint16_t code) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(code));
#else
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  const uint32_t exponent = (code >> 10) & 31u;
  const uint32_t mantissa = code & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
#endif
}

FSDP2X_HOST_DEVICE uint16_t float_to_f16(float value) {
#ifdef __CUDA_ARCH__
  return __half_as_ushort(__float2half_rn(value));
#else
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t code = 0;
  if (magnitude > 0x7f800000u) {
    code = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // from half-way between 65504 and 65536 on
    code = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // normal: at least 2^-14
    code = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  } else {
    // Adding 0.5 leaves the steps of 2^-24, rounded to even by the addition, as the last bits.
    code = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  return static_cast<uint16_t>(sign | code);
#endif
}

}  // namespace fsdp2x
