// The arithmetic of optimizer steps, shared by the CPU loops and the device kernels.
//
// The operations are torch's. Operations that torch rounds once (its lerp, addcmul, and add) are one fused
// multiply-add. Everything else is rounded separately. Gradients are multiplied by the step's `sign`, which is -1 to
// maximize.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/host_device.hpp"

namespace fsdp2x {

// --- AdamW -----------------------------------------------------------------------------------------------------------

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

// --- optimizers of float32 with at most one value of state for each element ------------------------------------------

// A rule has the numbers of one step in float, and steps one element. Everything else (loops, kernels, the walk over
// parameters, the binding) is generated for each rule of FloatRules. A rule has:
//
//   kName, kState          `_C.<kName>_step`, and the key of the state that Python makes
//   of(...)                the rule of a parameter group, from the arguments that Python passes next to the parameters
//   keeps_state, begin     whether it has state, and the change to the first step, whose state is not yet set
//   kNumVariants, variant  loops that the CPU compiles separately; a device decides as it runs
//   reads_state, writes_state, step    of one variant
//   sign                   first factor of the gradients

struct SgdRule {
  static constexpr const char* kName = "sgd";
  static constexpr const char* kState = "momentum_buffer";
  // The momentum buffer does not exist, becomes the gradient, or is updated. `nesterov` looks ahead.
  enum Momentum : int32_t { none, first, first_nesterov, later, later_nesterov };
  static constexpr int kNumMomentum = 5;
  static constexpr int kNumVariants = 2 * kNumMomentum;  // each without and with weight decay

  float weight_decay = 0.0f;
  float momentum = 0.0f;
  float rest = 1.0f;  // 1 - dampening
  float minus_lr = 0.0f;
  float sign = 1.0f;
  Momentum buffer = none;

  static SgdRule of(double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize) {
    return {static_cast<float>(weight_decay),
            static_cast<float>(momentum),
            static_cast<float>(1.0 - dampening),
            static_cast<float>(-lr),
            maximize ? -1.0f : 1.0f,
            momentum == 0.0 ? none
            : nesterov      ? later_nesterov
                            : later};
  }

  bool keeps_state() const { return buffer != none; }
  void begin() { buffer = buffer == later_nesterov ? first_nesterov : first; }

  FSDP2X_HOST_DEVICE int variant() const { return 2 * buffer + (weight_decay != 0.0f ? 1 : 0); }
  FSDP2X_HOST_DEVICE static constexpr bool reads_state(int variant) { return variant / 2 >= later; }
  FSDP2X_HOST_DEVICE static constexpr bool writes_state(int variant) { return variant / 2 != none; }

  FSDP2X_HOST_DEVICE void step(int variant, float gradient, float& param, float& state) const {
    const bool looks_ahead = variant / 2 == first_nesterov || variant / 2 == later_nesterov;
    float d = gradient;
    if (variant % 2 != 0) d = multiply_add(weight_decay, param, d);
    if (writes_state(variant)) {
      state = reads_state(variant) ? multiply_add(rest, d, state * momentum) : d;
      d = looks_ahead ? multiply_add(momentum, state, d) : state;
    }
    param = multiply_add(minus_lr, d, param);
  }
};

// Chen et al., 2023, arXiv 2302.06675, algorithm 2.
struct LionRule {
  static constexpr const char* kName = "lion";
  static constexpr const char* kState = "exp_avg";
  static constexpr int kNumVariants = 1;

  float decay = 1.0f;  // 1 - lr * weight_decay
  float beta1 = 0.0f;
  float one_minus_beta1 = 0.0f;  // 1 - beta1
  float beta2 = 0.0f;
  float one_minus_beta2 = 0.0f;  // 1 - beta2
  float minus_lr = 0.0f;
  float sign = 1.0f;

  static LionRule of(double lr, double beta1, double beta2, double decay, bool maximize) {
    return {static_cast<float>(decay), static_cast<float>(beta1),       static_cast<float>(1.0 - beta1),
            static_cast<float>(beta2), static_cast<float>(1.0 - beta2), static_cast<float>(-lr),
            maximize ? -1.0f : 1.0f};
  }

  bool keeps_state() const { return true; }
  void begin() {}

  FSDP2X_HOST_DEVICE int variant() const { return 0; }
  FSDP2X_HOST_DEVICE static constexpr bool reads_state(int) { return true; }
  FSDP2X_HOST_DEVICE static constexpr bool writes_state(int) { return true; }

  FSDP2X_HOST_DEVICE void step(int, float gradient, float& param, float& state) const {
    const float way = multiply_add(one_minus_beta1, gradient, state * beta1);
    state = multiply_add(one_minus_beta2, gradient, state * beta2);
    // keep NaN, so that a lost gradient is visible
    const float direction = way > 0.0f ? 1.0f : way < 0.0f ? -1.0f : way;
    param = multiply_add(minus_lr, direction, param * decay);
  }
};

template <class... Rules>
struct RuleList {};
using FloatRules = RuleList<SgdRule, LionRule>;

template <class Rule, class... Rules>
constexpr int index_of(RuleList<Rules...>) {
  int index = 0, found = -1;
  ((found = std::is_same_v<Rule, Rules> ? index : found, ++index), ...);
  return found;
}

// Returns where the variants of `Rule` begin among those of all rules.
template <class Rule, class... Rules>
constexpr int first_variant(RuleList<Rules...>) {
  int next = 0, found = -1;
  ((found = std::is_same_v<Rule, Rules> ? next : found, next += Rules::kNumVariants), ...);
  return found;
}

template <class... Rules>
constexpr int num_variants(RuleList<Rules...>) {
  return (0 + ... + Rules::kNumVariants);
}

}  // namespace fsdp2x
