// Runs plans through tables of kernels.
#include "engine/transport/device/plan_runner.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "engine/memory/device_kernels.hpp"
#include "engine/memory/uploaded_plan.hpp"

namespace fsdp2x {

namespace {

// An uploaded plan, freed in the order of the stream that was current when it was made. Another stream that runs it
// also holds it.
template <class Segment>
struct LayerPlan {
  LayerPlan(cuda::Plan<Segment> plan, DeviceLayer& layer)
      : image(upload(std::move(plan), layer)), home(layer.current_stream()) {}
  static UploadedPlan<Segment> upload(cuda::Plan<Segment> plan, DeviceLayer& layer) {
    const LaneScope scope(layer, Lane::host);  // it waits until the plan has arrived
    at::Tensor memory = layer.allocate(memory_bytes(plan));
    return {std::move(plan), std::move(memory), Arrival::now};
  }
  cuda::List<Segment> list(DeviceLayer& layer) const {
    if (home && home != layer.current_stream()) layer.hold(image.memory);
    return image.list();
  }
  // Call before it is freed.
  void end(DeviceLayer& layer) const {
    std::optional<StreamScope> scope;
    if (home) scope.emplace(layer, *home);
    layer.free(image.memory);
  }

  UploadedPlan<Segment> image;
  std::optional<c10::Stream> home;
};

template <class Segment>
std::vector<LayerPlan<Segment>> upload(std::vector<cuda::Plan<Segment>> plans, DeviceLayer& layer) {
  std::vector<LayerPlan<Segment>> uploaded;
  for (auto& plan : plans) uploaded.emplace_back(std::move(plan), layer);
  return uploaded;
}

// Combinations of gradient dtypes whose plans are kept. Most models have one, and mixed gradients have few.
constexpr size_t kMaxPacks = 8;

// The prepared plans of a SegmentPlan: packing for each combination of gradient dtypes and each piece, and the rows.
struct Prepared {
  // The last dtype of each gradient. A missing gradient keeps it, so that plans do not depend on which gradients exist.
  std::vector<DType> types;
  std::map<std::tuple<std::vector<DType>, size_t, size_t>, std::vector<LayerPlan<cuda::PackSegment>>> packs;
  std::vector<LayerPlan<cuda::ReduceSegment>> rows;
};

Prepared& prepared_of(SegmentPlan& plan) {
  if (!plan.prepared) {
    const auto made = std::make_shared<Prepared>();
    for (const ParamPlace& place : plan.layout->params()) made->types.push_back(place.shape.compute);
    plan.prepared = made;
  }
  return *static_cast<Prepared*>(plan.prepared.get());
}

// The prepared plan of a CopyProgram: copies that the kernels serve, and the others.
struct PreparedCopies {
  LayerPlan<cuda::CopySegment> plan;
  std::vector<Copy> left_over;
};

std::shared_ptr<PreparedCopies> prepare(const std::vector<Copy>& copies, DeviceLayer& layer) {
  std::vector<Copy> served, left_over;
  for (const Copy& copy : copies) (cuda::serves(copy) ? served : left_over).push_back(copy);
  return std::make_shared<PreparedCopies>(PreparedCopies{{cuda::plan_copies(served), layer}, std::move(left_over)});
}

// The prepared plans of a WireProgram: as many parts as launches need to cover its parameters.
using PreparedCodes = std::vector<LayerPlan<cuda::WireSegment>>;

const PreparedCodes& prepared_of(const WireProgram& program, DeviceLayer& layer) {
  if (!program.prepared) {
    std::map<int32_t, std::vector<cuda::WireSegment>> parts;  // by the first parameter
    for (cuda::WireSegment segment : program.segments) {
      const int32_t first = segment.source / cuda::kMaxTable * cuda::kMaxTable;
      segment.source -= first;
      parts[first].push_back(segment);
    }
    std::vector<cuda::WirePlan> plans;
    for (auto& [first, segments] : parts) plans.emplace_back(cuda::make_plan(std::move(segments))).first = first;
    program.prepared = std::make_shared<PreparedCodes>(upload(std::move(plans), layer));
  }
  return *static_cast<const PreparedCodes*>(program.prepared.get());
}

bool names(const auto& part, size_t param) {
  return param >= static_cast<size_t>(part.image.plan.first) &&
         param < static_cast<size_t>(part.image.plan.first) + static_cast<size_t>(cuda::kMaxTable);
}

}  // namespace

const std::vector<Copy>& PlanRunner::copy(const CopyProgram& program, const void* src, void* dst,
                                          cuda::Stream stream) const {
  const DeviceScope scope(layer_.device());
  if (!program.prepared) program.prepared = prepare(program.copies, layer_);
  const auto& prepared = *static_cast<const PreparedCopies*>(program.prepared.get());
  if (prepared.plan.image.plan.num_tiles() > 0) kernels_.copy(prepared.plan.list(layer_), src, dst, stream);
  return prepared.left_over;
}

std::vector<PackItem> PlanRunner::launch_pack(SegmentPlan& plan, const Piece& piece, const std::vector<PackItem>& items,
                                              const std::vector<uint8_t>& flags, void* buffer,
                                              cuda::Stream stream) const {
  const DeviceScope scope(layer_.device());
  auto& [types, packs, rows] = prepared_of(plan);
  const std::vector<ParamPlace>& places = plan.layout->params();
  std::vector<PackItem> left_over;
  for (const PackItem& item : items) {
    if (item.source != nullptr) types[item.param] = item.type;
    if (!cuda::packs(places[item.param], types[item.param])) left_over.push_back(item);
  }
  const std::tuple key(types, piece.begin, piece.end);
  if (!packs.contains(key)) {
    if (packs.size() >= kMaxPacks * (plan.pieces.size() + 1)) {
      for (const auto& [known, parts] : packs) {
        for (const auto& part : parts) part.end(layer_);
      }
      packs.clear();
    }
    packs.emplace(key, upload(cuda::plan_pack(*plan.layout, types, plan.segment_bytes, piece), layer_));
  }
  for (const auto& part : packs.at(key)) {
    cuda::PackTable table;
    const auto first = static_cast<size_t>(part.image.plan.first);
    for (size_t entry = 0; entry < cuda::kMaxTable && first + entry < places.size(); ++entry) {
      // A parameter that is never packed has a flag as well.
      const bool is_packed = places[first + entry].shape.trainable;
      table.mode[entry] = is_packed ? cuda::TableMode::skip : cuda::TableMode::write;
      table.flag[entry] = flags[first + entry] != 0;
    }
    for (const PackItem& item : items) {
      if (!names(part, item.param)) continue;
      table.base[item.param - first] = item.source;
      table.mode[item.param - first] = item.add ? cuda::TableMode::add : cuda::TableMode::write;
    }
    kernels_.pack_gradients(part.list(layer_), table, buffer, stream);
  }
  return left_over;
}

std::vector<RowItem> PlanRunner::write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const void* segment,
                                            double divisor, cuda::Stream stream) const {
  const DeviceScope scope(layer_.device());
  Prepared& prepared = prepared_of(plan);
  if (prepared.rows.empty()) prepared.rows = upload(cuda::plan_reduce(*plan.layout), layer_);
  cuda::ReduceArgs args;
  args.scale = cuda::divide_by(divisor);
  args.round = true;
  for (const auto& part : prepared.rows) {
    cuda::TargetTable table;
    std::fill(std::begin(table.mode), std::end(table.mode), cuda::TableMode::skip);
    for (const RowItem& item : items) {
      if (!names(part, item.param)) continue;
      const size_t entry = item.param - static_cast<size_t>(part.image.plan.first);
      table.base[entry] = item.target;
      table.mode[entry] = item.accumulate ? cuda::TableMode::add : cuda::TableMode::write;
    }
    kernels_.reduce(part.list(layer_), segment, table, args, stream);
  }
  std::vector<RowItem> left_over;
  for (const RowItem& item : items) {
    const ParamShape& shape = plan.layout->params()[item.param].shape;
    if (!cuda::computes(shape.reduce, shape.grad())) left_over.push_back(item);
  }
  return left_over;
}

