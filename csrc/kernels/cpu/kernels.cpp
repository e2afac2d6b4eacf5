// Casts, sums, and copy plans on top of the kernel table, and the choice of the table.
#include "kernels/cpu/kernels.hpp"

#ifdef FSDP2X_X86_KERNELS
#include <cpuid.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "kernels/cpu/kernel_math.hpp"
#include "kernels/cpu/kernel_table.hpp"

namespace fsdp2x::cpu {
namespace {

bool is_supported(Isa isa) {
#ifdef FSDP2X_X86_KERNELS
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return isa == Isa::base || (isa == Isa::avx2 && avx2) || (isa == Isa::avx512 && avx512);
#else
  return isa == Isa::base;
#endif
}

const KernelTable& table_of(Isa isa) {
#ifdef FSDP2X_X86_KERNELS
  if (isa == Isa::avx2) return kernel_table_avx2();
  if (isa == Isa::avx512) return kernel_table_avx512();
#else
  static_cast<void>(isa);
#endif
  return kernel_table_base();
}

const KernelTable& best_table() {
  if (is_supported(Isa::avx512)) return table_of(Isa::avx512);
  return table_of(is_supported(Isa::avx2) ? Isa::avx2 : Isa::base);
}

std::atomic<const KernelTable*>& active_table() {
  static std::atomic<const KernelTable*> table{&best_table()};
  return table;
}

using CastLoop = void (*)(void* dst, const void* src, int64_t numel);

CastLoop cast_loop(DType dst, DType src) {
  if (dst == DType::byte || src == DType::byte) {
    throw Error(std::string("kernels: cannot cast ") + dtype_name(src) + " to " + dtype_name(dst) +
                ": bytes are only moved");
  }
  return kernel_table().cast[static_cast<int>(dst)][static_cast<int>(src)];
}

template <size_t kBytes>
void copy_fixed(std::byte* dst, size_t dst_stride, const std::byte* src, size_t src_stride, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(dst, src, kBytes);
    dst += dst_stride;
    src += src_stride;
  }
}

// Strides and pieces are in bytes. Tiny pieces (a last dim sharded to one element) get a copy of a constant size.
void copy_pieces(std::byte* dst, size_t dst_stride, const std::byte* src, size_t src_stride, int64_t count,
                 size_t bytes) {
  switch (bytes) {
    case 2:
      return copy_fixed<2>(dst, dst_stride, src, src_stride, count);
    case 4:
      return copy_fixed<4>(dst, dst_stride, src, src_stride, count);
    case 8:
      return copy_fixed<8>(dst, dst_stride, src, src_stride, count);
    case 16:
      return copy_fixed<16>(dst, dst_stride, src, src_stride, count);
    default:
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(dst, src, bytes);
        dst += dst_stride;
        src += src_stride;
      }
  }
}

// Accumulates in a tile, because dst is too narrow to add to.
template <class A>
void add_through_tile(const Arithmetic<A>& ops, DType dst_type, std::byte* dst, DType src_type, const std::byte* src,
                      int64_t numel) {
  alignas(kTileAlignBytes) A tile[kTileNumel];
  for (int64_t begin = 0; begin < numel; begin += kTileNumel) {
    const int64_t count = std::min(kTileNumel, numel - begin);
    std::byte* out = dst + static_cast<size_t>(begin) * dtype_bytes(dst_type);
    ops.load[static_cast<int>(dst_type)](tile, out, count);
    ops.add[static_cast<int>(src_type)](tile, src + static_cast<size_t>(begin) * dtype_bytes(src_type), count);
    ops.store[static_cast<int>(dst_type)](out, tile, count);
  }
}

// Runs apply(values) on a 16-bit range, one fp32 tile at a time.
template <class Apply>
void update_through_tile(const KernelTable& table, DType type, void* data, int64_t numel, const Apply& apply) {
  alignas(kTileAlignBytes) float tile[kTileNumel];
  for (int64_t begin = 0; begin < numel; begin += kTileNumel) {
    const int64_t count = std::min(kTileNumel, numel - begin);
    std::byte* out = static_cast<std::byte*>(data) + static_cast<size_t>(begin) * dtype_bytes(type);
    table.f32.load[static_cast<int>(type)](tile, out, count);
    apply(tile, count);
    table.f32.store[static_cast<int>(type)](out, tile, count);
  }
}

}  // namespace

const KernelTable& kernel_table() { return *active_table().load(std::memory_order_relaxed); }

bool select_kernels(Isa isa) {
  if (!is_supported(isa)) return false;
  active_table().store(&table_of(isa), std::memory_order_relaxed);
  return true;
}

void cast_copy(DType dst_type, void* dst, DType src_type, const void* src, int64_t numel) {
  if (numel <= 0) return;
  if (dst_type == src_type) {
    const size_t bytes = static_cast<size_t>(numel) * dtype_bytes(dst_type);
    if (bytes >= kStreamCopyBytes) return kernel_table().stream_copy(dst, src, bytes);
    std::memcpy(dst, src, bytes);
    return;
  }
  cast_loop(dst_type, src_type)(dst, src, numel);
}

