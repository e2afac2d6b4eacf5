// Device memory that is lent again and again: who has it on the host, and by which events the lanes hand it on. Nothing
// is allocated in a steady step, and nobody ever waits for memory: where none is free, more is taken.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/device_layer.hpp"

namespace fsdp2x {

struct DeviceBuffer {
  std::byte* data() const { return static_cast<std::byte*>(memory.data_ptr()); }

  at::Tensor memory;                   // bytes; undefined until it is first lent, and after drop_idle()
  std::unique_ptr<DeviceEvent> ready;  // its contents are complete
  std::unique_ptr<DeviceEvent> free;   // its last user has passed: whoever writes next waits for it
  std::string owner;
  bool is_owned = false;
  uint64_t released_at = 0;
};

// An event may follow the host's release long after: `release` only says that no more work will be enqueued that reads
// the buffer, `free` was recorded behind the last of it.
class DeviceBuffers {
 public:
  using Allocate = std::function<at::Tensor(size_t bytes)>;

  DeviceBuffers(std::string name, std::shared_ptr<DeviceLayer> layer, Allocate allocate)
      : name_(std::move(name)), layer_(std::move(layer)), allocate_(std::move(allocate)) {}
  ~DeviceBuffers();
  DeviceBuffers(const DeviceBuffers&) = delete;
  DeviceBuffers& operator=(const DeviceBuffers&) = delete;

  // A free buffer of at least `bytes` and not much more than twice as many, the smallest, then the one released longest
  // ago; otherwise a new one. `*is_new`: it was just allocated, in the order of the compute lane.
  int acquire(size_t bytes, const std::string& owner, bool* is_new);
  void release(int id);
  DeviceBuffer& operator[](int id) { return *buffers_[static_cast<size_t>(id)]; }
  // Gives the memory of buffers that nobody owns back to the allocator.
  void drop_idle();
  const std::string& name() const { return name_; }
  const std::vector<std::unique_ptr<DeviceBuffer>>& all() const { return buffers_; }

  size_t num_owned() const;
  size_t bytes() const;
  size_t peak_owned_bytes() const { return peak_owned_bytes_; }
  size_t num_allocations() const { return num_allocations_; }
  std::string owners() const;

 private:
  void drop(DeviceBuffer& buffer);

  std::string name_;
  std::shared_ptr<DeviceLayer> layer_;
  Allocate allocate_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
  uint64_t num_releases_ = 0;
  size_t num_allocations_ = 0;
  size_t owned_bytes_ = 0, peak_owned_bytes_ = 0;
};

// Sizes in steps of a sixteenth, so that buffers of like units fit each other.
size_t size_class(size_t bytes);

}  // namespace fsdp2x
