// Wire formats with the loops of the table in use.
#include "kernels/cpu/wire.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "kernels/cpu/kernel_table.hpp"
#include "kernels/cpu/kernels.hpp"

namespace fsdp2x::cpu {

namespace {

static_assert(kTileNumel % kWireBlock == 0);

const std::byte* at(const void* values, DType type, int64_t numel) {
  return static_cast<const std::byte*>(values) + static_cast<size_t>(numel) * dtype_bytes(type);
}

std::byte* at(void* values, DType type, int64_t numel) {
  return static_cast<std::byte*>(values) + static_cast<size_t>(numel) * dtype_bytes(type);
}

int index_of(WireFormat format) { return format == WireFormat::fp8 ? 1 : 0; }

void require(bool holds, const char* what) {
  if (!holds) throw Error(std::string("wire format: ") + what);
}

}  // namespace

void encode_wire(WireFormat format, void* codes, float* scales, DType type, const void* values, int64_t numel) {
  if (format == WireFormat::bf16) return cast_copy(DType::bf16, codes, type, values, numel);
  require(has_scales(format), "values have no codes in it");
  const KernelTable& table = kernel_table();
  const auto encode = table.encode_wire[index_of(format)];
  auto* const bytes = static_cast<uint8_t*>(codes);
  if (type == DType::f32) return encode(bytes, scales, static_cast<const float*>(values), numel);
  const auto load = table.f32.load[static_cast<int>(type)];
  require(type != DType::byte && load != nullptr, "values are neither f32, bf16 nor f16");
  alignas(kTileAlignBytes) float tile[kTileNumel];
  for (int64_t begin = 0; begin < numel; begin += kTileNumel) {
    const int64_t size = std::min(kTileNumel, numel - begin);
    load(tile, at(values, type, begin), size);
    encode(bytes + begin, scales + begin / kWireBlock, tile, size);
  }
}

void decode_wire(WireFormat format, DType type, void* values, const void* codes, const float* scales, int64_t first,
                 int64_t numel) {
  if (format == WireFormat::bf16) return cast_copy(type, values, DType::bf16, at(codes, DType::bf16, first), numel);
  require(has_scales(format), "values have no codes in it");
  const KernelTable& table = kernel_table();
  const auto decode = table.decode_wire[index_of(format)];
  const auto* const bytes = static_cast<const uint8_t*>(codes) + first;
  const auto run = [&](float* target, int64_t begin, int64_t size) {
    const int64_t place = first + begin;
    decode(target, bytes + begin, scales + place / kWireBlock, place % kWireBlock, size);
  };
  if (type == DType::f32) return run(static_cast<float*>(values), 0, numel);
  require(type != DType::byte && table.f32.store[static_cast<int>(type)] != nullptr, "no such dtype to decode to");
  alignas(kTileAlignBytes) float tile[kTileNumel];
  for (int64_t begin = 0; begin < numel; begin += kTileNumel) {
    const int64_t size = std::min(kTileNumel, numel - begin);
    run(tile, begin, size);
    table.f32.store[static_cast<int>(type)](at(values, type, begin), tile, size);
  }
}

void add_wire(WireFormat format, float* sums, const void* codes, const float* scales, int64_t numel) {
  if (format == WireFormat::bf16) return add(DType::f32, sums, DType::bf16, codes, numel);
  require(format == WireFormat::int8, "only int8 and bf16 are summed");
  kernel_table().add_int8(sums, static_cast<const uint8_t*>(codes), scales, numel);
}

void encode_int8_with_errors(uint8_t* codes, float* scales, uint8_t* errors, float* error_scales, const float* values,
                             int64_t numel) {
  kernel_table().encode_int8_with_errors(codes, scales, errors, error_scales, values, numel);
}

}  // namespace fsdp2x::cpu
