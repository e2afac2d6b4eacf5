// Device memory that is lent.
#include "engine/device_buffers.hpp"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <bit>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "engine/storage.hpp"

namespace fsdp2x {

size_t size_class(size_t bytes) {
  const size_t step = std::max<size_t>(std::bit_ceil(bytes) / 32, kAlignBytes);
  return (bytes + step - 1) / step * step;
}

DeviceBuffers::~DeviceBuffers() {
  try {
    for (const auto& buffer : buffers_) drop(*buffer, /*has_waited=*/false);
  } catch (const std::exception&) {
    // The device is gone, and its memory with it.
  }
}

int DeviceBuffers::find(size_t bytes) const {
  int best = -1;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const DeviceBuffer& buffer = *buffers_[i];
    if (buffer.is_owned || !buffer.memory.defined()) continue;
    const size_t capacity = buffer.memory.nbytes();
    if (capacity < bytes || capacity > 2 * size_class(bytes)) continue;
    const auto rank = [this](size_t id) { return std::pair(buffers_[id]->memory.nbytes(), buffers_[id]->released_at); };
    if (best < 0 || rank(i) < rank(static_cast<size_t>(best))) best = static_cast<int>(i);
  }
  return best;
}

int DeviceBuffers::open(size_t bytes) {
  const auto is_unused = [](const auto& buffer) { return !buffer->memory.defined(); };
  const auto unused = std::find_if(buffers_.begin(), buffers_.end(), is_unused);
  const auto id = unused - buffers_.begin();
  if (unused == buffers_.end()) {
    const std::string label = name_ + std::to_string(id);
    buffers_.push_back(std::make_unique<DeviceBuffer>());
    buffers_.back()->ready = layer_->make_event(label + ".ready");
    buffers_.back()->free = layer_->make_event(label + ".free");
    buffers_.back()->storage = tensor_without_memory({0}, at::kByte, layer_->device()).storage();
  }
  DeviceBuffer& buffer = *buffers_[static_cast<size_t>(id)];
  const c10::InferenceMode normal(false);  // an evaluation may be the first to use it
  buffer.stream = layer_->current_stream();
  buffer.block = allocate_(keeps_ ? size_class(bytes) : bytes);
  buffer.memory = tensor_over_storage(buffer.storage, buffer.block);
  if (tally_ != nullptr) tally_->add(buffer.memory.nbytes());
  ++num_allocations_;
  note("take", buffer);
  return static_cast<int>(id);
}

int DeviceBuffers::acquire(size_t bytes, const std::string& owner, bool* is_new) {
  int id = keeps_ ? find(bytes) : -1;
  *is_new = id < 0;
  if (id < 0) id = open(bytes);
  DeviceBuffer& buffer = (*this)[id];
  buffer.is_owned = true;
  buffer.owner = owner;
  owned_bytes_ += buffer.memory.nbytes();
  peak_owned_bytes_ = std::max(peak_owned_bytes_, owned_bytes_);
  return id;
}

void DeviceBuffers::release(int id, bool has_waited) {
  DeviceBuffer& buffer = (*this)[id];
  if (!buffer.is_owned)
    throw Error("fsdp2x: " + name_ + std::to_string(id) + " was released twice; owned: " + owners());
  buffer.is_owned = false;
  buffer.released_at = ++num_releases_;
  owned_bytes_ -= buffer.memory.nbytes();
  if (!keeps_) drop(buffer, has_waited);
}

void DeviceBuffers::drop(DeviceBuffer& buffer, bool has_waited) {
  if (!buffer.memory.defined()) return;
  // The current stream may be another one by now: of a user who runs backward elsewhere, or of a lane.
  const bool is_away = buffer.stream && buffer.stream != layer_->current_stream();
  std::optional<StreamScope> home;
  if (is_away) home.emplace(*layer_, *buffer.stream);
  if (is_away || !has_waited) {
    layer_->wait(Lane::compute, *buffer.ready);
    layer_->wait(Lane::compute, *buffer.free);
  }
  note("give_back", buffer);
  if (tally_ != nullptr) tally_->bytes -= buffer.memory.nbytes();
  point_storage(*buffer.storage.unsafeGetStorageImpl(), nullptr, layer_->device());
  buffer.memory = at::Tensor();
  buffer.block = at::Tensor();
}

void DeviceBuffers::note(const char* operation, const DeviceBuffer& buffer) const {
  if (!layer_->is_recorder()) return;
  const LaneScope scope(*layer_, Lane::compute);
  layer_->note(operation, name_, {}, {{buffer.data(), buffer.memory.nbytes()}});
}

void DeviceBuffers::drop_idle() {
  for (const auto& buffer : buffers_) {
    if (!buffer->is_owned) drop(*buffer, /*has_waited=*/false);
  }
}

void DeviceBuffers::set_keeps(bool keeps) {
  if (keeps_ && !keeps) drop_idle();
  keeps_ = keeps;
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