void PlanRunner::encode(const WireProgram& program, const void* values, void* segments, void* errors,
                        const std::vector<uint8_t>& filled, cuda::Stream stream) const {
  const DeviceScope scope(layer_.device());
  for (const auto& part : prepared_of(program, layer_)) {
    cuda::EncodeWireArgs args;
    args.values = values;
    args.segments = segments;
    args.errors = errors;
    for (size_t param = 0; param < filled.size(); ++param) {
      if (names(part, param)) args.is_missing[param - static_cast<size_t>(part.image.plan.first)] = filled[param] == 0;
    }
    kernels_.encode_wire(part.list(layer_), args, stream);
  }
}

void PlanRunner::decode(const WireProgram& program, const void* segments, void* values, cuda::Stream stream) const {
  const DeviceScope scope(layer_.device());
  for (const auto& part : prepared_of(program, layer_)) {
    kernels_.decode_wire(part.list(layer_), segments, values, stream);
  }
}

void PlanRunner::sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks,
                           double divisor, void* values, cuda::Stream stream) const {
  const DeviceScope scope(layer_.device());
  const cuda::SumWireArgs args = {segments, static_cast<int64_t>(segment_bytes), num_ranks, cuda::divide_by(divisor),
                                  values};
  for (const auto& part : prepared_of(program, layer_)) kernels_.sum_wire(part.list(layer_), args, stream);
}

}  // namespace fsdp2x
