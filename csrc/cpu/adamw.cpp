// Optimizer steps on top of the kernel table.
#include "cpu/adamw.hpp"

#include <algorithm>
#include <cstddef>
#include <string>

#include "core/error.hpp"
#include "core/layout.hpp"

namespace fsdp2x::cpu {

void adamw(const AdamWPiece& piece, const AdamWStep& step) {
  const KernelTable& table = kernel_table();
  const auto loop = table.adamw[piece.max_exp_avg_sq != nullptr];
  if (piece.type == DType::f32) {
    loop(static_cast<float*>(piece.param), static_cast<const float*>(piece.grad), piece.exp_avg, piece.exp_avg_sq,
         piece.max_exp_avg_sq, piece.numel, step);
    return;
  }
  if (piece.type != DType::bf16 && piece.type != DType::f16) {
    throw Error(std::string("adamw: parameters of type ") + dtype_name(piece.type) + "; expected f32, bf16 or f16");
  }
  const int type = static_cast<int>(piece.type);
  const size_t bytes = dtype_bytes(piece.type);
  alignas(kAlignBytes) float param[kTileNumel];
  alignas(kAlignBytes) float grad[kTileNumel];
  for (int64_t begin = 0; begin < piece.numel; begin += kTileNumel) {
    const int64_t count = std::min(kTileNumel, piece.numel - begin);
    std::byte* out = static_cast<std::byte*>(piece.param) + static_cast<size_t>(begin) * bytes;
    table.f32.load[type](param, out, count);
    table.f32.load[type](grad, static_cast<const std::byte*>(piece.grad) + static_cast<size_t>(begin) * bytes, count);
    float* largest = piece.max_exp_avg_sq == nullptr ? nullptr : piece.max_exp_avg_sq + begin;
    loop(param, grad, piece.exp_avg + begin, piece.exp_avg_sq + begin, largest, count, step);
    table.f32.store[type](out, param, count);
  }
}

void sgd(const SgdPiece& piece, const SgdStep& step) {
  const auto loop = kernel_table().sgd[step.weight_decay != 0.0f][static_cast<int>(piece.momentum)];
  loop(piece.param, piece.grad, piece.buffer, piece.numel, step);
}

}  // namespace fsdp2x::cpu
