// The kernels on the host: the same bodies, tile after tile and thread after thread.
#include <sched.h>

#include <chrono>
#include <cmath>

#include "cuda/bodies/copy.hpp"
#include "cuda/bodies/optimizer.hpp"
#include "cuda/bodies/reduce.hpp"
#include "cuda/bodies/signals.hpp"
#include "cuda/checks.hpp"
#include "cuda/kernels.hpp"

namespace fsdp2x::cuda {

namespace {

constexpr auto run_tiles = [](const auto& body, int64_t num_tiles) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    for (int thread = 0; thread < kThreads; ++thread) body.run(tile, thread);
  }
};

constexpr auto run_sums = [](const auto& body, int64_t num_tiles) {
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    double squares[kThreads];
    for (int thread = 0; thread < kThreads; ++thread) {
      const Seen seen = body.run(tile, thread);
      squares[thread] = seen.squares;
      if (!seen.all_finite && body.found_inf() != nullptr) *body.found_inf() = 1.0f;
    }
    for (int half = kThreads / 2; half > 0; half /= 2) {
      for (int thread = 0; thread < half; ++thread) fold_half(squares, half, thread);
    }
    if (body.tile_sums() != nullptr) body.tile_sums()[tile] = squares[0];
  }
};

void copy(const CopyList& list, const void* src, void* dst, Stream) { with_body<CopyBody>(run_tiles, list, src, dst); }

void pack_gradients(const CopyList& list, const PackTable& grads, void* dst, Scale scale, Stream) {
  with_body<PackBody>(run_tiles, list, grads, dst, scale);
}

void all_gather_peer(const CopyList& list, const PeerTable& peers, void* dst, Stream) {
  require_ranks(peers.num_ranks, "all_gather_peer");
  with_body<GatherPeersBody>(run_tiles, list, peers, dst);
}

void reduce(const ReduceList& list, const PeerTable& sources, const TargetTable& targets, const ReduceArgs& args,
            Stream) {
  require_ranks(sources.num_ranks, "reduce");
  with_body<ReduceBody>(run_sums, list, sources, targets, args);
}

void sum_squares(const ReduceList& list, const TargetTable& targets, double* tile_sums, float* found_inf, Stream) {
  with_body<SquareBody>(run_sums, list, targets, tile_sums, found_inf);
}

void add_up(const double* values, int64_t num, double* sum, Stream) {
  double sums[kSumThreads];
  for (int thread = 0; thread < kSumThreads; ++thread) sums[thread] = strided_sum(values, num, thread);
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    for (int thread = 0; thread < half; ++thread) fold_half(sums, half, thread);
  }
  *sum = sums[0];
}

void clip_factor(const double* square_sum, double max_norm, bool in_f64, double* norm, double* factor, Stream) {
  set_clip_factor(*square_sum, max_norm, in_f64, norm, factor);
}

void scale_gradients(const ReduceList& list, const TargetTable& targets, const double* factor, Stream) {
  with_body<ScaleBody>(run_tiles, list, targets, factor);
}

void adamw(const AdamWList& list, const AdamWArgs& args, Stream) {
  if (args.stochastic) return run_tiles(AdamWBody<true>{list, args}, list.num_tiles);
  run_tiles(AdamWBody<false>{list, args}, list.num_tiles);
}

void sgd(const SgdList& list, const SgdArgs& args, Stream) {
  if (args.stochastic) return run_tiles(SgdBody<true>{list, args}, list.num_tiles);
  run_tiles(SgdBody<false>{list, args}, list.num_tiles);
}

void peer_barrier(const SignalTable& signals, uint32_t epoch, uint64_t timeout_ns, uint32_t* timed_out, Stream) {
  using Clock = std::chrono::steady_clock;
  require_signals(signals, epoch);
  for (int peer = 0; peer < signals.num_ranks; ++peer) signal(signals.pad[peer] + signals.rank, epoch);
  const auto deadline = Clock::now() + std::chrono::nanoseconds(timeout_ns);
  for (int peer = 0; peer < signals.num_ranks; ++peer) {
    while (!has_signalled(signals.pad[signals.rank] + peer, epoch)) {
      if (Clock::now() > deadline) {
        *timed_out = 1;
        return;
      }
      ::sched_yield();
    }
  }
}

// True when x * (1 / divisor) has the same bits as x / divisor for every x.
bool reciprocal_is_exact(double divisor) {
  int exponent = 0;
  const auto single = static_cast<float>(divisor);
  return std::fabs(std::frexp(divisor, &exponent)) == 0.5 && std::isnormal(single) && std::isnormal(1.0f / single);
}

}  // namespace

Scale divide_by(double divisor) {
  if (divisor == 1.0) return {};
  if (reciprocal_is_exact(divisor)) return {1.0 / divisor, divisor, ScaleMode::multiply};
  return {divisor, 1.0 / divisor, ScaleMode::divide};
}

Scale multiply_by(double factor) {
  if (factor == 1.0) return {};
  return {factor, 1.0 / factor, ScaleMode::multiply};
}

const Kernels& twin_kernels() {
  static const Kernels kernels = {
      .name = "twin",
      .copy = copy,
      .pack_gradients = pack_gradients,
      .all_gather_peer = all_gather_peer,
      .reduce = reduce,
      .sum_squares = sum_squares,
      .add_up = add_up,
      .clip_factor = clip_factor,
      .scale_gradients = scale_gradients,
      .adamw = adamw,
      .sgd = sgd,
      .peer_barrier = peer_barrier,
      .is_capturing = [](Stream) { return false; },
  };
  return kernels;
}

}  // namespace fsdp2x::cuda
