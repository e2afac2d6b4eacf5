// Stream order, and memory of the process groups.
#include "engine/transport/device/device_context.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace fsdp2x {

DeviceContext::DeviceContext(DeviceCollectives collectives, std::shared_ptr<DeviceLayer> layer)
    : collectives_(std::move(collectives)), layer_(std::move(layer)) {
  for (size_t lane = 0; lane < kNumLanes; ++lane) {
    lane_events_.push_back(layer_->make_event(lane_name(static_cast<Lane>(lane))));
  }
}

std::unique_ptr<DeviceBuffers> DeviceContext::make_buffers(const std::string& name, bool tallied) {
  auto buffers = std::make_unique<DeviceBuffers>(
      name, layer_, [this](size_t bytes) { return allocate(bytes); }, keeps(), tallied ? &tally_ : nullptr);
  all_buffers_.push_back(buffers.get());
  return buffers;
}

at::Tensor DeviceContext::allocate(size_t bytes) {
  if (!collectives_.allocate) return layer_->allocate(bytes);
  const pybind11::gil_scoped_acquire gil;
  const PyRef size = PyRef::steal(PyLong_FromSize_t(bytes));
  const PyRef memory = call(gil, collectives_.allocate.get(), size.get());
  return THPVariable_Unpack(memory.get());
}

void DeviceContext::follow(Lane lane, Lane other) {
  DeviceEvent& event = *lane_events_[static_cast<size_t>(other)];
  layer_->record(event, other);
  layer_->wait(lane, event);
}

void DeviceContext::host_waits_for(Lane lane) {
  DeviceEvent& event = *lane_events_[static_cast<size_t>(lane)];
  layer_->record(event, lane);
  layer_->synchronize(event);
}

void DeviceContext::follow_blocks(Lane lane) {
  for (const Lane other : {Lane::reduce, Lane::all_reduce}) {
    if (other != lane && lanes_with_freed_blocks_[static_cast<size_t>(other)]) follow(lane, other);
  }
}

}  // namespace fsdp2x
