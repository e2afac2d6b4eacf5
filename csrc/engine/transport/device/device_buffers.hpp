// Device memory that is lent: who has it on the host, and by which events the lanes hand it on. Nobody ever waits for
// memory: where none is free, more is taken.
//
// Memory of torch's allocator is given back when its borrower is done with it on the host, so that slots, reduction
// buffers, gradients and activations of any size take turns in the same bytes; the allocator keeps them, and a steady
// step asks the driver for nothing. It is one order that makes this right without a record of other streams: memory is
// taken and given back in the order of the compute lane. Whoever takes it lets the lane that uses it first follow the
// compute lane, and before it is given back the compute lane waits for the last use, whatever lane that was on: so it
// is given back where that wait costs nothing, see ReduceMemory, DeviceGathers and HostShards. Registered memory is
// dear, and is kept for the next borrower that it fits.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/buffers.hpp"
#include "engine/transport/device/device_layer.hpp"

namespace fsdp2x {

struct DeviceBuffer {
  std::byte* data() const { return static_cast<std::byte*>(memory.data_ptr()); }

  at::Tensor memory;                   // bytes; undefined while there are none. Views of it follow to the next ones.
  at::Storage storage;                 // of `memory`, owns nothing
  at::Tensor block;                    // owns it
  std::optional<c10::Stream> stream;   // whose order it was taken in
  std::unique_ptr<DeviceEvent> ready;  // its contents are complete
  std::unique_ptr<DeviceEvent> free;   // its last user has passed: whoever writes next waits for it
  std::string owner;
};

// `release` only says that no more work will be enqueued that uses the buffer: `ready` and `free` were recorded behind
// the last of it.
class DeviceBuffers {
 public:
  using Allocate = std::function<at::Tensor(size_t bytes)>;

  // `keeps`: memory stays until drop_idle(), otherwise it goes back to its allocator when it is released. `tally`:
  // counts the memory too, unless null.
  DeviceBuffers(std::string name, std::shared_ptr<DeviceLayer> layer, Allocate allocate, bool keeps, MemoryTally* tally)
      : name_(std::move(name)), layer_(std::move(layer)), allocate_(std::move(allocate)), ledger_(keeps, tally) {}
  ~DeviceBuffers();
  DeviceBuffers(const DeviceBuffers&) = delete;
  DeviceBuffers& operator=(const DeviceBuffers&) = delete;

  // `*is_new`: it was just allocated, in the order of the compute lane.
  int acquire(size_t bytes, const std::string& owner, bool* is_new);
  // Where memory is not kept, the compute lane waits for `ready` and `free`. `has_waited`: it is behind the last use.
  void release(int id, bool has_waited = false);
  DeviceBuffer& operator[](int id) { return *buffers_[static_cast<size_t>(id)]; }
  // Gives the memory of buffers that nobody owns back to the allocator.
  void drop_idle();
  void set_keeps(bool keeps);
  const std::string& name() const { return name_; }
  const std::vector<std::unique_ptr<DeviceBuffer>>& all() const { return buffers_; }

  const BufferLedger& ledger() const { return ledger_; }
  void forget_peak() { ledger_.forget_peak(); }
  std::string owners() const;

 private:
  void open(int id, size_t bytes);
  void drop(int id, bool has_waited);
  // For records: others may have written to the memory before it is taken, and may when it was given back.
  void touches(const char* operation, const DeviceBuffer& buffer) const;

  std::string name_;
  std::shared_ptr<DeviceLayer> layer_;
  Allocate allocate_;
  BufferLedger ledger_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
};

}  // namespace fsdp2x
