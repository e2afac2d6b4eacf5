// The arithmetic of AdamW, shared by the CPU loops and the device kernels.
//
// The operations are torch's. Operations that torch rounds once (its lerp, addcmul, and add) are one fused
// multiply-add. Everything else is rounded separately. Gradients are multiplied by the step's `sign`, which is -1 to
// maximize.
#pragma once

#include "core/host_device.hpp"

namespace fsdp2x {

// One AdamW step in numbers rounded to float once.
struct AdamWStep {
  float decay = 1.0f;   // 1 - lr * weight_decay
  float weight = 0.0f;  // 1 - beta1
  float beta2 = 0.0f;
  float one_minus_beta2 = 0.0f;  // 1 - beta2
  float sqrt_bias2 = 1.0f;       // sqrt(1 - beta2^t)
  float eps = 0.0f;
  float neg_step_size = 0.0f;  // -lr / (1 - beta1^t)
  float sign = 1.0f;

  // Updates one element's moments by a gradient. torch interpolates from the nearer end.
  FSDP2X_HOST_DEVICE void update_moments(float gradient, float& exp_avg, float& exp_avg_sq) const {
    const bool from_average = weight < 0.5f;
    const float coefficient = from_average ? weight : weight - 1.0f;
    exp_avg = multiply_add(coefficient, gradient - exp_avg, from_average ? exp_avg : gradient);
    exp_avg_sq = multiply_add(one_minus_beta2 * gradient, gradient, exp_avg_sq * beta2);
  }

  // `second`: exp_avg_sq, or the largest one with amsgrad.
  FSDP2X_HOST_DEVICE float stepped(float param, float exp_avg, float second) const {
    const float denominator = square_root(second) / sqrt_bias2 + eps;
    return param * decay + neg_step_size * exp_avg / denominator;
  }
};

FSDP2X_HOST_DEVICE float largest_square(float before, float v) { return before >= v || before != before ? before : v; }

}  // namespace fsdp2x
