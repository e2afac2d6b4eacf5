// Runs the engine's plans through a table of kernels: those of csrc/kernels/cuda on a device, or the reference kernels
// on the host. At its first run a plan is cut into tiles and uploaded, and the result is kept with the plan. After that
// a run is one launch, whichever gradients exist. Copies with an f64 side are returned to the caller: the kernels
// compute in fp32.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "engine/transport/device/device_layer.hpp"
#include "kernels/cuda/kernels.hpp"

namespace fsdp2x {

class PlanRunner {
 public:
  // `layer`: the owner. Plans are made and run in its current order.
  PlanRunner(const cuda::Kernels& kernels, DeviceLayer& layer) : kernels_(kernels), layer_(layer) {}

  // Arguments are those of DeviceLayer's functions of the same name. `stream`: where to enqueue, on the runner's
  // device, whichever device is current.
  const std::vector<Copy>& copy(const CopyProgram& program, const void* src, void* dst, cuda::Stream stream) const;
  // Flags come with the items, unless they are f64.
  std::vector<PackItem> launch_pack(SegmentPlan& plan, const Piece& piece, const std::vector<PackItem>& items,
                                    const std::vector<uint8_t>& flags, void* buffer, cuda::Stream stream) const;
  static bool writes_flags(const SegmentPlan& plan) { return cuda::packs_flags(*plan.layout); }
  std::vector<RowItem> write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const void* segment,
                                  double divisor, cuda::Stream stream) const;
  void encode(const WireProgram& program, const void* values, void* segments, void* errors,
              const std::vector<uint8_t>& filled, cuda::Stream stream) const;
  void decode(const WireProgram& program, const void* segments, void* values, cuda::Stream stream) const;
  void sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks, double divisor,
                 void* values, cuda::Stream stream) const;

 private:
  const cuda::Kernels& kernels_;
  DeviceLayer& layer_;
};

}  // namespace fsdp2x
