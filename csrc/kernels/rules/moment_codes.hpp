// Moments in 8 bits: blocks of 256 elements with a scale, their largest magnitude, and a code for each element.
//
//   code 1 .. top of a block with scale s:  s * (code / top)^4      top: 127 with a sign (bits as int8), 255 without
//
// The fourth power spreads the codes over magnitudes of 1 to 2^-28 (2^-32), with steps of 3 % (1.6 %) at the upper end.
// Square roots are rounded correctly everywhere, so that every processor has the same codes. The largest element of a
// block is exact, and what codes say has these codes again: reading and writing a state changes no bit.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace fsdp2x {

constexpr int kMomentBlock = 256;
constexpr float kMinMomentScale = 0x1p-126f;  // of what is smaller the inverse has no float: it becomes zero

// Codes of exp_avg have a sign, those of exp_avg_sq do not.
template <bool kSigned>
constexpr float kTopCode = kSigned ? 127.0f : 255.0f;
template <bool kSigned>
constexpr float kCodeStep = 1.0f / kTopCode<kSigned>;
static_assert(kTopCode<true> * kCodeStep<true> == 1.0f && kTopCode<false> * kCodeStep<false> == 1.0f);

// The larger one of a peak and a magnitude; NaN if either is.
FSDP2X_HOST_DEVICE float larger_peak(float peak, float magnitude) {
  return peak >= magnitude || peak != peak ? peak : magnitude;
}

// What the scale of a block is whose largest magnitude is `peak`. Not finite: all of the block is lost, and says so.
FSDP2X_HOST_DEVICE float moment_scale(float peak) { return peak < kMinMomentScale ? 0.0f : peak; }

// A magnitude as a part of its block's scale.
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

// What moments of a block are multiplied with before they are encoded.
FSDP2X_HOST_DEVICE float inverse_moment_scale(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// To the nearest code, or with `kStochastic` up with the probability that is right on average, for random_bits < 2^16.
// A square above zero never becomes zero: what is divided by its root would be any size.
template <bool kSigned, bool kStochastic>
FSDP2X_HOST_DEVICE uint8_t encoded_moment(float value, float inverse_scale, uint32_t random_bits) {
  const float magnitude = value < 0.0f ? -value : value;
  const float part = magnitude * inverse_scale;
  const float root = square_root(square_root(part)) * kTopCode<kSigned>;
  const float place = root < kTopCode<kSigned> ? root : kTopCode<kSigned>;  // NaN: the top
  // Integers and selections instead of branches: loops over elements are vectors.
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
