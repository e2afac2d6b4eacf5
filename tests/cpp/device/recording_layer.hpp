// A device layer for tests. It runs plans on CPU memory in host order and records the device's work: which lane does
// what to which bytes, and which lanes wait for each other. Tests note what torch, collectives, and users do.
#pragma once

#include <ATen/record_function.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/transport/device/device_layer.hpp"

namespace fsdp2x {

// Bytes that an operation reads or writes.
struct MemoryRange {
  const void* data = nullptr;
  size_t bytes = 0;
};

class RecordingLayer final : public DeviceLayer {
 public:
  struct Entry {
    std::string operation;  // "record", "wait", a kernel, or a collective
    std::string lane;       // its name. User streams after the first one are compute1 and so on
    std::string subject;    // the event, or the unit
    std::vector<MemoryRange> reads, writes;
  };

  // Uses the reference kernels, or torch's operations in their place.
  explicit RecordingLayer(bool with_kernels);
  ~RecordingLayer() override;

  std::unique_ptr<DeviceEvent> make_event(const std::string& name) override;
  void record(DeviceEvent& event, Lane lane) override;
  void wait(Lane lane, DeviceEvent& event) override;
  void synchronize(DeviceEvent& event) override;
  std::optional<c10::Stream> stream(Lane) override { return std::nullopt; }
  Lane current_lane() const override { return lane_; }
  std::optional<c10::Stream> current_stream() override;
  at::Tensor allocate(size_t bytes) override;
  void free(at::Tensor memory) override;
  void hold(const at::Tensor& memory) override;
  at::Tensor host_memory(at::ScalarType type, size_t numel) override;
  void copy(const CopyProgram& program, const void* src, void* dst) override;
  void launch_pack(SegmentPlan& plan, const Piece& piece, const std::vector<PackItem>& items,
                   const std::vector<uint8_t>& flags, const at::Tensor& buffer) override;
  void write_rows(SegmentPlan& plan, const std::vector<RowItem>& items, const at::Tensor& segment,
                  double divisor) override;
  void write_host_rows(const Layout& layout, const at::Tensor& rows, const GradientTargets& targets,
                       double divisor) override;
  void encode(const WireProgram& program, const void* values, void* segments, void* errors,
              const std::vector<uint8_t>& filled) override;
  void decode(const WireProgram& program, const void* segments, void* values) override;
  void sum_codes(const WireProgram& program, const void* segments, size_t segment_bytes, int num_ranks, double divisor,
                 void* values) override;
  void zero(const at::Tensor& memory) override;
  void divide(const at::Tensor& memory, double divisor) override;
  void add(const at::Tensor& target, const at::Tensor& source) override;
  void assign(const at::Tensor& target, const at::Tensor& source) override;
  void transfer(const at::Tensor& target, const at::Tensor& source) override;
  bool in_capture() override { return in_capture_; }

  // Notes work of others on the current lane or on the host.
  void note_work(const std::string& operation, at::TensorList reads, at::TensorList writes, bool on_host);
  // Notes that a kernel reads its plan.
  void note_plan(const void* segments);
  const std::vector<Entry>& entries() const { return entries_; }
  void clear() { entries_.clear(); }
  // Switches the user to another stream (0 is the first), as `with torch.cuda.stream(..)` does. Call outside of all
  // scopes.
  void use_stream(int number);
  // Lets the user's current stream wait for all work of another user stream.
  void wait_stream(int number);
  // Captures the current stream's work into a graph from here on. Waits for the device first, as torch.cuda.graph does.
  void begin_capture();
  void end_capture();

  // From here on, work of all lanes but the user's streams runs late: at random times, and at the latest when those or
  // the host wait for it. Ranks with the same seed run their collectives in the same order. Waits of `lane` for events
  // whose name has `event` in it are forgotten, so that a test can show what they prevent. Empty: none is.
  void delay(uint64_t seed, std::string lane, std::string event);
  // Runs `work` on the current lane, now or when its turn comes.
  void defer(std::function<void()> work);
  // Runs all work that is late.
  void finish();

 protected:
  Lane enter(Lane lane) override;
  void leave(Lane before) override;
  int enter_stream(c10::Stream stream) override;
  void leave_stream(int before) override;

 private:
  // Returns the stream of `lane` here.
  int stream_of(Lane lane) const;
  static std::string name_of(int stream);

  // A place in a lane: behind all work that was enqueued before it.
  struct Place {
    int stream = 0;
    bool is_reached = false;
  };
  friend struct NamedEvent;
  // One of the three.
  struct Late {
    std::function<void()> work;
    std::shared_ptr<Place> waits_for;
    std::shared_ptr<Place> reaches;
  };
  bool is_late(int stream) const;
  void run_one(int stream);
  void run_until(Place& place);
  // Runs some late work.
  void stir();
  std::string current_name() const;
  void note(const std::string& operation, const std::string& subject, const std::vector<MemoryRange>& reads,
            const std::vector<MemoryRange>& writes);
  // The compute lane reads a gather slot from the wait for its `ready` to the record of its `free`.
  void note_use(const std::string& event);
  // Returns what the lane has written since its last wait and has not read itself.
  std::vector<MemoryRange> written_on(const std::string& lane) const;

  Lane lane_ = Lane::compute;
  int current_ = 0;          // the current stream: a lane's number, or a higher number for a user stream
  int home_ = 0;             // the compute lane's stream, while another one is current
  std::vector<int> before_;  // by LaneScope
  uint64_t num_captures_ = 0;
  bool in_capture_ = false;
  std::set<int> captured_;  // streams that have followed the captured one
  std::vector<Entry> entries_;
  std::map<std::string, int> names_;                       // of events, and how often
  std::map<std::string, std::vector<MemoryRange>> slots_;  // by the name of their events: gathered memory
  at::CallbackHandle range_observer_;
  std::optional<std::mt19937_64> delays_;
  std::string forgetful_lane_, forgotten_event_;
  std::map<int, std::deque<Late>> late_;  // by stream
  std::vector<at::Tensor> kept_;          // given back while waits are forgotten
};

}  // namespace fsdp2x
