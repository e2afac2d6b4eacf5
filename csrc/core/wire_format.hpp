// Numbers in fewer bits on their way between ranks: blocks of 256 elements with one fp32 scale each.
//
//   int8   value = code * scale            codes -127 .. 127           scale = largest magnitude / 127
//   fp8    value = float(code) * scale     e4m3: 3 bits of mantissa    scale = largest magnitude / 448
//   bf16   value                           no scale
//
// Codes are the nearest ones, ties to even. A zero block has codes zero and scale 1. A block with an infinity or a NaN
// becomes NaN completely. Blocks begin with a rank's rows of a parameter, so none crosses ranks or parameters.
//
// The rounding error may be kept and added to the next values (error feedback). That takes 8 more bits for each
// element, in steps of 1 / 254 of the scale, since no error is larger than half of it.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace fsdp2x {

enum class WireFormat : uint8_t { plain, int8, fp8, bf16 };  // plain: in the compute or reduce dtype

constexpr int kWireBlock = 256;
constexpr float kWireErrorSteps = 254.0f;  // between two codes
// Adding and subtracting it rounds magnitudes below 2^22 to the nearest integer, ties to even.
constexpr float kWholeNumbers = 12582912.0f;

constexpr int64_t num_wire_blocks(int64_t numel) { return (numel + kWireBlock - 1) / kWireBlock; }
constexpr bool has_scales(WireFormat format) { return format == WireFormat::int8 || format == WireFormat::fp8; }
constexpr float top_wire_code(WireFormat format) { return format == WireFormat::fp8 ? 448.0f : 127.0f; }

FSDP2X_HOST_DEVICE float wire_scale(float peak, float top) {
  const float scale = peak / top;
  return scale == 0.0f ? 1.0f : scale;  // zero, or too small for a scale
}

// Clamps to the range of the codes. NaN becomes zero, because its block's scale is NaN.
FSDP2X_HOST_DEVICE float wire_place(float value, float scale, float top) {
#ifdef __CUDA_ARCH__
  // A product, as in kernels/cuda/bodies/element.hpp. It may round differently below 2^-126, but the code there is
  // zero.
  const auto place = static_cast<float>(static_cast<double>(value) * (1.0 / static_cast<double>(scale)));
#else
  const float place = value / scale;
#endif
  const float low = place < -top ? -top : place;
  const float bounded = low > top ? top : low;
  return bounded == bounded ? bounded : 0.0f;
}

FSDP2X_HOST_DEVICE float nearest_whole(float value) { return (value + kWholeNumbers) - kWholeNumbers; }

FSDP2X_HOST_DEVICE uint8_t encoded_int8(float value, float scale) {
  return static_cast<uint8_t>(static_cast<int8_t>(static_cast<int>(nearest_whole(wire_place(value, scale, 127.0f)))));
}

FSDP2X_HOST_DEVICE float decoded_int8(uint8_t code, float scale) {
  return static_cast<float>(static_cast<int8_t>(code)) * scale;
}

// Encodes e4m3 without infinities. Both cases are computed and one is selected, so that loops over elements vectorize.
FSDP2X_HOST_DEVICE uint8_t encoded_fp8(float value, float scale) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, wire_place(value, scale, 448.0f));
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const float small = magnitude < 0x3c800000u ? __builtin_bit_cast(float, magnitude) : 0.0f;
  const uint32_t subnormal = static_cast<uint32_t>(static_cast<int>(nearest_whole(small * 512.0f)));
  return static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? subnormal : normal));  // below 2^-6
}

FSDP2X_HOST_DEVICE float decoded_fp8(uint8_t code, float scale) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t sign = (code & 0x80u) << 24;
  const uint32_t subnormal = __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int>(magnitude)) * 0x1p-9f);
  const uint32_t normal = (magnitude << 20) + (120u << 23);
  const uint32_t is_small = 0u - ((magnitude - 8u) >> 31);  // all bits or none, because a branch would not vectorize
  return __builtin_bit_cast(float, (subnormal & is_small) | (normal & ~is_small) | sign) * scale;
}

template <WireFormat kFormat>
FSDP2X_HOST_DEVICE uint8_t encoded_wire(float value, float scale) {
  return kFormat == WireFormat::fp8 ? encoded_fp8(value, scale) : encoded_int8(value, scale);
}

template <WireFormat kFormat>
FSDP2X_HOST_DEVICE float decoded_wire(uint8_t code, float scale) {
  return kFormat == WireFormat::fp8 ? decoded_fp8(code, scale) : decoded_int8(code, scale);
}

// Returns the scale of a block's errors. 0 if the block is lost, so that it does not spoil the next one.
FSDP2X_HOST_DEVICE float wire_error_scale(float scale) {
  return scale - scale == 0.0f ? scale / kWireErrorSteps : 0.0f;
}

}  // namespace fsdp2x
