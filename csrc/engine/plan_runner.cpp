// Plans through tables of kernels.
#include "engine/plan_runner.hpp"

#include <algorithm>
#include <map>

#include "engine/device_kernels.hpp"
#include "engine/uploaded_plan.hpp"

namespace fsdp2x {

namespace {

template <class Segment>
std::vector<UploadedPlan<Segment>> upload(std::vector<cuda::Plan<Segment>> plans, at::Device device) {
  std::vector<UploadedPlan<Segment>> uploaded;
  for (auto& plan : plans) uploaded.emplace_back(std::move(plan), device);
  return uploaded;
}

// Combinations of gradient dtypes whose plans are kept. A model has one; gradients that come in several have few.
constexpr size_t kMaxPacks = 8;

// What a ReducePlan has of ours: packing for each combination of gradient dtypes, and the rows.
struct Prepared {
  // What each gradient had last. A missing one keeps it, so that plans do not depend on which gradients there are.
  std::vector<DType> types;
  std::map<std::vector<DType>, std::vector<UploadedPlan<cuda::CopySegment>>> packs;
  std::vector<UploadedPlan<cuda::ReduceSegment>> rows;
};

Prepared& prepared_of(ReducePlan& plan) {
  if (!plan.prepared) {
    const auto made = std::make_shared<Prepared>();
    for (const ParamPlace& place : plan.layout->params()) made->types.push_back(place.shape.compute);
    plan.prepared = made;
  }
  return *static_cast<Prepared*>(plan.prepared.get());
}

// A CopyProgram's: copies that the kernels serve, and the others.
struct PreparedCopies {
  UploadedPlan<cuda::CopySegment> image;
  std::vector<Copy> left_over;
};

std::shared_ptr<PreparedCopies> prepare(const std::vector<Copy>& copies, at::Device device) {
  std::vector<Copy> served, left_over;
  for (const Copy& copy : copies) (cuda::serves(copy) ? served : left_over).push_back(copy);
  return std::make_shared<PreparedCopies>(PreparedCopies{{cuda::plan_copies(served), device}, std::move(left_over)});
}

bool names(const auto& part, size_t param) {
  return param >= static_cast<size_t>(part.plan.first) &&
         param < static_cast<size_t>(part.plan.first) + static_cast<size_t>(cuda::kMaxTable);
}

}  // namespace

const std::vector<Copy>& PlanRunner::copy(const CopyProgram& program, const void* src, void* dst,
                                          cuda::Stream stream) const {
  const DeviceScope scope(device_);
  if (!program.prepared) program.prepared = prepare(program.copies, device_);
  const auto& prepared = *static_cast<const PreparedCopies*>(program.prepared.get());
  if (prepared.image.plan.num_tiles() > 0) kernels_.copy(prepared.image.list(), src, dst, stream);
  return prepared.left_over;
}

std::vector<PackItem> PlanRunner::pack(ReducePlan& plan, const std::vector<PackItem>& items, void* buffer,
                                       cuda::Stream stream) const {
  const DeviceScope scope(device_);
  auto& [types, packs, rows] = prepared_of(plan);
  std::vector<PackItem> left_over;
  for (const PackItem& item : items) {
    if (item.source != nullptr) types[item.param] = item.type;
    if (!cuda::computes(types[item.param], plan.layout->params()[item.param].shape.reduce)) left_over.push_back(item);
  }
  if (!packs.contains(types)) {
    if (packs.size() >= kMaxPacks) packs.clear();  // freed in the order of the compute lane, which reads them
    packs.emplace(types, upload(cuda::plan_pack(*plan.layout, types, plan.segment_bytes), device_));
  }
  for (const auto& part : packs.at(types)) {
    cuda::PackTable table;
    std::fill(std::begin(table.mode), std::end(table.mode), cuda::TableMode::skip);
    for (const PackItem& item : items) {
      if (!names(part, item.param)) continue;
      const size_t entry = item.param - static_cast<size_t>(part.plan.first);
      table.base[entry] = item.source;
      table.mode[entry] = item.add ? cuda::TableMode::add : cuda::TableMode::write;
    }
    kernels_.pack_gradients(part.list(), table, buffer, stream);
  }
  return left_over;
}

std::vector<RowItem> PlanRunner::write_rows(ReducePlan& plan, const std::vector<RowItem>& items, const void* segment,
                                            double divisor, cuda::Stream stream) const {
  const DeviceScope scope(device_);
  Prepared& prepared = prepared_of(plan);
  if (prepared.rows.empty()) prepared.rows = upload(cuda::plan_reduce(*plan.layout), device_);
  cuda::ReduceArgs args;
  args.scale = cuda::divide_by(divisor);
  args.round = true;
  for (const auto& part : prepared.rows) {
    cuda::TargetTable table;
    std::fill(std::begin(table.mode), std::end(table.mode), cuda::TableMode::skip);
    for (const RowItem& item : items) {
      if (!names(part, item.param)) continue;
      const size_t entry = item.param - static_cast<size_t>(part.plan.first);
      table.base[entry] = item.target;
      table.mode[entry] = item.accumulate ? cuda::TableMode::add : cuda::TableMode::write;
    }
    kernels_.reduce(part.list(), segment, table, args, stream);
  }
  std::vector<RowItem> left_over;
  for (const RowItem& item : items) {
    const ParamShape& shape = plan.layout->params()[item.param].shape;
    if (!cuda::computes(shape.reduce, shape.orig)) left_over.push_back(item);
  }
  return left_over;
}

}  // namespace fsdp2x
