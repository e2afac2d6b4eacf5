// Borrowed device memory.
#include "engine/transport/device/device_buffers.hpp"

#include <c10/core/InferenceMode.h>

#include "core/error.hpp"
#include "core/slots.hpp"
#include "engine/memory/storage.hpp"

namespace fsdp2x {

DeviceBuffers::~DeviceBuffers() {
  try {
    for (size_t id = 0; id < buffers_.size(); ++id) drop(static_cast<int>(id), /*has_waited=*/false);
  } catch (const std::exception&) {
    // The device is gone, and its memory with it.
  }
}

void DeviceBuffers::open(int id, size_t bytes) {
  if (static_cast<size_t>(id) == buffers_.size()) {
    const std::string label = name_ + std::to_string(id);
    buffers_.push_back(std::make_unique<DeviceBuffer>());
    buffers_.back()->ready = layer_->make_event(label + ".ready");
    buffers_.back()->free = layer_->make_event(label + ".free");
    buffers_.back()->storage = tensor_without_memory({0}, at::kByte, layer_->device()).storage();
  }
  DeviceBuffer& buffer = (*this)[id];
  const c10::InferenceMode normal(false);  // an evaluation may be the first to use it
  buffer.stream = layer_->current_stream();
  buffer.block = allocate_(bytes);
  buffer.memory = tensor_over_storage(buffer.storage, buffer.block);
}

int DeviceBuffers::acquire(size_t bytes, const std::string& owner, bool* is_new) {
  const BufferLedger::Acquired found = ledger_.acquire(bytes, [this](int id, size_t size) {
    open(id, size);
    return (*this)[id].memory.nbytes();
  });
  (*this)[found.id].owner = owner;
  *is_new = found.is_new;
  return found.id;
}

void DeviceBuffers::release(int id, bool has_waited) {
  if (!ledger_.is_owned(id))
    throw Error("fsdp2x: " + name_ + std::to_string(id) + " was released twice. Owned: " + listed(owners()));
  ledger_.release(id, [&](int unkept) { drop(unkept, has_waited); });
}

void DeviceBuffers::drop(int id, bool has_waited) {
  DeviceBuffer& buffer = (*this)[id];
  if (!buffer.memory.defined()) return;
  // The current stream may have changed: the user runs backward elsewhere, or another lane is active.
  const bool is_away = buffer.stream && buffer.stream != layer_->current_stream();
  std::optional<StreamScope> home;
  if (is_away) home.emplace(*layer_, *buffer.stream);
  if (is_away || !has_waited) {
    layer_->wait(Lane::compute, *buffer.ready);
    layer_->wait(Lane::compute, *buffer.free);
  }
  ledger_.close(id);
  point_storage(*buffer.storage.unsafeGetStorageImpl(), nullptr, layer_->device());
  buffer.memory = at::Tensor();
  layer_->free(std::exchange(buffer.block, at::Tensor()));
  for (at::Tensor& tenant : std::exchange(buffer.tenants, {})) layer_->free(std::move(tenant));
}

void DeviceBuffers::drop_idle() {
  for (int id = 0; id < static_cast<int>(buffers_.size()); ++id) {
    if (!ledger_.is_owned(id)) drop(id, /*has_waited=*/false);
  }
}

void DeviceBuffers::set_keeps(bool keeps) {
  if (ledger_.keeps() && !keeps) drop_idle();
  ledger_.set_keeps(keeps);
}

std::vector<std::string> DeviceBuffers::owners() const {
  std::vector<std::string> owned;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const DeviceBuffer& buffer = *buffers_[i];
    if (!ledger_.is_owned(static_cast<int>(i))) continue;
    owned.push_back(name_ + " " + std::to_string(i) + " (" + std::to_string(buffer.memory.nbytes()) +
                    " bytes): " + buffer.owner);
  }
  return owned;
}

}  // namespace fsdp2x
