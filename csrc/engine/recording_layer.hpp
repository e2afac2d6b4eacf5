// A device layer for tests: plays the plans on CPU memory in host order, and writes down what a device would have been
// told: which lane does what to which bytes, and who waits for whom.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "engine/device_layer.hpp"

namespace fsdp2x {

class RecordingLayer final : public DeviceLayer {
 public:
  struct Entry {
    std::string operation;  // "record", "wait", a kernel or a collective
    Lane lane = Lane::compute;
    std::string subject;  // the event, or the unit
    std::vector<MemoryRange> reads, writes;
  };

  // With the twins of the device's kernels, or with torch's operations in their place.
  explicit RecordingLayer(bool with_twins);

  std::unique_ptr<DeviceEvent> make_event(const std::string& name) override;
  void record(DeviceEvent& event, Lane lane) override;
  void wait(Lane lane, DeviceEvent& event) override;
  void synchronize(DeviceEvent& event) override;
  std::optional<c10::Stream> stream(Lane) override { return std::nullopt; }
  void copy(const CopyProgram& program, const void* src, void* dst) override;
  void pack(ReducePlan& plan, const std::vector<PackItem>& items, const at::Tensor& buffer) override;
  void write_rows(ReducePlan& plan, const std::vector<RowItem>& items, const at::Tensor& segment,
                  double divisor) override;
  void divide(const at::Tensor& memory, double divisor) override;
  void add(const at::Tensor& target, const at::Tensor& source) override;
  void assign(const at::Tensor& target, const at::Tensor& source) override;
  void transfer(const at::Tensor& target, const at::Tensor& source) override;
  bool is_recorder() const override { return true; }
  void note(const std::string& operation, const std::string& subject, const std::vector<MemoryRange>& reads,
            const std::vector<MemoryRange>& writes) override;

  const std::vector<Entry>& entries() const { return entries_; }
  void clear() { entries_.clear(); }

 protected:
  Lane enter(Lane lane) override { return std::exchange(lane_, lane); }
  void leave(Lane before) override { lane_ = before; }

 private:
  Lane lane_ = Lane::compute;
  std::vector<Entry> entries_;
  std::map<std::string, int> names_;  // of events, how often
};

}  // namespace fsdp2x
