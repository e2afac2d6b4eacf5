// Executes on tensors what the schedule asks for, through the transports of the groups.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/schedule/effects.hpp"
#include "engine/schedule/waiting_gradients.hpp"
#include "engine/transport/agreement.hpp"
#include "engine/transport/transport.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

class Root;

// Lives as long as the graph task of a backward. Its destructor notifies the root if the root's callback never ran.
class Backward {
 public:
  explicit Backward(std::weak_ptr<Root> root) : root_(std::move(root)) {}
  ~Backward();
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

 private:
  std::weak_ptr<Root> root_;
};

class TensorEffects final : public Effects {
 public:
  // `root` owns this object, and autograd's callbacks refer to it.
  explicit TensorEffects(Root& root) : root_(root) {}

  void add_transport(const std::shared_ptr<Transport>& transport);
  // Sets the facts of a group that has joined. `may_overlap`: see Transport.
  static void set_facts(ParamGroup& group, bool may_overlap);
  void add_shared_group(const std::shared_ptr<cpu::ShmGroup>& group);
  void add_agreement(const std::shared_ptr<Agreement>& agreement);
  const std::vector<std::shared_ptr<Transport>>& transports() const { return transports_; }
  // Returns the state that the groups of the units share.
  const std::shared_ptr<Commons>& commons() const { return commons_; }
  WaitingGradients& waiting() { return waiting_; }
  static void release_unused_gradients(const ScheduledUnits& units);
  // Reports to the peers that this rank's pass has raised.
  void leave_pass(const std::string& why) noexcept;
  // Raises the first exception of a hook that ran after a gradient was attached. Gradients arrive at a different moment
  // on each rank. Raising there would keep this rank from reductions that others have posted.
  void raise_error_of_hook();
  void forget_error_of_hook() { error_of_hook_ = nullptr; }

  bool inside_backward() const override;
  bool forward_runs() const override;
  bool backward_is_alive() const override { return !backward_.expired(); }
  bool has_outstanding_calls(const ScheduledUnit& unit) const override;
  bool has_gradient(ScheduledGroup& group, size_t param) const override;
  bool expects_gradients(const ScheduledGroup& group) const override;
  bool is_collective(const ScheduledGroup& group) const override;
  bool needs_empty_reduction(const ScheduledGroup& group) const override;
  bool needs_room(const ScheduledGroup& group, std::optional<size_t> param) override;
  void check_process(const ScheduledUnit& unit, const char* action) const override;

  std::optional<std::string> take_lost(ScheduledUnit& unit) override;
  bool follow_gathered(ScheduledUnit& unit) override;
  void begin_gather(ScheduledGroup& group, ShardsNow shards) override;
  bool were_shards_written(const ScheduledUnit& unit) const override;
  void finish_gather(ScheduledUnit& unit, ScheduledGroup& group) override;
  void end_prefetch() override;
  bool release_gather(ScheduledGroup& group, GatherEnd end) override;
  void drop_rows(ScheduledGroup& group) override;

  void begin_pass(PassKind kind) override;
  void end_pass(bool notifies_peers) override;
  void warn_of_zeroed(const ScheduledUnits& units) override;
  void begin_forward(uint64_t number, const ScheduledUnits& units) override;
  void end_forward() override;
  bool begin_backward(uint64_t number, bool is_alone) override;
  void end_backward() override;
  void begin_unit_backward(ScheduledUnit& unit) override;
  void publish_progress(uint64_t position) override;
  std::unique_ptr<OpenSection> open_section(const ScheduledUnit& unit, Section section) override;

  void make_room(ScheduledGroup& group) override;
  void take_gradient(ScheduledGroup& group, size_t param) override;
  void pack_shown(ScheduledGroup& group, size_t param) override;
  void pack_pending(ScheduledGroup& group) override;
  void begin_reduce(ScheduledGroup& group, ForwardCounts forwards) override;
  Reduced finish_reduce(ScheduledGroup& group, bool flush) override;
  void skip_reduce(ScheduledGroup& group) override;
  void keep_partial(ScheduledGroup& group) override;
  void all_reduce(ScheduledGroup& group) override;
  void run_reduce_hook(ScheduledGroup& group) override;
  void attach(ScheduledGroup& group) override;
  void begin_download(ScheduledGroup& group) override;
  bool drop(ScheduledGroup& group, Dropped what) override;

 private:
  // Subscribes to gradients of the group's parameters from now on.
  void listen(ScheduledUnit& unit, ParamGroup& group);
  // Prepares targets, writes rows, attaches gradients, and releases memory.
  void write(const Gil& gil, ParamGroup& group, std::unique_ptr<ReducedRows> rows);
  // Runs the sharded parameter's own hooks, after its gradient was attached.
  void run_hooks(const Gil& gil, const Param& param);

  Root& root_;
  std::shared_ptr<Commons> commons_ = std::make_shared<Commons>();
  std::vector<std::shared_ptr<Transport>> transports_;         // one per mesh
  std::vector<std::shared_ptr<cpu::ShmGroup>> shared_groups_;  // of the transports and the replicas
  std::vector<std::shared_ptr<Agreement>> agreements_;         // likewise
  WaitingGradients waiting_;
  Pass last_pass_;
  std::weak_ptr<const Backward> backward_;  // lives as long as the graph task that queued the callback
  std::exception_ptr error_of_hook_;
};

}  // namespace fsdp2x
