// One thread's share of a wire format (core/wire_format.hpp). A warp takes a block of 256 elements, and its thread l
// the elements l, l + 32, ..: threads access adjacent elements at the same time, wherever the block begins.
//
//   pass of a block of threads:  peaks of 8 elements a thread | barrier | the scale of the warp's block | codes, errors
//
// `run` repeats the computation of `peak`: its inputs are in the nearest cache.
#pragma once

#include "core/wire_format.hpp"
#include "kernels/cuda/bodies/element.hpp"
#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kWirePasses = kTileNumel / (kThreads / kWarp * kWireBlock);  // of a block of threads over its tile
static_assert(kTileNumel % kWireBlock == 0 && kWirePasses * (kThreads / kWarp) * kWireBlock == kTileNumel);

FSDP2X_HOST_DEVICE int lane_of(int thread) { return thread % kWarp; }

// Returns the block of codes for the warp of `thread` in this pass, empty after the segment's end.
FSDP2X_HOST_DEVICE TileRange wire_block(const WireSegment& segment, int64_t tile, int pass, int thread) {
  const int warp = pass * (kThreads / kWarp) + thread / kWarp;
  const int64_t begin = (tile - segment.first_tile) * kTileNumel + int64_t{warp} * kWireBlock;
  const int64_t end = begin + kWireBlock;
  return {begin, end < segment.numel ? end : segment.numel};
}

// Returns the largest magnitude of the block of codes. `peaks` are those of all threads.
FSDP2X_HOST_DEVICE float wire_peak(const float* peaks, int thread) {
  float peak = 0.0f;
  const int first = thread - lane_of(thread);
  for (int k = 0; k < kWarp; ++k) peak = larger_peak(peak, peaks[first + k]);
  return peak;
}

// Maps the elements of a block to their pieces. A piece has at most 2^31 elements, so a 32-bit division is enough.
class WireIndex {
 public:
  FSDP2X_HOST_DEVICE WireIndex(const WireSegment& segment, int64_t begin)
      : segment_(segment),
        begin_(begin),
        num_before_(is_dense() ? 0 : begin / segment.piece_numel),
        past_(is_dense() ? 0 : begin - num_before_ * segment.piece_numel) {}

  FSDP2X_HOST_DEVICE int64_t operator()(int64_t i) const {
    if (is_dense()) return i;
    const auto past = static_cast<uint32_t>(past_ + i - begin_);
    const uint32_t piece = past / static_cast<uint32_t>(segment_.piece_numel);
    return (num_before_ + piece) * segment_.stride + past - int64_t{piece} * segment_.piece_numel;
  }

 private:
  FSDP2X_HOST_DEVICE bool is_dense() const { return segment_.piece_numel == segment_.numel; }

  const WireSegment& segment_;
  int64_t begin_;
  int64_t num_before_;
  int64_t past_;
};

FSDP2X_HOST_DEVICE uint8_t code_at(const void* segments, const WireSegment& segment, int64_t i) {
  return static_cast<uint8_t>(*at(segments, segment.codes_offset + i));
}

FSDP2X_HOST_DEVICE float scale_at(const void* segments, const WireSegment& segment, int64_t i) {
  return read<float>(at(segments, segment.scales_offset + i / kWireBlock * static_cast<int64_t>(sizeof(float))));
}

// Returns a summand. Not for fp8, which is not summed.
FSDP2X_HOST_DEVICE float summand_at(const void* segments, const WireSegment& segment, int64_t i) {
  if (segment.format == WireFormat::int8) {
    return decoded_int8(code_at(segments, segment, i), scale_at(segments, segment, i));
  }
  const char* const values = at(segments, segment.codes_offset);
  float value;
  if (segment.format == WireFormat::bf16) {
    load_known<false, 1>(DType::bf16, values, i, &value);
  } else {
    load_known<true, 1>(DType::f32, values, i, &value);
  }
  return value;
}

// For each pass, a launch calls error_scale and peak, then run, for all threads of a block.
struct EncodeWireBody {
  WireList list;
  EncodeWireArgs args;

  FSDP2X_HOST_DEVICE const WireSegment& segment_of(int64_t tile) const {
    return list.segments[list.tile_segments[tile]];
  }

  // Returns the scale of the last call's errors.
  FSDP2X_HOST_DEVICE float error_scale(int64_t tile, int pass, int thread) const {
    const WireSegment& segment = segment_of(tile);
    const TileRange block = wire_block(segment, tile, pass, thread);
    if (block.begin >= block.end || !keeps_errors(segment)) return 0.0f;
    return scale_at(args.errors, segment, block.begin);
  }

  FSDP2X_HOST_DEVICE float peak(int64_t tile, int pass, int thread, float error_scale) const {
    const WireSegment& segment = segment_of(tile);
    const TileRange block = wire_block(segment, tile, pass, thread);
    float peak = 0.0f;
    if (!has_scales(segment.format) || block.begin >= block.end) return peak;
    const WireIndex index(segment, block.begin);
    FSDP2X_NO_UNROLL
    for (int64_t i = block.begin + lane_of(thread); i < block.end; i += kWarp) {
      peak = larger_peak(peak, fabsf(wanted(segment, index, i, error_scale)));
    }
    return peak;
  }