void stream_copy(void* dst, const void* src, size_t bytes) {
  if (bytes > 0) kernel_table().stream_copy(dst, src, bytes);
}

void add(DType dst_type, void* dst, DType src_type, const void* src, int64_t numel) {
  require_summable(dst_type, "add");
  require_summable(src_type, "add");
  if (numel <= 0) return;
  const KernelTable& table = kernel_table();
  auto* out = static_cast<std::byte*>(dst);
  const auto* in = static_cast<const std::byte*>(src);
  if (dst_type == DType::f64) {
    table.f64.add[static_cast<int>(src_type)](static_cast<double*>(dst), src, numel);
  } else if (src_type == DType::f64) {
    add_through_tile(table.f64, dst_type, out, src_type, in, numel);
  } else if (dst_type == DType::f32) {
    table.f32.add[static_cast<int>(src_type)](static_cast<float*>(dst), src, numel);
  } else {
    add_through_tile(table.f32, dst_type, out, src_type, in, numel);
  }
}

void divide(DType type, void* dst, int64_t numel, double divisor) {
  require_summable(type, "divide");
  if (numel <= 0) return;
  const KernelTable& table = kernel_table();
  if (type == DType::f64) return divide_all(table.f64, static_cast<double*>(dst), numel, divisor);
  if (type == DType::f32) return divide_all(table.f32, static_cast<float*>(dst), numel, divisor);
  update_through_tile(table, type, dst, numel,
                      [&](float* tile, int64_t count) { divide_all(table.f32, tile, count, divisor); });
}

double sum_squares(DType type, const void* values, int64_t numel) {
  require_summable(type, "square");
  const KernelTable& table = kernel_table();
  alignas(kTileAlignBytes) double lanes[kNumLanes] = {};
  if (type == DType::f64) {
    table.f64.sum_squares(static_cast<const double*>(values), numel, lanes);
  } else if (type == DType::f32) {
    table.f32.sum_squares(static_cast<const float*>(values), numel, lanes);
  } else {
    alignas(kTileAlignBytes) float tile[kTileNumel];
    for (int64_t begin = 0; begin < numel; begin += kTileNumel) {
      const int64_t count = std::min(kTileNumel, numel - begin);
      const auto* in = static_cast<const std::byte*>(values) + static_cast<size_t>(begin) * dtype_bytes(type);
      table.f32.load[static_cast<int>(type)](tile, in, count);
      table.f32.sum_squares(tile, count, lanes);
    }
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

void multiply(DType type, void* dst, int64_t numel, double factor) {
  require_summable(type, "multiply");
  const KernelTable& table = kernel_table();
  if (type == DType::f64) return table.f64.multiply(static_cast<double*>(dst), numel, factor);
  const auto rounded = static_cast<float>(factor);
  if (type == DType::f32) return table.f32.multiply(static_cast<float*>(dst), numel, rounded);
  update_through_tile(table, type, dst, numel,
                      [&](float* tile, int64_t count) { table.f32.multiply(tile, count, rounded); });
}

void run_copy(const Copy& copy, int64_t begin, int64_t end, const void* src_base, void* dst_base) {
  const size_t src_bytes = dtype_bytes(copy.src), dst_bytes = dtype_bytes(copy.dst);
  while (begin < end) {
    const int64_t piece = begin / copy.piece_numel, within = begin % copy.piece_numel;
    const auto* src = static_cast<const std::byte*>(src_base) + copy.src_offset +
                      static_cast<size_t>(piece * copy.src_stride + within) * src_bytes;
    auto* dst = static_cast<std::byte*>(dst_base) + copy.dst_offset +
                static_cast<size_t>(piece * copy.dst_stride + within) * dst_bytes;
    const int64_t num_whole = within == 0 ? (end - begin) / copy.piece_numel : 0;
    if (num_whole <= 1) {
      const int64_t numel = std::min(end - begin, copy.piece_numel - within);
      cast_copy(copy.dst, dst, copy.src, src, numel);
      begin += numel;
      continue;
    }
    begin += num_whole * copy.piece_numel;
    const size_t src_step = static_cast<size_t>(copy.src_stride) * src_bytes;
    const size_t dst_step = static_cast<size_t>(copy.dst_stride) * dst_bytes;
    if (copy.src == copy.dst) {
      copy_pieces(dst, dst_step, src, src_step, num_whole, static_cast<size_t>(copy.piece_numel) * src_bytes);
      continue;
    }
    const CastLoop loop = cast_loop(copy.dst, copy.src);
    for (int64_t i = 0; i < num_whole; ++i) {
      loop(dst, src, copy.piece_numel);
      src += src_step;
      dst += dst_step;
    }
  }
}

void run_copies(std::span<const Copy> copies, const void* src_base, void* dst_base) {
  for (const Copy& copy : copies) run_copy(copy, 0, copy.count * copy.piece_numel, src_base, dst_base);
}

}  // namespace fsdp2x::cpu
