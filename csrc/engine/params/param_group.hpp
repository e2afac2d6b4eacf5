// The parameters of a unit that share a mesh: gathered in one operation, reduced in one operation. Owns the shard pool,
// the parameters and their gradients. A unit has one group, or several when parameters choose meshes of their own.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/layout.hpp"
#include "engine/memory/copy_program.hpp"
#include "engine/params/gradients.hpp"
#include "engine/params/param.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

class Root;
class Unit;
struct UnitOptions;

// Python callables of a group. Null where there is nothing to call.
struct GroupCalls {
  PyRef make_gradient;            // (spec, local tensor) -> DTensor
  PyRef add_to_foreign;           // (parameter, local tensor): adds to a `.grad` that is not ours
  PyRef plain_gradient;           // (spec, gradient) -> plain local tensor, for gradients that are tensor subclasses
  PyRef all_reduce;               // (tensor, average: bool): over the replicas of a 2-D mesh, returns when done
  PyRef all_reduce_hook;          // (tensor): the user's, on the reduced rows
  PyRef all_gather;               // instead of the transport's, with the same arguments; process group only
  PyRef reduce_scatter;           // likewise
  PyRef separate_reduce_scatter;  // the transport's, over another process group; on streams only
  PyRef gather_slowly;            // (): refreshes aliases; starts the gathers of extensions unless all_gather will
  PyRef finish_slowly;            // (): fills their unsharded parameters
  PyRef free_slowly;              // ()
  PyRef explain;                  // (exception, what failed) -> the exception to raise
  PyRef explain_all_reduce;       // the same over the replicas
};

class ParamGroup {
 public:
  // `device`: where it is gathered and reduced. `offload`: what lies in host memory; only transports with streams can
  // do that.
  ParamGroup(Layout layout, at::Tensor pool, std::vector<Param> params, GroupCalls calls, int replicas,
             at::Device device, Offload offload);

  // What errors and the ledgers call it, and its smaller world with it.
  void rename(std::string new_name);

  // --- parameters ---
  void begin_gather();
  void finish_gather();  // takes the GIL
  // Gathered parameters whose modules register the sharded ones again (torch.func.functional_call puts back what it
  // found) are registered once more.
  void register_again() const;
  // Poisons, registers the sharded parameters, gives the slot back.
  void free();
  // The same after a forward whose rows are kept in a smaller world, if there is one: until drop_post_forward() the
  // next gather is from there.
  void free_after_forward();
  void drop_post_forward();
  void cancel_gather();
  // For transports: a slot of `ledger` for the next gather, the kept one if there is one; and the end of its use, true
  // when it went back to the ledger.
  const Slot& open_slot(SlotLedger& ledger);
  bool close_slot(SlotLedger& ledger);
  // `group` has the layout of the smaller world in the compute dtype, a pool and a transport, and no parameters;
  // `sharded` are the parameters to register meanwhile, over its pool.
  void set_post_forward(std::shared_ptr<ParamGroup> group, std::vector<PyRef> sharded);

  // --- gradients ---
  // Called by the hook on the parameter's AccumulateGrad node.
  void pack_gradient(size_t param);
  // Gradients that came by another way than the hook (assigned by the user, accumulated before the hook was there).
  void sweep_gradients();
  void begin_reduce();
  bool finish_reduce(bool flush);
  // The transport has summed this rank's rows of all parameters, flags behind them (see Layout::flagged_segment_bytes),
  // into `segment`: keeps them for the all-reduce, or runs the hook and attaches. `divisor`: what the sum is still to
  // be divided by.
  void take_segment(const at::Tensor& segment, const std::shared_ptr<const Layout>& plan, double divisor);
  // Makes a reduced gradient visible as `.grad` and runs the sharded parameter's own post-accumulate hooks, whose
  // exceptions the root keeps.
  void attach(size_t param, const GradientTarget& target);
  // All-reduces what take_segment kept, then attaches it. In the same order on every replica.
  void all_reduce();
  // The transport keeps this reduction's rows for an all-reduce, with what was kept before.
  void note_partial() { partial_parts_ = scratch.parts; }
  // It adds what was kept to this reduction.
  void note_merged_partial() {
    scratch.parts.holds_earlier = true;
    partial_parts_ = Parts();
  }
  // Drops what the backward that raised has packed or reduced, and is not in `.grad`. Gradients that earlier backwards
  // left here stay, unless they are in one sum with it: then Root::lose is told.
  void abandon_backward();
  // Drops all gradients that are not in `.grad`.
  void drop_gradients();

  // Whether the shards that an optimizer steps and their gradients are the host's.
  bool offloads() const { return offload != Offload::nothing; }
  // Whether the summed rows go through a segment of their own instead of straight into `.grad`.
  bool is_staged() const { return calls.all_reduce || calls.all_reduce_hook; }
  bool has_replicas() const { return static_cast<bool>(calls.all_reduce); }
  bool holds_partial() const { return partial_.defined(); }
  bool holds_unreduced() const { return scratch.open || partial_parts_.backward != 0; }
  // Parameters without a gradient are reduced as zeros, whatever this rank ran and under whichever gradient mode: other
  // ranks may have run something else.
  bool reduces_unused() const;
  // Nothing to ask other ranks for: there are none, or every parameter gathers itself.
  bool gathers_alone() const;
  DType reduce_type() const;
  // Whether the collectives divide by the number of ranks; otherwise they sum.
  bool averages() const;
  // What a sum over all ranks (replicas too) is divided by.
  double divisor() const;

  const UnitOptions& options() const;
  Root& root() const;

  std::string name;      // empty until its unit names it
  uint32_t index = 0;    // in its transport, the same on every rank
  Unit* unit = nullptr;  // owns this group
  std::shared_ptr<Transport> transport;
  Layout layout;
  at::Tensor pool;
  at::Device device;
  Offload offload;
  std::vector<Param> params;
  GroupCalls calls;
  Gradients gradients;
  GatherSlot gather;
  Scratch scratch;
  std::shared_ptr<ParamGroup> post_forward;

 private:
  // Throws unless modules register what they were given last, the sharded parameters.
  void check_registered() const;
  PyObject* registered_while_sharded(size_t param) const;
  void all_reduce(const at::Tensor& partial);
  void drop_partial();
  void drop_unpacked();
  void release_slot();
  void fetch_moved_shards();
  void attach_accumulator_hooks();
  const CopyProgram& rows_to_keep(const ParamGroup& source);
  void attach_segment(const at::Tensor& segment, const Layout& plan, double divisor);
  at::Tensor plain(const at::Tensor& gradient, size_t param) const;

  int replicas_;
  bool is_filled_ = false;
  bool holds_post_forward_ = false;
  ParamGroup* gathered_from_ = this;  // whose transport and slot the last gather used
  std::vector<PyRef> post_forward_params_;
  std::map<const ParamGroup*, CopyProgram> rows_to_keep_;  // from the slot of the group that was gathered -> its pool
  at::Tensor partial_;  // a segment, reduced over the shards and not yet over the replicas
  std::shared_ptr<const Layout> partial_plan_;
  double partial_divisor_ = 1.0;
  Parts partial_parts_;
};

// Throws the exception that a collective of `group` left in the interpreter, as `explain` tells it. `operation`:
// "all-gather".
[[noreturn]] void throw_collective_error(const ParamGroup& group, const PyRef& explain, const std::string& operation);

}  // namespace fsdp2x