  // `peak`: of the block of codes.
  FSDP2X_HOST_DEVICE void run(int64_t tile, int pass, int thread, float error_scale, float peak) const {
    const WireSegment& segment = segment_of(tile);
    const TileRange block = wire_block(segment, tile, pass, thread);
    if (block.begin >= block.end) return;
    const bool is_missing = has_scales(segment.format) && args.is_missing[segment.source];
    const float scale = is_missing ? 1.0f : wire_scale(peak, top_wire_code(segment.format));
    const float left_scale = wire_error_scale(scale);
    const WireIndex index(segment, block.begin);
    FSDP2X_NO_UNROLL
    for (int64_t i = block.begin + lane_of(thread); i < block.end; i += kWarp) {
      const float value = is_missing ? 0.0f : wanted(segment, index, i, error_scale);
      const uint8_t code = store_code(segment, i, value, scale);
      if (!is_missing && keeps_errors(segment)) {
        *at(args.errors, segment.codes_offset + i) =
            static_cast<char>(encoded_int8(value - decoded_int8(code, scale), left_scale));
      }
    }
    if (lane_of(thread) != 0 || !has_scales(segment.format)) return;
    store_scale(args.segments, segment, block.begin, scale);
    if (!is_missing && keeps_errors(segment)) store_scale(args.errors, segment, block.begin, left_scale);
  }

 private:
  FSDP2X_HOST_DEVICE bool keeps_errors(const WireSegment& segment) const {
    return args.errors != nullptr && segment.format == WireFormat::int8;
  }

  // Returns the number to encode: the value plus the rounding error of the last call.
  FSDP2X_HOST_DEVICE float wanted(const WireSegment& segment, const WireIndex& index, int64_t i,
                                  float error_scale) const {
    float value;
    load<1>(segment.type, at(args.values, segment.values_offset), index(i), &value);
    if (!keeps_errors(segment)) return value;
    return value + decoded_int8(code_at(args.errors, segment, i), error_scale);
  }

  // Returns the stored code for formats with scales.
  FSDP2X_HOST_DEVICE uint8_t store_code(const WireSegment& segment, int64_t i, float value, float scale) const {
    char* const codes = at(args.segments, segment.codes_offset);
    if (!has_scales(segment.format)) {
      store<1>(segment.format == WireFormat::bf16 ? DType::bf16 : DType::f32, codes, i, &value);
      return 0;
    }
    const uint8_t code = segment.format == WireFormat::fp8 ? encoded_fp8(value, scale) : encoded_int8(value, scale);
    codes[i] = static_cast<char>(code);
    return code;
  }

  FSDP2X_HOST_DEVICE static void store_scale(void* segments, const WireSegment& segment, int64_t i, float scale) {
    write(at(segments, segment.scales_offset + i / kWireBlock * static_cast<int64_t>(sizeof(float))), scale);
  }
};

// For formats with scales.
struct DecodeWireBody {
  WireList list;
  const void* segments;
  void* values;

  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const WireSegment& segment = list.segments[list.tile_segments[tile]];
    FSDP2X_NO_UNROLL
    for (int pass = 0; pass < kWirePasses; ++pass) {
      const TileRange block = wire_block(segment, tile, pass, thread);
      if (block.begin >= block.end) return;
      const float scale = scale_at(segments, segment, block.begin);
      const WireIndex index(segment, block.begin);
      FSDP2X_NO_UNROLL
      for (int64_t i = block.begin + lane_of(thread); i < block.end; i += kWarp) {
        const uint8_t code = code_at(segments, segment, i);
        const float value = segment.format == WireFormat::fp8 ? decoded_fp8(code, scale) : decoded_int8(code, scale);
        store<1>(segment.type, at(values, segment.values_offset), index(i), &value);
      }
    }
  }
};

// values = the sum over the ranks in rank order, scaled.
struct SumWireBody {
  WireList list;
  SumWireArgs args;

  FSDP2X_HOST_DEVICE void run(int64_t tile, int thread) const {
    const WireSegment& segment = list.segments[list.tile_segments[tile]];
    FSDP2X_NO_UNROLL
    for (int pass = 0; pass < kWirePasses; ++pass) {
      const TileRange block = wire_block(segment, tile, pass, thread);
      FSDP2X_NO_UNROLL
      for (int64_t i = block.begin + lane_of(thread); i < block.end; i += kWarp) {
        float sum = 0.0f + summand_at(args.segments, segment, i);
        FSDP2X_NO_UNROLL
        for (int rank = 1; rank < args.num_ranks; ++rank) {
          sum += summand_at(at(args.segments, rank * args.rank_bytes), segment, i);
        }
        sum = scaled(sum, args.scale);
        store_units<float, 1>(at(args.values, segment.values_offset), i, &sum);
      }
    }
  }
};

}  // namespace fsdp2x::cuda
