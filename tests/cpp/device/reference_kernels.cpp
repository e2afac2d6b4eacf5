// The kernels on the host: the same bodies, tile after tile and thread after thread.
#include "device/reference_kernels.hpp"

#include "kernels/cuda/bodies/changes.hpp"
#include "kernels/cuda/bodies/coded_adamw.hpp"
#include "kernels/cuda/bodies/copy.hpp"
#include "kernels/cuda/bodies/optimizer.hpp"
#include "kernels/cuda/bodies/reduce.hpp"
#include "kernels/cuda/bodies/wire.hpp"
#include "kernels/cuda/checks.hpp"

namespace fsdp2x::cuda {

namespace {

template <class Body>
void run_tiles(const Body& body, int64_t num_tiles) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int thread = 0; thread < kThreads; ++thread) body.run(tile, thread);
  }
}

// Leaves the sum of one value per thread of a block in values[0].
void fold_block(double* values, int num_threads) {
  for (int half = num_threads / 2; half > 0; half /= 2) {
    for (int thread = 0; thread < half; ++thread) fold_half(values, half, thread);
  }
}

void copy(const CopyList& list, const void* src, void* dst, Stream) {
  run_tiles(CopyBody{list, src, dst}, list.num_tiles);
}

void pack_gradients(const PackList& list, const PackTable& grads, void* dst, Stream) {
  run_tiles(PackBody{list, grads, dst}, list.num_tiles);
}

void reduce(const ReduceList& list, const void* source, const TargetTable& targets, const ReduceArgs& args, Stream) {
  run_tiles(ReduceBody{list, source, targets, args}, list.num_tiles);
}

void sum_squares(const ReduceList& list, const TargetTable& targets, double* tile_sums, Stream) {
  const SquareBody body = {list, targets, tile_sums};
  for (int64_t tile = 0; tile < list.num_tiles; ++tile) {
    double squares[kThreads];
    for (int thread = 0; thread < kThreads; ++thread) squares[thread] = body.run(tile, thread);
    fold_block(squares, kThreads);
    tile_sums[tile] = squares[0];
  }
}

void add_up(const double* values, int64_t num, double* sums, Stream) {
  for (int64_t block = 0; block < num_sums(num); ++block) {
    double parts[kSumThreads];
    for (int thread = 0; thread < kSumThreads; ++thread) parts[thread] = strided_sum(values, num, block, thread);
    fold_block(parts, kSumThreads);
    sums[block] = parts[0];
  }
}

void clip_factor(const double* square_sum, double max_norm, bool in_f64, double* norm, double* factor, Stream) {
  set_clip_factor(*square_sum, max_norm, in_f64, norm, factor);
}

void scale_gradients(const ReduceList& list, const TargetTable& targets, const double* factor, Stream) {
  run_tiles(ScaleBody{list, targets, factor}, list.num_tiles);
}

template <bool kStochastic>
void coded_adamw(const CodedAdamWBody<kStochastic>& body, int64_t num_tiles) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int pass = 0; pass < kCodedPasses && body.steps(tile); ++pass) {
      MomentTriple scales[kThreads], peaks[kThreads];
      for (int thread = 0; thread < kThreads; ++thread) {
        scales[thread] = body.scales(tile, pass, thread);
        peaks[thread] = body.peaks(tile, pass, thread, scales[thread]);
      }
      for (int thread = 0; thread < kThreads; ++thread) {
        body.step(tile, pass, thread, scales[thread], block_peaks(peaks, thread));
      }
    }
  }
}

void adamw(const AdamWList& list, const AdamWArgs& args, Stream) {
  if (args.coded && args.stochastic) return coded_adamw(CodedAdamWBody<true>{list, args}, list.num_tiles);
  if (args.coded) return coded_adamw(CodedAdamWBody<false>{list, args}, list.num_tiles);
  if (args.stochastic) return run_tiles(AdamWBody<true>{list, args}, list.num_tiles);
  run_tiles(AdamWBody<false>{list, args}, list.num_tiles);
}

// Counts of all threads of a tile from their masks, and of their groups.
struct BlockCounts {
  int counts[kThreads];
  int groups[kCountGroups];

  explicit BlockCounts(const uint32_t* masks) {
    for (int thread = 0; thread < kThreads; ++thread) counts[thread] = num_bits(masks[thread]);
    for (int group = 0; group < kCountGroups; ++group) groups[group] = group_count(counts, group);
  }
};

void mark_changes(const ChangesArgs& args, Stream) {
  require_elements(args);
  const ChangesBody body = {args};
  for (int64_t tile = 0; tile < args.num_tiles(); ++tile) {
    uint32_t masks[kThreads];
    for (int thread = 0; thread < kThreads; ++thread) {
      masks[thread] = body.find(tile, thread);
      body.mark(tile, thread, masks[thread]);
    }
    const BlockCounts block(masks);
    args.tile_counts[tile] = num_before(block.counts, block.groups, kThreads);
  }
}

void list_changes(const ChangesArgs& args, Stream) {
  require_elements(args);
  const ChangesBody body = {args};
  for (int64_t tile = 0; tile < args.num_tiles(); ++tile) {
    const int64_t begin = args.begin_of(tile);
    if (begin == args.tile_ends[tile]) continue;
    uint32_t masks[kThreads];
    for (int thread = 0; thread < kThreads; ++thread) masks[thread] = body.marked(tile, thread);
    const BlockCounts block(masks);
    for (int thread = 0; thread < kThreads; ++thread) {
      body.list(tile, thread, masks[thread], begin + num_before(block.counts, block.groups, thread));
    }
  }
}

void encode_wire(const WireList& list, const EncodeWireArgs& args, Stream) {
  const EncodeWireBody body = {list, args};
  for (int64_t tile = 0; tile < list.num_tiles; ++tile) {
    for (int pass = 0; pass < kWirePasses; ++pass) {
      float error_scales[kThreads], peaks[kThreads];
      for (int thread = 0; thread < kThreads; ++thread) {
        error_scales[thread] = body.error_scale(tile, pass, thread);
        peaks[thread] = body.peak(tile, pass, thread, error_scales[thread]);
      }
      for (int thread = 0; thread < kThreads; ++thread) {
        body.run(tile, pass, thread, error_scales[thread], wire_peak(peaks, thread));
      }
    }
  }
}

void decode_wire(const WireList& list, const void* segments, void* values, Stream) {
  run_tiles(DecodeWireBody{list, segments, values}, list.num_tiles);
}

void sum_wire(const WireList& list, const SumWireArgs& args, Stream) {
  require_sources(args);
  run_tiles(SumWireBody{list, args}, list.num_tiles);
}

}  // namespace

const Kernels& reference_kernels() {
  static const Kernels kernels = {
      .name = "reference",
      .copy = copy,
      .pack_gradients = pack_gradients,
      .reduce = reduce,
      .sum_squares = sum_squares,
      .add_up = add_up,
      .clip_factor = clip_factor,
      .scale_gradients = scale_gradients,
      .adamw = adamw,
      .is_capturing = [](Stream) { return false; },
      .mark_changes = mark_changes,
      .list_changes = list_changes,
      .encode_wire = encode_wire,
      .decode_wire = decode_wire,
      .sum_wire = sum_wire,
  };
  return kernels;
}

}  // namespace fsdp2x::cuda
