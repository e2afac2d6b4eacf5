// What the units below one root module share: the transports, the recorded orders, the reductions and the
// once-per-backward callback. Autograd's nodes and the hooks of modules come in here, and everything else is told from
// here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/shm_group.hpp"
#include "engine/schedule/reductions.hpp"
#include "engine/schedule/unit.hpp"

namespace fsdp2x {

class Root;

// Whether this thread runs nodes of a backward; a forward that is recomputed in one is inside, too.
bool inside_backward();

// Lives as long as the graph task of a backward, and tells the root when it went before the root's callback ran.
class Backward {
 public:
  explicit Backward(std::weak_ptr<Root> root) : root_(std::move(root)) {}
  ~Backward();
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;

 private:
  std::weak_ptr<Root> root_;
};

class Root : public std::enable_shared_from_this<Root> {
 public:
  // `transports`: one per group of the unit. In the same order on every rank.
  void add_unit(const std::shared_ptr<Unit>& unit, const std::vector<std::shared_ptr<Transport>>& transports);
  // The smaller world that `group` reshards to after forward.
  void add_post_forward(const ParamGroup& group, const std::shared_ptr<Transport>& transport);
  // Memory that replicas share: they tell each other by it, as the ranks of a transport do, which pass they have left.
  void add_replicas(const std::shared_ptr<cpu::ShmGroup>& group);
  // Of a process group of the transports or the replicas: its ranks are told when a pass of this root raises.
  void add_agreement(const std::shared_ptr<Agreement>& agreement);
  const std::vector<std::shared_ptr<Transport>>& transports() const { return transports_; }
  std::vector<std::shared_ptr<Unit>> units() const;
  // Whether somebody replaced shards, so that the units must adopt them before they are gathered. Needs the GIL.
  bool has_replaced_shards() const;

  // --- parameters ---
  void begin_unshard(Unit& unit);
  // Gradients of its parameters come here from then on.
  void finish_unshard(Unit& unit);
  void unshard(Unit& unit);

  // --- forward ---
  bool in_forward() const { return forward_root_ != nullptr; }
  bool is_forward_root(const Unit* unit) const { return forward_root_ == unit; }
  void begin_forward(Unit* unit);
  void end_forward();
  // Numbers the forwards that are not inside a backward.
  uint64_t forward_number() const { return num_forwards_; }
  // Whether this thread began the forward that runs.
  bool is_forward_thread() const;
  // The forward raised, or was interrupted: as if it had not begun. Gradients of earlier backwards stay where they are.
  // `interrupted`: no module of it runs any more. Otherwise those that do are left alone: they are other threads'.
  // `why`: what it raised, for the peers that wait for this rank; empty: they are not told.
  void abandon_forward(bool interrupted, const std::string& why);
  // A recomputation inside a backward raised, and the backward with it.
  void leave_forward() { forward_root_ = nullptr; }
  // After `unit` is unsharded: start the gather of the unit that ran after it in the last forward.
  void prefetch_forward(Unit& unit);
  void record_forward(Unit& unit);

  // --- backward ---
  // Number of a forward call under grad, in pre-forward order: post-backward nodes run in the reverse of it, also when
  // units are nested. None for a recomputation inside backward.
  std::optional<uint64_t> enter();
  // Position of that call's reduction among all of this and earlier backwards: grows, the same on every rank.
  uint64_t backward_position(std::optional<uint64_t> entry) const;
  void pre_backward(Unit& unit);
  void post_backward(Unit& unit);
  // Its graph is gone, and its callback never ran.
  bool backward_has_raised() const { return callback_queued_ && callback_.expired(); }
  // Tells the peers that this rank's backward has raised.
  void leave_backward() noexcept;
  // After that: as if it had not begun, but for gradients that it has put into `.grad`.
  void abandon_backward();
  // Its reductions hold their units, and those hold this: nothing would be freed when the model goes before another
  // backward comes.
  void drop_raised_reductions();
  // With manual_finalization, once after all backwards: what end_backward leaves undone then.
  void finalize_backward();
  // The same, without manual_finalization and once a backward: upstream's schedules ask for it unit by unit.
  void finish_held_backwards();
  // Between backwards: reduces what waits in `units`, and no other gradients.
  void synchronize_gradients(const std::vector<std::shared_ptr<Unit>>& units);
  // For what the user asks of gradients that wait: those of a backward that has raised are gone.
  Reductions& waiting();
  bool in_backward() const { return callback_queued_ && !callback_.expired(); }

