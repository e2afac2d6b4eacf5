// Measures each kernel's share of a device-to-device copy's bandwidth, on the plans of a transformer block. Prints
// JSON. benchmarks/gpu/bench_kernels.py runs it and stores the numbers.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "core/gather_plan.hpp"
#include "device_memory.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda {
namespace {

constexpr int kWorld = 8;
constexpr int kRounds = 9;
constexpr int kCalls = 10;

// Device memory full of zeros, so that no kernel meets a subnormal or NaN.
class Memory {
 public:
  explicit Memory(size_t bytes) : data_(device_memory::allocate(bytes)) { device_memory::clear(data_, bytes); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { device_memory::release(data_); }
  void* data() const { return data_; }
  std::byte* at(size_t offset) const { return static_cast<std::byte*>(data_) + offset; }

 private:
  void* data_;
};

template <class Segment>
class Uploaded {
 public:
  explicit Uploaded(const Plan<Segment>& plan) : plan_(plan), image_(plan.image_bytes()) {
    std::vector<std::byte> image(plan.image_bytes());
    plan.write_image(image.data());
    device_memory::upload(image_.data(), image.data(), image.size());
  }
  List<Segment> list() const { return plan_.list(image_.data()); }

 private:
  Plan<Segment> plan_;
  Memory image_;
};

// Qwen3-8B: attention with 32 query and 8 key heads of 128, a gated MLP, two norms.
std::vector<ParamShape> block(DType orig, DType compute, DType reduce) {
  std::vector<ParamShape> shapes;
  for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{4096, 4096},
                                                                              {1024, 4096},
                                                                              {1024, 4096},
                                                                              {4096, 4096},
                                                                              {12288, 4096},
                                                                              {12288, 4096},
                                                                              {4096, 12288},
                                                                              {4096, 1},
                                                                              {4096, 1},
                                                                              {128, 1},
                                                                              {128, 1}}) {
    shapes.push_back({.outer = 1, .dim = rows, .inner = columns, .orig = orig, .compute = compute, .reduce = reduce});
  }
  return shapes;
}

int64_t numel_of(const Layout& layout) {
  int64_t numel = 0;
  for (const ParamPlace& place : layout.params()) numel += place.shape.numel();
  return numel;
}

int64_t shard_numel_of(const Layout& layout) {
  int64_t numel = 0;
  for (const ParamPlace& place : layout.params()) numel += place.shard_numel;
  return numel;
}

class Report {
 public:
  // `bytes`: read and written. The copy that it is compared with moves as many.
  template <class Work>
  void measure(const std::string& name, int64_t bytes, const Work& work) {
    const size_t half = static_cast<size_t>(bytes) / 2;
    double copy_ms = 0;
    {
      const Memory src(half), dst(half);
      copy_ms = device_memory::milliseconds(
          [&](Stream stream) { device_memory::copy(dst.data(), src.data(), half, stream); }, kRounds, kCalls);
    }
    const double ms = device_memory::milliseconds(work, kRounds, kCalls);
    std::printf(
        "%s\n    {\"kernel\": \"%s\", \"bytes\": %lld, \"ms\": %.4f, \"gb_per_s\": %.1f, "
        "\"copy_ms\": %.4f, \"share_of_copy\": %.3f}",
        first_ ? "" : ",", name.c_str(), static_cast<long long>(bytes), ms, static_cast<double>(bytes) / ms * 1e-6,
        copy_ms, copy_ms / ms);
    std::fflush(stdout);
    first_ = false;
  }

 private:
  bool first_ = true;
};

void bench_copies(const Kernels& kernels, Report& report) {
  const Layout layout(block(DType::f32, DType::bf16, DType::bf16), 1, 0);
  const Memory pool(layout.shard_pool_bytes()), slot(layout.slot_bytes());
  const Uploaded cast(plan_copies(layout.shard_to_slot()));
  report.measure("copy: cast f32 pool to bf16 slot", 6 * numel_of(layout),
                 [&](Stream stream) { kernels.copy(cast.list(), pool.data(), slot.data(), stream); });

  const Layout shard(block(DType::f32, DType::bf16, DType::bf16), kWorld, 0);
  const Memory segments(shard.gather_segment_bytes() * kWorld);
  const Uploaded out(plan_copies(plan_gather(shard, kPackEverything).staging_to_slot));
  report.measure("copy: copy out of 8 bf16 segments", 4 * numel_of(shard),
                 [&](Stream stream) { kernels.copy(out.list(), segments.data(), slot.data(), stream); });
}

void bench_pack(const Kernels& kernels, Report& report, DType reduce) {
  const Layout layout(block(DType::f32, DType::bf16, reduce), kWorld, 0);
  const std::vector<DType> types(layout.params().size(), DType::bf16);
  const size_t stride = layout.reduce_segment_bytes();
  const Memory gradients(layout.slot_bytes()), packed(stride * kWorld);
  const Uploaded plan(plan_pack(layout, types, stride).at(0));
  PackTable table;
  for (size_t i = 0; i < types.size(); ++i) table.base[i] = gradients.at(layout.params()[i].slot_offset);
  const auto bytes = static_cast<int64_t>(2 + dtype_bytes(reduce)) * numel_of(layout);
  report.measure(std::string("pack_gradients: bf16 to ") + dtype_name(reduce), bytes,
                 [&](Stream stream) { kernels.pack_gradients(plan.list(), table, packed.data(), stream); });
}

