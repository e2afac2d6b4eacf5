// Borrowed device memory: its owner on the host, and the events by which streams hand it on. A borrower never waits for
// memory. If none is free, more is allocated.
//
// Memory from torch's allocator is returned as soon as its borrower is done with it on the host. So slots, reduction
// buffers, gradients, and activations of any size reuse the same bytes. The allocator caches them, and a steady step
// asks the driver for nothing. This is correct without recording other streams because of one rule: memory is taken and
// given back in the order of the compute stream. On taking, the first stream that uses the memory follows the compute
// stream. Before giving back, the compute stream waits for the last use on any stream. So memory is given back where
// that wait costs nothing, see ReduceMemory, DeviceGathers, and HostShards. Registered memory is expensive, and is kept
// for the next borrower of a fitting size.
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

  at::Tensor memory;                   // bytes, undefined while there are none. Views of it move to the next memory.
  at::Storage storage;                 // of `memory`, without ownership
  at::Tensor block;                    // owns the memory
  std::optional<c10::Stream> stream;   // the stream in whose order it was taken
  std::unique_ptr<DeviceEvent> ready;  // its contents are complete
  std::unique_ptr<DeviceEvent> free;   // its last user is done. The next writer waits for it
  std::vector<at::Tensor> tenants;     // other memory that its user reads, which goes back with it
  std::string owner;
};

// `release` only says that no later work will use the buffer. `ready` and `free` must already be recorded after the
// last use.
class DeviceBuffers {
 public:
  using Allocate = std::function<at::Tensor(size_t bytes)>;

  // `keeps`: memory stays until drop_idle(). Otherwise it goes back to its allocator when it is released. `tally`: if
  // not null, also counts the memory.
  DeviceBuffers(std::string name, std::shared_ptr<DeviceLayer> layer, Allocate allocate, bool keeps, MemoryTally* tally)
      : name_(std::move(name)), layer_(std::move(layer)), allocate_(std::move(allocate)), ledger_(keeps, tally) {}
  ~DeviceBuffers();
  DeviceBuffers(const DeviceBuffers&) = delete;
  DeviceBuffers& operator=(const DeviceBuffers&) = delete;

  // `*is_new`: whether it was just allocated, in the order of the compute stream.
  int acquire(size_t bytes, const std::string& owner, bool* is_new);
  // If memory is not kept, the compute stream waits for `ready` and `free`. `has_waited`: it has already waited for the
  // last use.
  void release(int id, bool has_waited = false);
  DeviceBuffer& operator[](int id) { return *buffers_[static_cast<size_t>(id)]; }
  // Returns the memory of unowned buffers to the allocator.
  void drop_idle();
  void set_keeps(bool keeps);
  const std::string& name() const { return name_; }
  const std::vector<std::unique_ptr<DeviceBuffer>>& all() const { return buffers_; }

  const BufferLedger& ledger() const { return ledger_; }
  void forget_peak() { ledger_.forget_peak(); }
  std::vector<std::string> owners() const;  // see SlotLedger::owners

 private:
  void open(int id, size_t bytes);
  void drop(int id, bool has_waited);

  std::string name_;
  std::shared_ptr<DeviceLayer> layer_;
  Allocate allocate_;
  BufferLedger ledger_;
  std::vector<std::unique_ptr<DeviceBuffer>> buffers_;
};

}  // namespace fsdp2x
