// The state that the units below one root module share. Autograd nodes and module hooks enter the engine here. The
// schedule (core/schedule) decides, and TensorEffects executes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/schedule/schedule.hpp"
#include "engine/schedule/tensor_effects.hpp"
#include "engine/schedule/unit.hpp"

namespace fsdp2x {

struct RootSettings : Schedule::Settings {
  PyRef forward_runs;          // whether a forward of the root is on the stack of a thread
  PyRef post_optimizer_event;  // the next forward's gathers wait for it, once; null: for everything enqueued before it
};

class Root : public std::enable_shared_from_this<Root> {
 public:
  explicit Root(std::shared_ptr<RootSettings> settings) : settings_(std::move(settings)) {}
  // Adds a unit with one transport for each of its groups, in the same order on every rank.
  void add_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<Transport>>& transports);
  // Sets the transport of the smaller world that `group` reshards to after forward.
  void add_post_forward(const ParamGroup& group, const std::shared_ptr<Transport>& transport);
  // Adds memory that replicas share. Through it, they report which pass they have left, as the ranks of a transport do.
  void add_replicas(const std::shared_ptr<cpu::ShmGroup>& group) { effects_.add_shared_group(group); }
  // Adds the agreement of a process group of the transports or the replicas. Its ranks learn when a pass raises.
  void add_agreement(const std::shared_ptr<Agreement>& agreement) { effects_.add_agreement(agreement); }
  const std::vector<std::shared_ptr<Transport>>& transports() const { return effects_.transports(); }
  // Returns the sums over the transports.
  TransportStats transport_stats() const;
  std::vector<std::shared_ptr<Unit>> units() const;
  Schedule& schedule() { return schedule_; }
  const Schedule& schedule() const { return schedule_; }
  // Returns whether shards were replaced, so that the units must adopt them before the next gather.
  bool has_replaced_shards(const Gil& gil) const;

  // --- forward ---
  // Remembers the thread of a forward that may be the root's, before it runs.
  void note_thread();
  // Returns whether this thread began the running forward.
  bool is_forward_thread() const { return forward_thread_ == std::this_thread::get_id(); }
  // Reports to the peers that this rank's forward or backward has raised.
  void leave_pass(const std::string& why) noexcept;
  // Abandons the root's forward after it raised. `why` is the reason for the peers that wait for this rank.
  void fail_forward(const std::string& why);

  // --- backward ---
  // See Schedule::pre_backward.
  void pre_backward(Unit& unit, bool reads);
  // Called by the hook on the AccumulateGrad node: the parameter has a gradient.
  void take_gradient(Unit& unit, ParamGroup& group, size_t param);
  // Called by the root's callback.
  void end_backward();
  void finalize_backward();
  void finish_held_backwards();
  void synchronize_gradients(const std::vector<std::shared_ptr<Unit>>& units);
  // Gives users access to waiting gradients, without those of a backward that raised.
  WaitingGradients& waiting();

  // Drops the iteration: every unit becomes sharded and idle, and gradients that are not in `.grad` are lost.
  void reset();
  // See Transport::release_idle. Also frees unused gradient blocks.
  void release_idle();
  // Frees unused gradient blocks of transports that allow it. Otherwise the next forward frees them.
  void release_gradients(const Gil& gil);
  RootSettings& settings() { return *settings_; }

  Counters& counters() const { return effects_.commons()->counters; }
  BlockPool& blocks() const { return effects_.commons()->blocks; }

 private:
  std::shared_ptr<RootSettings> settings_;
  TensorEffects effects_{*this};
  Schedule schedule_{effects_, settings_};
  std::thread::id forward_thread_;
};

}  // namespace fsdp2x