void bench_reduce(const Kernels& kernels, Report& report, DType wire, TableMode mode) {
  // One rank's rows of a block eight times the size, so that the kernel is not over at once.
  std::vector<ParamShape> shapes = block(DType::f32, DType::bf16, wire);
  for (ParamShape& shape : shapes) shape.dim *= kWorld;
  const Layout layout(shapes, kWorld, 0);
  const size_t segment = layout.reduce_segment_bytes();
  const Memory source(segment), pool(layout.shard_pool_bytes());
  const Uploaded plan(plan_reduce(layout).at(0));
  TargetTable targets;
  for (size_t i = 0; i < shapes.size(); ++i) {
    targets.base[i] = pool.at(layout.params()[i].shard_offset);
    targets.mode[i] = mode;
  }
  ReduceArgs args;
  args.scale = divide_by(kWorld);
  const bool add = mode == TableMode::add;
  const auto bytes = (static_cast<int64_t>(dtype_bytes(wire)) + (add ? 8 : 4)) * shard_numel_of(layout);
  const std::string name = std::string("reduce: ") + dtype_name(wire) + (add ? " added to f32" : " to f32");
  report.measure(name, bytes,
                 [&](Stream stream) { kernels.reduce(plan.list(), source.data(), targets, args, stream); });
}

// The parameters of a block at their offsets in pools. The pools follow one another, so that they are aligned as those
// of a training step are, and not all alike.
void bench_adamw(const Kernels& kernels, Report& report, DType param, DType moment, bool stochastic) {
  const Layout layout(block(param, param, param), 1, 0);
  const size_t pool = layout.shard_pool_bytes(), moments = pool / dtype_bytes(param) * dtype_bytes(moment);
  const Memory memory(2 * pool + 2 * moments);
  std::vector<AdamWSegment> segments;
  AdamWArgs args;
  args.steps[0] = {0.999f, 0.1f, 0.95f, 0.05f, 0.5f, 1e-8f, -1e-3f, 1.0f};
  for (const ParamPlace& place : layout.params()) {
    const size_t moment_offset = place.shard_offset / dtype_bytes(param) * dtype_bytes(moment);
    AdamWSegment& segment = segments.emplace_back();
    segment.param = memory.at(place.shard_offset);
    segment.exp_avg = memory.at(2 * pool + moment_offset);
    segment.exp_avg_sq = memory.at(2 * pool + moments + moment_offset);
    segment.numel = place.shard_numel;
    segment.source = static_cast<int32_t>(segments.size()) - 1;
    segment.type = param;
    segment.moment_type = moment;
    args.grads[segment.source] = memory.at(pool + place.shard_offset);
  }
  args.stochastic = stochastic;
  args.rounding = {1, 1};
  const Uploaded plan(make_plan(segments));
  const auto bytes = static_cast<int64_t>(3 * dtype_bytes(param) + 4 * dtype_bytes(moment)) * shard_numel_of(layout);
  const std::string name = std::string("adamw: ") + dtype_name(param) + ", moments " + dtype_name(moment) +
                           (stochastic ? ", stochastic rounding" : "");
  report.measure(name, bytes, [&](Stream stream) { kernels.adamw(plan.list(), args, stream); });
}

// Compares equal f32 arrays, because a delta reads all elements and lists few.
void bench_changes(const Kernels& kernels, Report& report) {
  constexpr int64_t kNumel = 200'000'000;
  const Memory now(kNumel * 4), held(kNumel * 4);
  ChangesArgs args;
  args.now = now.data();
  args.held = held.data();
  args.numel = kNumel;
  args.element_bytes = 4;
  args.element_shift = 2;
  const auto num_tiles = static_cast<size_t>(args.num_tiles());
  const Memory masks(static_cast<size_t>(args.num_masks()) * sizeof(uint16_t)), counts(num_tiles * sizeof(int64_t));
  args.masks = static_cast<uint16_t*>(masks.data());
  args.tile_counts = static_cast<int64_t*>(counts.data());
  report.measure("mark_changes: f32", 8 * kNumel + args.num_masks() * 2,
                 [&](Stream stream) { kernels.mark_changes(args, stream); });
}

int run() {
  if (const std::string reason = device_memory::unavailable(); !reason.empty()) {
    std::fprintf(stderr, "%s\n", reason.c_str());
    return 77;
  }
  const Kernels& kernels = *device_kernels();
  std::printf("{\"device\": \"%s\", \"rows\": [", device_memory::device_name().c_str());
  Report report;
  bench_copies(kernels, report);
  bench_pack(kernels, report, DType::bf16);
  bench_pack(kernels, report, DType::f32);
  for (const DType wire : {DType::bf16, DType::f32}) {
    for (const TableMode mode : {TableMode::write, TableMode::add}) bench_reduce(kernels, report, wire, mode);
  }
  bench_adamw(kernels, report, DType::f32, DType::f32, false);
  bench_adamw(kernels, report, DType::bf16, DType::f32, true);
  bench_adamw(kernels, report, DType::bf16, DType::bf16, false);
  bench_adamw(kernels, report, DType::bf16, DType::bf16, true);
  bench_changes(kernels, report);
  std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fsdp2x::cuda

int main() {
  try {
    return fsdp2x::cuda::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_kernels: %s\n", error.what());
    return 1;
  }
}
