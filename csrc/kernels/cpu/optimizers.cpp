// Optimizer steps on top of the kernel table.
#include "kernels/cpu/optimizers.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "core/error.hpp"
#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x::cpu {

namespace {

// One tensor of a step as floats: its memory if it holds floats, or else a tile that is loaded and stored.
class Operand {
 public:
  Operand(const KernelTable& table, DType type, const void* data)
      : table_(table), type_(type), data_(static_cast<std::byte*>(const_cast<void*>(data))) {}

  // Null without memory.
  float* load(int64_t begin, int64_t count) {
    if (data_ == nullptr) return nullptr;
    if (type_ == DType::f32) return reinterpret_cast<float*>(data_) + begin;
    table_.f32.load[static_cast<int>(type_)](tile_, at(begin), count);
    return tile_;
  }
  // Stores the values that load() returned for the same elements. `bits`: null rounds to nearest even.
  void store(int64_t begin, int64_t count, const uint16_t* bits) {
    if (data_ == nullptr || type_ == DType::f32) return;
    if (bits != nullptr && type_ == DType::bf16) {
      table_.store_stochastic(at(begin), tile_, bits, count);
    } else {
      table_.f32.store[static_cast<int>(type_)](at(begin), tile_, count);
    }
  }

 private:
  std::byte* at(int64_t begin) const { return data_ + static_cast<size_t>(begin) * dtype_bytes(type_); }

  const KernelTable& table_;
  DType type_;
  std::byte* data_;
  alignas(kTileAlignBytes) float tile_[kTileNumel];
};

// A moment of a step as floats: an operand, or codes and scales.
class Moment {
 public:
  Moment(const KernelTable& table, DType type, void* data, float* scales, bool is_signed)
      : table_(table),
        floats_(table, type, data),
        codes_(type == DType::byte ? static_cast<uint8_t*>(data) : nullptr),
        scales_(scales),
        is_signed_(is_signed) {}

  float* load(int64_t begin, int64_t count) {
    if (codes_ == nullptr) return floats_.load(begin, count);
    table_.load_moments[is_signed_](tile_, codes_ + begin, scales_ + begin / kMomentBlock, count);
    return tile_;
  }
  void store(int64_t begin, int64_t count, const uint16_t* bits) {
    if (codes_ == nullptr) return floats_.store(begin, count, bits);
    table_.store_moments[is_signed_][bits != nullptr](codes_ + begin, scales_ + begin / kMomentBlock, tile_, bits,
                                                      count);
  }

 private:
  const KernelTable& table_;
  Operand floats_;
  uint8_t* codes_;
  float* scales_;
  bool is_signed_;
  alignas(kTileAlignBytes) float tile_[kTileNumel];
};
static_assert(kTileNumel % kMomentBlock == 0);

// The rounding bits of a tile.
class Bits {
 public:
  // Returns null if the piece rounds to nearest even, or if `type` is not rounded.
  const uint16_t* draw(const KernelTable& table, const Rounding* rounding, DType type, Draw draw, int64_t begin,
                       int64_t count) {
    if (rounding == nullptr || (type != DType::bf16 && type != DType::byte)) return nullptr;
    for (int64_t done = 0; done < count;) {
      const int64_t position = rounding->offset + begin + done;
      const int64_t within = position % rounding->run;
      const uint64_t number =
          rounding->first + static_cast<uint64_t>(position / rounding->run * rounding->stride + within);
      const int64_t numel = std::min(count - done, rounding->run - within);
      const auto skipped = static_cast<int64_t>(number % kRoundingBlock);
      const int64_t num_blocks = (skipped + numel + kRoundingBlock - 1) / kRoundingBlock;
      table.rounding_bits(blocks_, rounding->key, draw, number / kRoundingBlock, num_blocks);
      std::memcpy(bits_ + done, blocks_ + skipped, static_cast<size_t>(numel) * sizeof(uint16_t));
      done += numel;
    }
    return bits_;
  }

 private:
  alignas(kTileAlignBytes) uint16_t blocks_[kTileNumel + 2 * kRoundingBlock];
  alignas(kTileAlignBytes) uint16_t bits_[kTileNumel];
};

}  // namespace

void adamw(const AdamWPiece& piece, const AdamWStep& step) {
  if (piece.type != DType::f32 && piece.type != DType::bf16 && piece.type != DType::f16) {
    throw Error(std::string("adamw: expected parameters of type f32, bf16, or f16, got ") + dtype_name(piece.type));
  }
  if (piece.moments != DType::f32 && piece.moments != DType::bf16 && piece.moments != DType::byte) {
    throw Error(std::string("adamw: expected moments of type f32, bf16, or byte, got ") + dtype_name(piece.moments));
  }
  const KernelTable& table = kernel_table();
  const auto loop = table.adamw[piece.max_exp_avg_sq != nullptr];
  Operand param(table, piece.type, piece.param);
  Operand grad(table, piece.type, piece.grad);
  Moment exp_avg(table, piece.moments, piece.exp_avg, piece.exp_avg_scales, true);
  Moment exp_avg_sq(table, piece.moments, piece.exp_avg_sq, piece.exp_avg_sq_scales, false);
  Moment max_exp_avg_sq(table, piece.moments, piece.max_exp_avg_sq, piece.max_exp_avg_sq_scales, false);
  Bits bits;
  const bool in_place = piece.type == DType::f32 && piece.moments == DType::f32;
  const int64_t tile = in_place ? std::max<int64_t>(piece.numel, 1) : kTileNumel;
  for (int64_t begin = 0; begin < piece.numel; begin += tile) {
    const int64_t count = std::min(tile, piece.numel - begin);
    loop(param.load(begin, count), grad.load(begin, count), exp_avg.load(begin, count), exp_avg_sq.load(begin, count),
         max_exp_avg_sq.load(begin, count), count, step);
    if (in_place) continue;
    const auto draw = [&](DType type, Draw what) { return bits.draw(table, piece.rounding, type, what, begin, count); };
    param.store(begin, count, draw(piece.type, Draw::param));
    exp_avg.store(begin, count, draw(piece.moments, Draw::exp_avg));
    const uint16_t* squares = draw(piece.moments, Draw::exp_avg_sq);
    exp_avg_sq.store(begin, count, squares);
    max_exp_avg_sq.store(begin, count, squares);
  }
}

void decode_moments(float* values, const uint8_t* codes, const float* scales, int64_t numel, bool is_signed) {
  kernel_table().load_moments[is_signed](values, codes, scales, numel);
}

void encode_moments(uint8_t* codes, float* scales, const float* values, int64_t numel, bool is_signed) {
  kernel_table().store_moments[is_signed][false](codes, scales, values, nullptr, numel);
}

}  // namespace fsdp2x::cpu