  // Drops the iteration: every unit is sharded and idle, gradients that are not in `.grad` are gone.
  void reset();
  // See Transport::release_idle; also the gradient blocks that are free.
  void release_idle();

  Counters& counters() const { return reductions_.commons()->counters; }
  BlockPool& blocks() const { return reductions_.commons()->blocks; }

  bool is_last_backward = true;
  bool manual_finalization = false;
  PyRef post_optimizer_event;  // what the next forward's gathers wait for, once; null: everything enqueued before it

 private:
  void add_transport(const std::shared_ptr<Transport>& transport);
  void begin_pass(PassKind kind);
  void end_pass();
  // Tells the peers that this rank's pass has raised.
  void leave_pass(const std::string& why) noexcept;
  void prefetch(Unit& target);
  void publish(uint64_t position);
  void prefetch_backward(Unit& unit);
  void begin_backward();  // queues the callback once
  void end_backward();
  // A gradient is in the parameter: the hook on its AccumulateGrad node.
  void take_gradient(Unit& unit, ParamGroup& group, size_t param);
  void pack_gradient(Unit& unit, ParamGroup& group, size_t param);
  // Gradients that came by another way than the hook (assigned by the user, accumulated before the hook was there).
  void sweep_gradients(Unit& unit);
  void listen(Unit& unit, ParamGroup& group);
  // Whether the gradients of this backward are complete where the unit's own ends: packed, or none.
  bool is_due(const Unit& unit, const ParamGroup& group) const;
  void reduce(Unit& unit);
  void flush(const std::vector<std::shared_ptr<Unit>>& units);
  void forget_forward_order();
  void release_unused_gradients();

  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<std::shared_ptr<Transport>> transports_;         // one per mesh
  std::vector<std::shared_ptr<cpu::ShmGroup>> shared_groups_;  // of the transports and the replicas
  std::vector<std::shared_ptr<Agreement>> agreements_;         // likewise
  const Unit* forward_root_ = nullptr;
  std::vector<std::weak_ptr<Unit>> forward_order_;  // post-forward order of this iteration, with repetitions
  std::vector<std::weak_ptr<Unit>> last_sequence_;  // pre-forward order of the last complete forward
  std::vector<std::weak_ptr<Unit>> this_sequence_;
  size_t sequence_cursor_ = 0;
  size_t forward_begin_ = 0;  // of the running forward in forward_order_
  uint64_t num_forwards_ = 0;
  uint64_t num_passes_ = 0;  // forwards and backwards
  std::thread::id forward_thread_;
  bool forward_has_grad_ = false;
  bool odd_steps_ = false;         // ranks that tried passes again or left them out have stepped as often as others
  bool forward_is_alone_ = false;  // the last forward, under grad, began when no graph waited for its backward
  cpu::Forwards forwards_;         // those under grad: on ranks that raised alone and went on, they tell steps apart
  bool is_frugal_ = false;         // some transport is
  bool callback_queued_ = false;
  std::weak_ptr<const Backward> callback_;  // lives as long as the graph task that the callback was queued in
  uint64_t num_entries_ = 0;
  uint64_t finalized_ = 0;  // the number of the next backward when reductions were last finalized
  uint64_t progress_ = 0;   // largest position published
  Reductions reductions_;
  cpu::ProcessGuard guard_;
};

}  // namespace fsdp2x
