// The way of gradients behind autograd, for all units below one root: packed, posted, finished, written, attached. Only
// here rows become `.grad`; transports answer what has become of a reduction.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/schedule/unit.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

class Reductions {
 public:
  // What the groups of the units share.
  const std::shared_ptr<Commons>& commons() const { return commons_; }

  // Numbers the backwards, from 1: the one that runs, or the next.
  uint64_t backward_number() const { return num_backwards_ + 1; }
  // `reaches_all`: gradients go to all leaves of the graph.
  void begin_backward(bool reaches_all) { reaches_all_ = reaches_all; }
  void end_backward() { ++num_backwards_; }

  // A whole unsharded gradient of a parameter. One that comes late (a weight used outside its unit) waits for the
  // reduction that was posted, and makes another one.
  void pack(Unit& unit, ParamGroup& group, size_t param, const at::Tensor& gradient);
  // See Transport::settle.
  void settle(Unit& unit);
  // Whether other ranks may have gradients of the group, which has none here, and wait for this rank's part of a
  // collective: its unit took part in a forward under grad, and no graph that lives has a call of it.
  bool is_awaited(const Unit& unit, const ParamGroup& group) const;
  // The group's gradients of this backward are complete: their reduction begins.
  void post(const std::shared_ptr<Unit>& unit, ParamGroup& group, cpu::Forwards forwards);
  // Finishes the posted reductions that all ranks have reached.
  void finish_pending();
  // Posts what no post-backward node has, in an order that is the same on every rank, and finishes everything.
  void flush(const std::vector<std::shared_ptr<Unit>>& units, cpu::Forwards forwards);

  // --- what waits for a reduction or an all-reduce, outside of backward; with the GIL ---
  // The sum of whole gradients in the reduce dtype, flat for complex ones. From then on it is what is reduced, and
  // later backwards add to it. Undefined: there is none.
  static at::Tensor unreduced(ParamGroup& group, size_t param);
  // Rows that wait for the all-reduce, flat; on an accelerator until the next backward. Undefined: there are none.
  static at::Tensor partial_rows(ParamGroup& group, size_t param);
  // Zeros both for the parameters of the group in `which`. `drops`: there is no gradient instead.
  static void clear(Unit& unit, ParamGroup& group, const std::vector<bool>& which, bool drops);
  // An optimizer zeroed `.grad` of some of them, and did not see these. Warned of once, by the next forward or backward
  // before which they are neither reduced nor cleared.
  void note_zeroed(ParamGroup& group);
  void warn_of_zeroed(const std::vector<std::shared_ptr<Unit>>& units);

  // Reductions of the running backward go: they hold their units, and those hold the root.
  void forget_pending();
  // Drops what the backward that raised has packed or reduced of the unit, and is not in `.grad`. Gradients that
  // earlier backwards left stay, unless they are in one sum with it: then they are lost.
  void abandon(Unit& unit);
  // Everything that is on its way goes; the units have dropped what they hold.
  void reset();

  // Gradients of earlier backwards are gone with those of one that raised: every forward and backward raises from then
  // on, until reset().
  void refuse_after_loss() const;
  // Raises the first exception of a hook that ran behind a gradient. Gradients arrive at another moment on each rank:
  // raised there, it would keep this rank from reductions that others have posted.
  void raise_error_of_hook();
  void forget_error_of_hook() { error_of_hook_ = nullptr; }

 private:
  // A reduction that is posted and not finished.
  struct Pending {
    std::shared_ptr<Unit> unit;
    ParamGroup* group;
  };
  // Reduced rows on their way to the host.
  struct Arriving {
    std::shared_ptr<Unit> unit;
    ParamGroup* group;
    std::unique_ptr<ReducedRows> rows;
  };
  void make_room(ParamGroup& group, std::optional<size_t> param);
  static std::vector<at::Tensor>& show(ParamGroup& group);
  static void add_to_shown(ParamGroup& group, size_t param, const at::Tensor& gradient);
  void pack_shown(ParamGroup& group);
  // False: a peer posts later.
  bool finish(const std::shared_ptr<Unit>& unit, ParamGroup& group, bool flush);
  void attach(const std::shared_ptr<Unit>& unit, ParamGroup& group, std::unique_ptr<ReducedRows> rows);
  // Prepares, writes, attaches, releases. Needs the GIL.
  void write(ParamGroup& group, std::unique_ptr<ReducedRows> rows);
  // The gradient is there: the sharded parameter's own hooks run.
  void run_hooks(const Param& param);
  // Takes the oldest rows of a group, or of a transport, that are on their way to the host.
  void land(const ParamGroup& group);
  void land_oldest(const Transport& transport);
  void land(std::deque<Arriving>::iterator arriving);
  // Rows that wait for an all-reduce. Replicas may finish their reductions in different order, so all-reduces wait for
  // the root callback and its order.
  void keep_partial(ParamGroup& group, std::unique_ptr<ReducedRows> rows);
  void all_reduce(const std::shared_ptr<Unit>& unit, ParamGroup& group);
  void lose(const ParamGroup& group);

  std::shared_ptr<Commons> commons_ = std::make_shared<Commons>();
  std::deque<Pending> pending_;
  std::deque<Arriving> arriving_;  // oldest first
  std::string lost_;               // names of units
  std::exception_ptr error_of_hook_;
  uint64_t num_backwards_ = 0;
  bool reaches_all_ = true;
  bool zeroed_ = false;
  bool has_warned_ = false;
};

}  // namespace fsdp2x
