// One optimizer step in numbers: everything that does not differ from element to element.
#pragma once

namespace fsdp2x {

// One AdamW step in numbers rounded to float once.
struct AdamWStep {
  float decay = 1.0f;   // 1 - lr * weight_decay
  float weight = 0.0f;  // 1 - beta1
  float beta2 = 0.0f;
  float rest2 = 0.0f;  // 1 - beta2
  float root = 1.0f;   // sqrt(1 - beta2^t)
  float eps = 0.0f;
  float minus_size = 0.0f;  // -lr / (1 - beta1^t)
  float sign = 1.0f;        // -1: the gradient's opposite (maximize)
};

// One step of gradient descent.
struct SgdStep {
  float weight_decay = 0.0f;
  float momentum = 0.0f;
  float rest = 1.0f;  // 1 - dampening
  float minus_lr = 0.0f;
  float sign = 1.0f;  // -1: the gradient's opposite (maximize)
};

// One step of Lion.
struct LionStep {
  float decay = 1.0f;  // 1 - lr * weight_decay
  float beta1 = 0.0f;
  float rest1 = 0.0f;  // 1 - beta1
  float beta2 = 0.0f;
  float rest2 = 0.0f;  // 1 - beta2
  float minus_lr = 0.0f;
  float sign = 1.0f;  // -1: the gradient's opposite (maximize)
};

// What happens to the momentum buffer: there is none; it becomes the gradient; it is updated. `nesterov` looks ahead.
enum class SgdMomentum { none, first, first_nesterov, later, later_nesterov };

}  // namespace fsdp2x
