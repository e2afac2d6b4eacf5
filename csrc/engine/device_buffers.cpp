// Device memory that is lent again and again.
#include "engine/device_buffers.hpp"

#include <algorithm>
#include <bit>

#include "core/error.hpp"
#include "core/layout.hpp"

namespace fsdp2x {

size_t size_class(size_t bytes) {
  const size_t step = std::max<size_t>(std::bit_ceil(bytes) / 32, kAlignBytes);
  return (bytes + step - 1) / step * step;
}

DeviceBuffers::~DeviceBuffers() {
  try {
    for (const auto& buffer : buffers_) drop(*buffer);
  } catch (const std::exception&) {
    // The device is gone, and its memory with it.
  }
}

int DeviceBuffers::acquire(size_t bytes, const std::string& owner, bool* is_new) {
  int best = -1;
  int unused = -1;  // has lost its memory
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const DeviceBuffer& buffer = *buffers_[i];
    if (buffer.is_owned) continue;
    if (!buffer.memory.defined()) {
      unused = static_cast<int>(i);
      continue;
    }
    const size_t capacity = buffer.memory.nbytes();
    if (capacity < bytes || capacity > 2 * size_class(bytes)) continue;
    const auto rank = [this](int id) { return std::pair((*this)[id].memory.nbytes(), (*this)[id].released_at); };
    if (best < 0 || rank(static_cast<int>(i)) < rank(best)) best = static_cast<int>(i);
  }
  *is_new = best < 0;
  if (best < 0) {
    best = unused;
    if (best < 0) {
      best = static_cast<int>(buffers_.size());
      const std::string label = name_ + std::to_string(best);
      buffers_.push_back(std::make_unique<DeviceBuffer>());
      buffers_.back()->ready = layer_->make_event(label + ".ready");
      buffers_.back()->free = layer_->make_event(label + ".free");
    }
    (*this)[best].memory = allocate_(size_class(bytes));
    ++num_allocations_;
  }
  DeviceBuffer& buffer = (*this)[best];
  buffer.is_owned = true;
  buffer.owner = owner;
  owned_bytes_ += buffer.memory.nbytes();
  peak_owned_bytes_ = std::max(peak_owned_bytes_, owned_bytes_);
  return best;
}

void DeviceBuffers::release(int id) {
  DeviceBuffer& buffer = (*this)[id];
  if (!buffer.is_owned)
    throw Error("fsdp2x: " + name_ + std::to_string(id) + " was released twice; owned: " + owners());
  buffer.is_owned = false;
  buffer.released_at = ++num_releases_;
  owned_bytes_ -= buffer.memory.nbytes();
}

void DeviceBuffers::drop(DeviceBuffer& buffer) {
  if (!buffer.memory.defined()) return;
  // The allocator hands the memory out in the order of the compute lane.
  layer_->wait(Lane::compute, *buffer.ready);
  layer_->wait(Lane::compute, *buffer.free);
  buffer.memory = at::Tensor();
}

void DeviceBuffers::drop_idle() {
  for (const auto& buffer : buffers_) {
    if (!buffer->is_owned) drop(*buffer);
  }
}

size_t DeviceBuffers::num_owned() const {
  return static_cast<size_t>(
      std::count_if(buffers_.begin(), buffers_.end(), [](const auto& buffer) { return buffer->is_owned; }));
}

size_t DeviceBuffers::bytes() const {
  size_t total = 0;
  for (const auto& buffer : buffers_) total += buffer->memory.defined() ? buffer->memory.nbytes() : 0;
  return total;
}

std::string DeviceBuffers::owners() const {
  std::string text;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const DeviceBuffer& buffer = *buffers_[i];
    if (!buffer.is_owned) continue;
    if (!text.empty()) text += "; ";
    text +=
        name_ + " " + std::to_string(i) + " (" + std::to_string(buffer.memory.nbytes()) + " bytes): " + buffer.owner;
  }
  return text.empty() ? "empty" : text;
}

}  // namespace fsdp2x
