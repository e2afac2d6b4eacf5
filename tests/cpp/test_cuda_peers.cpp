// The barrier between ranks: virtual ranks in threads (on a device: in streams) of one process.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "core/error.hpp"
#include "executor.hpp"

namespace fsdp2x::cuda {
namespace {

constexpr uint64_t kPatienceNs = 20'000'000'000;

struct Pads {
  explicit Pads(int world) : num_ranks(world) {
    const std::vector<uint32_t> zeros(static_cast<size_t>(world));
    for (int rank = 0; rank < world; ++rank) pads.emplace_back(std::as_bytes(std::span(zeros)), 0);
  }
  SignalTable table(int rank) const {
    SignalTable signals;
    signals.num_ranks = num_ranks;
    signals.rank = rank;
    for (int peer = 0; peer < num_ranks; ++peer) signals.pad[peer] = pads[static_cast<size_t>(peer)].as<uint32_t>();
    return signals;
  }
  void fill(uint32_t epoch) {
    const std::vector<uint32_t> words(static_cast<size_t>(num_ranks), epoch);
    for (Region& pad : pads) pad.write(std::as_bytes(std::span(words)));
  }
  int num_ranks;
  std::vector<Region> pads;
};

// Of one rank.
struct Waiting {
  explicit Waiting(size_t num_ranks) : missing(zeros(num_ranks), 0), has_given_up(zeros(1), 0) {}
  Patience patience(uint64_t timeout_ns) const {
    return {timeout_ns, has_given_up.as<uint32_t>(), missing.as<uint32_t>()};
  }
  static std::vector<std::byte> zeros(size_t num) { return std::vector<std::byte>(num * sizeof(uint32_t)); }
  Region missing, has_given_up;
};

class Barrier : public testing::TestWithParam<int> {};

constexpr uint32_t kRounds = 25;

// Copies of one word, in the order of a rank's stream.
class WordCopy {
 public:
  explicit WordCopy(int64_t num_words)
      : plan_(plan_copies(
            std::vector<Copy>{{0, 0, 1, 4 * num_words, 4 * num_words, 4 * num_words, DType::byte, DType::byte}})) {}
  void run(const uint32_t* src, uint32_t* dst, Stream stream) const { kernels().copy(plan_.list(), src, dst, stream); }

 private:
  Uploaded<CopySegment> plan_;
};

// A rank that is past the barrier sees what every peer wrote before it, round after round, also where the count of
// epochs wraps.
TEST_P(Barrier, NobodyPassesBeforeAllHaveCome) {
  const int world = GetParam();
  const auto num_ranks = static_cast<size_t>(world);
  Pads pads(world);
  std::vector<Stream> streams;
  for (int rank = 0; rank < world; ++rank) streams.push_back(executor().new_stream());
  std::vector<uint32_t> numbers(kRounds);
  for (uint32_t round = 0; round < kRounds; ++round) numbers[round] = round + 1;
  const Region rounds(std::as_bytes(std::span(numbers)), 0);
  const WordCopy one_word(1), all_words(world);
  for (const uint32_t start : {0u, 0xfffffff0u}) {
    pads.fill(start);
    const std::vector<uint32_t> zeros(num_ranks);
    std::vector<Waiting> waiting;
    for (int rank = 0; rank < world; ++rank) waiting.emplace_back(num_ranks);
    const Region marks(std::as_bytes(std::span(zeros)), 0);  // entry r is written by rank r
    std::vector<Region> logs;                                // per rank: the marks as it saw them in every round
    for (int rank = 0; rank < world; ++rank) logs.emplace_back(kRounds * num_ranks * sizeof(uint32_t));
    std::vector<std::thread> ranks;
    for (size_t rank = 0; rank < num_ranks; ++rank) {
      ranks.emplace_back([&, rank] {
        uint32_t epoch = start;
        const auto barrier = [&] {
          if (++epoch == 0) ++epoch;
          kernels().peer_barrier(pads.table(static_cast<int>(rank)), epoch, waiting[rank].patience(kPatienceNs),
                                 streams[rank]);
        };
        for (uint32_t round = 0; round < kRounds; ++round) {
          one_word.run(rounds.as<uint32_t>() + round, marks.as<uint32_t>() + rank, streams[rank]);
          barrier();
          all_words.run(marks.as<uint32_t>(), logs[rank].as<uint32_t>() + round * num_ranks, streams[rank]);
          barrier();
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const Waiting& rank : waiting) EXPECT_EQ(rank.missing.read_as<uint32_t>(), zeros);
    for (const Region& log : logs) {
      const std::vector<uint32_t> seen = log.read_as<uint32_t>();
      for (size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], numbers[i / num_ranks]) << "in word " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Barrier, testing::Values(1, 2, 3, 4, 5, 8));

TEST(Barrier, GivesUpOnPeersThatDoNotComeAndTellsNobodyAnyMore) {
  Pads pads(4);
  const std::vector<uint32_t> words = {0, 0, 0, 1};  // rank 3 has come, nobody else
  pads.pads[1].write(std::as_bytes(std::span(words)));
  const Waiting waiting(4);
  const Stream stream = executor().new_stream();
  kernels().peer_barrier(pads.table(1), 1, waiting.patience(20'000'000), stream);
  EXPECT_EQ(waiting.missing.read_as<uint32_t>(), (std::vector<uint32_t>{1, 0, 1, 0}));
  // It has told the others all the same.
  for (const size_t peer : {0, 2, 3}) {
    EXPECT_EQ(pads.pads[peer].read_as<uint32_t>(), (std::vector<uint32_t>{0, 1, 0, 0}));
  }
  // At once, whatever its patience is; who comes late must not take its word for what it has not done.
  kernels().peer_barrier(pads.table(1), 2, waiting.patience(uint64_t{1} << 62), stream);
  for (const size_t peer : {0, 2, 3}) {
    EXPECT_EQ(pads.pads[peer].read_as<uint32_t>(), (std::vector<uint32_t>{0, 1, 0, 0}));
  }
}

TEST(Barrier, RefusesNonsense) {
  SignalTable signals;
  EXPECT_THROW(kernels().peer_barrier(signals, 1, Patience(), nullptr), Error);
  signals.num_ranks = 2;
  signals.rank = 2;
  EXPECT_THROW(kernels().peer_barrier(signals, 1, Patience(), nullptr), Error);
  signals.rank = 0;
  EXPECT_THROW(kernels().peer_barrier(signals, 0, Patience(), nullptr), Error);
}

}  // namespace
}  // namespace fsdp2x::cuda
