// Copy plans on any device.
#include "engine/memory/device_copy.hpp"

#include <algorithm>

#include "engine/torch/parallel.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x {

namespace {

at::Tensor view_of(at::Device device, DType type, void* base, size_t offset, int64_t count, int64_t numel,
                   int64_t stride) {
  const at::TensorOptions options = at::TensorOptions().dtype(torch_dtype(type)).device(device);
  // The device is passed because torch would otherwise ask the driver for it.
  return at::for_blob(static_cast<std::byte*>(base) + offset, {count, numel})
      .strides({stride, 1})
      .options(options)
      .target_device(device)
      .make_tensor();
}

}  // namespace

at::ScalarType torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return at::kFloat;
    case DType::f64:
      return at::kDouble;
    case DType::bf16:
      return at::kBFloat16;
    case DType::f16:
      return at::kHalf;
    case DType::byte:
      return at::kByte;
  }
  return at::kByte;
}

void run_copies_on(at::Device device, const std::vector<Copy>& copies, const void* src, void* dst) {
  if (device.is_cpu()) {
    int64_t total = 0;
    for (const Copy& copy : copies) total += copy.count * copy.piece_numel;
    if (total <= kGrainNumel) return cpu::run_copies(copies, src, dst);
    Items items;
    for (const Copy& copy : copies) items.add(copy.count * copy.piece_numel);
    return items.for_each_range(
        [&](size_t i, int64_t begin, int64_t end) { cpu::run_copy(copies[i], begin, end, src, dst); });
  }
  for (const Copy& copy : copies) {
    view_of(device, copy.dst, dst, copy.dst_offset, copy.count, copy.piece_numel, copy.dst_stride)
        .copy_(view_of(device, copy.src, const_cast<void*>(src), copy.src_offset, copy.count, copy.piece_numel,
                       copy.src_stride));
  }
}

void add_on(at::Device device, const std::vector<Copy>& copies, const void* src, void* dst) {
  for (const Copy& copy : copies) {
    if (device.is_cpu()) {
      const auto at = [](int64_t index, DType type) { return static_cast<size_t>(index) * dtype_bytes(type); };
      run_parallel(copy.count * copy.piece_numel, kGrainNumel, [&](int64_t begin, int64_t end) {
        while (begin < end) {
          const int64_t piece = begin / copy.piece_numel;
          const int64_t within = begin - piece * copy.piece_numel;
          const int64_t numel = std::min(end - begin, copy.piece_numel - within);
          cpu::add(
              copy.dst, static_cast<std::byte*>(dst) + copy.dst_offset + at(piece * copy.dst_stride + within, copy.dst),
              copy.src,
              static_cast<const std::byte*>(src) + copy.src_offset + at(piece * copy.src_stride + within, copy.src),
              numel);
          begin += numel;
        }
      });
      continue;
    }
    view_of(device, copy.dst, dst, copy.dst_offset, copy.count, copy.piece_numel, copy.dst_stride)
        .add_(view_of(device, copy.src, const_cast<void*>(src), copy.src_offset, copy.count, copy.piece_numel,
                      copy.src_stride));
  }
}

void scale_into(at::Device device, DType dst_type, void* dst, DType src_type, const void* src, int64_t numel,
                double divisor, bool accumulate) {
  if (numel == 0) return;
  if (device.is_cpu()) {
    cpu::ReducePiece piece;
    piece.src_type = src_type;
    piece.dst_type = dst_type;
    piece.sources = &src;
    piece.num_sources = 1;
    piece.dst = dst;
    piece.numel = numel;
    piece.divisor = divisor;
    piece.round = true;
    piece.accumulate = accumulate;
    run_parallel(numel, kGrainNumel, [&](int64_t begin, int64_t end) { cpu::reduce(piece, begin, end); });
    return;
  }
  at::Tensor source = view_of(device, src_type, const_cast<void*>(src), 0, 1, numel, numel);
  if (divisor != 1.0) source = source.div(divisor);
  at::Tensor target = view_of(device, dst_type, dst, 0, 1, numel, numel);
  if (accumulate) {
    target.add_(source.to(target.scalar_type()));
  } else {
    target.copy_(source);
  }
}

}  // namespace fsdp2x
