// 8-bit moments: blocks of 256 elements, each with a scale (the largest magnitude), and a code for each element.
//
//   code 1 .. top of a block with scale s:  s * (code / top)^4      top: 127 with a sign (bits as int8), 255 without
//
// The fourth power spreads the codes over magnitudes of 1 to 2^-28 (2^-32), with steps of 3 % (1.6 %) at the upper end.
// Square roots are rounded correctly everywhere, so that every processor has the same codes. The largest element of a
// block is exact. Encoding decoded values gives the same codes again, so loading and saving a state changes no bit.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace fsdp2x {

constexpr int kMomentBlock = 256;
constexpr float kMinMomentScale = 0x1p-126f;  // the inverse of smaller scales is no float, so they become zero

// Codes of exp_avg have a sign, those of exp_avg_sq do not.
template <bool kSigned>
constexpr float kTopCode = kSigned ? 127.0f : 255.0f;
template <bool kSigned>
constexpr float kCodeStep = 1.0f / kTopCode<kSigned>;
static_assert(kTopCode<true> * kCodeStep<true> == 1.0f && kTopCode<false> * kCodeStep<false> == 1.0f);

// Returns the larger one of a peak and a magnitude, NaN if either is.
FSDP2X_HOST_DEVICE float larger_peak(float peak, float magnitude) {
  return peak >= magnitude || peak != peak ? peak : magnitude;
}

// Returns the scale of a block whose largest magnitude is `peak`. If it is not finite, the complete block becomes NaN.
FSDP2X_HOST_DEVICE float moment_scale(float peak) { return peak < kMinMomentScale ? 0.0f : peak; }

// Returns a magnitude as a part of its block's scale.
template <bool kSigned>
FSDP2X_HOST_DEVICE float moment_part(float code) {
  const float root = code * kCodeStep<kSigned>;
  return root * root * (root * root);
}

template <bool kSigned>
FSDP2X_HOST_DEVICE float decoded_moment(uint8_t bits, float scale) {
  const int code = kSigned ? static_cast<int8_t>(bits) : bits;
  const float part = moment_part<kSigned>(static_cast<float>(code < 0 ? -code : code));
  return (code < 0 ? -part : part) * scale;
}

// Returns the factor for a block's moments before they are encoded.
FSDP2X_HOST_DEVICE float inverse_moment_scale(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// Rounds to the nearest code. With `kStochastic`, rounds up with the probability that is right on average, for
// random_bits < 2^16. A square above zero never becomes zero, because a division by its root could give any size.
template <bool kSigned, bool kStochastic>
FSDP2X_HOST_DEVICE uint8_t encoded_moment(float value, float inverse_scale, uint32_t random_bits) {
  const float magnitude = value < 0.0f ? -value : value;
  const float part = magnitude * inverse_scale;
  const float root = square_root(square_root(part)) * kTopCode<kSigned>;
  const float place = root < kTopCode<kSigned> ? root : kTopCode<kSigned>;  // NaN: the top
  // Integers and selections instead of branches, so that loops over elements vectorize.
  int code = static_cast<int>(kStochastic ? place : place + 0.5f);
  if constexpr (kStochastic) {
    const auto lower = static_cast<float>(code);
    const float low = moment_part<kSigned>(lower), high = moment_part<kSigned>(lower + 1.0f);
    code += static_cast<int>(static_cast<float>(random_bits) * (high - low) < (part - low) * 65536.0f);
    code = code < static_cast<int>(kTopCode<kSigned>) ? code : static_cast<int>(kTopCode<kSigned>);
  }
  const int sign = -static_cast<int>(kSigned && value < 0.0f);
  const int least = static_cast<int>(!kSigned && value > 0.0f);
  code = ((code > least ? code : least) ^ sign) - sign;
  return static_cast<uint8_t>(code);
}

}  // namespace fsdp2x
