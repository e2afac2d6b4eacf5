// The state that the units below one root module share. Autograd's nodes and the hooks of modules come in here; the
// schedule (core/schedule) decides, and TensorEffects executes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/schedule/schedule.hpp"
#include "engine/schedule/tensor_effects.hpp"
#include "engine/schedule/unit.hpp"

namespace fsdp2x {

class Root : public std::enable_shared_from_this<Root> {
 public:
  // `transports`: one per group of the unit. In the same order on every rank.
  void add_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<Transport>>& transports);
  // The smaller world that `group` reshards to after forward.
  void add_post_forward(const ParamGroup& group, const std::shared_ptr<Transport>& transport);
  // Memory that replicas share: they tell each other by it, as the ranks of a transport do, which pass they have left.
  void add_replicas(const std::shared_ptr<cpu::ShmGroup>& group) { effects_.add_shared_group(group); }
  // Adds the agreement of a process group of the transports or the replicas. Its ranks learn when a pass raises.
  void add_agreement(const std::shared_ptr<Agreement>& agreement) { effects_.add_agreement(agreement); }
  const std::vector<std::shared_ptr<Transport>>& transports() const { return effects_.transports(); }
  std::vector<std::shared_ptr<Unit>> units() const;
  Schedule& schedule() { return schedule_; }
  const Schedule& schedule() const { return schedule_; }
  // Whether shards were replaced, so that the units must adopt them before the next gather.
  bool has_replaced_shards(const Gil& gil) const;

  // --- forward ---
  // Before a forward that may be the root's: remembers its thread.
  void note_thread();
  // Whether this thread began the forward that runs.
  bool is_forward_thread() const { return forward_thread_ == std::this_thread::get_id(); }
  // The forward of the root raised. `why`: what, for the peers that wait for this rank.
  void fail_forward(const std::string& why);

  // --- backward ---
  // A gradient is in the parameter: the hook on its AccumulateGrad node.
  void take_gradient(Unit& unit, ParamGroup& group, size_t param);
  // The root's callback.
  void end_backward();
  // Tells the peers that this rank's backward has raised.
  void leave_backward() noexcept;
  void finalize_backward();
  void finish_held_backwards();
  void synchronize_gradients(const std::vector<std::shared_ptr<Unit>>& units);
  // For what the user asks of gradients that wait: those of a backward that has raised are gone.
  WaitingGradients& waiting();

  // Drops the iteration: every unit is sharded and idle, gradients that are not in `.grad` are gone.
  void reset();
  // See Transport::release_idle; also the gradient blocks that are free.
  void release_idle();
  // Sets the event that the next forward's gathers wait for, once. Null: everything enqueued before it.
  void set_post_optimizer_event(PyRef event) { effects_.set_post_optimizer_event(std::move(event)); }

  Counters& counters() const { return effects_.commons()->counters; }
  BlockPool& blocks() const { return effects_.commons()->blocks; }

 private:
  TensorEffects effects_{*this};
  Schedule schedule_{effects_};
  std::thread::id forward_thread_;
};

}  // namespace fsdp2x
