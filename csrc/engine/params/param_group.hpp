// The parameters of a unit that share a mesh: gathered in one operation, reduced in one operation. Owns the shard pool,
// the parameters and their gradients. A unit has one group, or several when parameters choose meshes of their own.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/layout.hpp"
#include "core/schedule/states.hpp"
#include "core/slots.hpp"
#include "engine/memory/copy_program.hpp"
#include "engine/params/gradients.hpp"
#include "engine/params/param.hpp"
#include "engine/params/reduced_rows.hpp"
#include "engine/params/shards.hpp"
#include "engine/params/unit_facts.hpp"

namespace fsdp2x {

class Agreement;
class Transport;

// What of a group lies in host memory, the pool among it, while the group is gathered and reduced on a device.
enum class Offload : uint8_t {
  nothing,
  gradients,   // shards and gradients; the device keeps a copy of the shards from a forward until its backward ends
  everything,  // shards and gradients; the device gets the shards for each gather
};

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
  PyRef begin_extension_gather;   // (): refreshes aliases; starts the gathers of extensions unless all_gather will
  PyRef finish_extension_gather;  // (): fills their unsharded parameters
  PyRef free_extension_gather;    // ()
  PyRef explain;                  // (exception, what failed) -> the exception to raise
  PyRef explain_all_reduce;       // the same over the replicas
};

// The gather slot a group owns between begin_unshard and reshard.
struct GatherSlot {
  Slot slot;
  Slot kept;  // stays with the group between reshard and the next unshard (UnitOptions::keep_unsharded_storage)
  uint64_t sequence = 0;
  std::byte* write = nullptr;  // the engine's view
  std::byte* read = nullptr;   // the tensors' view
};

// The place of a group in the agreement over one of its process groups; without an agreement nothing is compared.
struct AgreementSeat {
  std::shared_ptr<Agreement> agreement;
  uint64_t subject = 0;  // its number there, the same on every rank
};

// Gradients of a group on their way, by tensors; the states of ScheduledGroup say how far they are.
struct WaitingTensors {
  std::vector<at::Tensor> shown;           // what is packed, whole, by parameter; empty: the transport holds it
  std::unique_ptr<ReducedRows> reduced;    // by the last reduction, until they are attached or kept
  std::unique_ptr<ReducedRows> downloads;  // on their way to the host
  std::unique_ptr<SegmentRows> partial;    // wait for an all-reduce, unless the transport keeps them
};

class ParamGroup final : public ScheduledGroup {
 public:
  // `device`: where it is gathered and reduced. `offload`: what lies in host memory; only transports with streams can
  // do that.
  ParamGroup(Layout layout, at::Tensor pool, std::vector<Param> params, GroupCalls calls, int replicas,
             at::Device device, Offload offload);

  // --- what it is ---
  const std::string& name() const override { return name_; }  // empty until its unit names it
  // What errors and the ledgers call it, and its smaller world with it.
  void rename(std::string name);
  const Layout& layout() const { return layout_; }
  Shards& shards() { return shards_; }
  const at::Tensor& pool() const { return shards_.memory(); }
  at::Device device() const { return place_.device; }
  Offload offload() const { return place_.offload; }
  // Whether the shards that an optimizer steps and their gradients are the host's.
  bool offloads() const { return place_.offload != Offload::nothing; }
  std::vector<Param>& params() { return params_; }
  const std::vector<Param>& params() const { return params_; }
  GroupCalls& calls() { return calls_; }
  const GroupCalls& calls() const { return calls_; }
  Gradients& gradients() { return gradients_; }
  const Gradients& gradients() const { return gradients_; }

  // The local tensors of the sharded parameters; none for one that does not lie in the pool. Throws where one is not
  // what the layout says.
  void watch_shards(const std::vector<std::optional<at::Tensor>>& locals);
  // Whether some sharded parameter is another tensor than the watched one, or of another dtype or size.
  bool has_replaced_shards(const Gil& gil) const;

  // --- who it belongs to ---
  void set_unit(const UnitFacts* unit);
  const UnitFacts& unit() const { return *member_.unit; }
  const UnitOptions& options() const { return member_.unit->options; }
  // What moves its bytes; the group itself never calls it.
  void join(std::shared_ptr<Transport> transport, std::shared_ptr<Commons> commons);
  bool has_joined() const { return member_.transport != nullptr; }
  Transport& transport() const { return *member_.transport; }
  uint32_t index() const { return member_.index; }  // in its transport, the same on every rank
  void set_index(uint32_t index) { member_.index = index; }
  Counters& counters() const { return member_.commons->counters; }
  const Pass& pass() const { return member_.commons->pass; }
  const std::shared_ptr<Commons>& commons() const { return member_.commons; }
  void take_seats(AgreementSeat shards, AgreementSeat replicas);
  const AgreementSeat& shard_seat() const { return member_.shard_seat; }
  const AgreementSeat& replica_seat() const { return member_.replica_seat; }

  // --- gathering, in the order of the calls ---
  // Whose slot the next gather fills: its own, whose pool is up to date then, or that of its smaller world.
  ParamGroup& begin_gather();
  ParamGroup& gathered_from() const { return *gathered_from_; }
  // The slot is full: unsharded parameters look at it, and modules register them. Takes the GIL.
  void fill();
  // Gathered parameters whose modules register the sharded ones again (torch.func.functional_call puts back what it
  // found) are registered once more.
  void register_again(const Gil& gil) const;
  // Before a forward over parameters that were gathered earlier: which of them train may have been changed since.
  // False: somebody gave one other memory, and they must be gathered again.
  bool follow_gathered();
  // A parameter of which a change was lost at a reshard since the last call; null in general.
  const Param* take_lost();
  // Poisons, registers the sharded parameters, or those of the smaller world, from which the next gather is then, until
  // drop_post_forward(). Takes the GIL.
  void empty(bool keeps_post_forward);
  void drop_post_forward();
  // Extensions' memory goes; behind it the slot may.
  void free_extensions();

  GatherSlot& gather() { return gather_; }
  const GatherSlot& gather() const { return gather_; }
  // For transports: a slot of `ledger` for the next gather, the kept one if there is one; and the end of its use, true
  // when it went back to the ledger.
  const Slot& open_slot(SlotLedger& ledger);
  bool close_slot(SlotLedger& ledger);

  // The smaller world that it may be resharded to after forward. `group` has its layout in the compute dtype, a pool
  // and no parameters; `sharded` are the parameters to register meanwhile, over its pool.
  void set_post_forward(std::shared_ptr<ParamGroup> group, std::vector<PyRef> sharded);
  void clear_post_forward();
  const std::shared_ptr<ParamGroup>& post_forward() const { return post_forward_.group; }
  // From the slot of the group that was gathered -> the pool of the smaller world.
  const CopyProgram& rows_to_keep();

  // --- gradients ---
  bool has_unpacked_gradient(size_t param) const;
  // What autograd has accumulated.
  at::Tensor take_gradient(size_t param);
  // Dense and plain, as transports take it.
  at::Tensor packable(at::Tensor gradient, size_t param) const;
  // What autograd has accumulated is dropped.
  void drop_unpacked();
  WaitingTensors& waiting() { return waiting_; }
  const WaitingTensors& waiting() const { return waiting_; }

  // --- how it is reduced ---
  // Whether the summed rows go through a segment of their own instead of straight into `.grad`.
  bool is_staged() const { return calls_.all_reduce || calls_.all_reduce_hook; }
  bool has_replicas() const { return static_cast<bool>(calls_.all_reduce); }
  // Parameters without a gradient are reduced as zeros, whatever this rank ran and under whichever gradient mode: other
  // ranks may have run something else.
  bool reduces_unused() const;
  bool has_trainable() const;
  // Nothing to ask other ranks for: there are none, or every parameter gathers itself.
  bool gathers_alone() const;
  DType reduce_type() const;
  // Whether the collectives divide by the number of ranks; otherwise they sum.
  bool averages() const;
  // What a sum over all ranks (replicas too) is divided by.
  double divisor() const;
  // What a summing collective divides by beforehand: about the square root of the divisor for fp16, whose sums overflow
  // early, as upstream does; the rest is divided afterwards.
  double pre_divisor() const;

 private:
  // Throws unless the sharded parameter is of the layout's dtype.
  void check_dtype(size_t param, const at::Tensor& tensor) const;
  // Throws when a shard's storage has become too small for what the layout reads.
  void check_sizes() const;
  // Throws unless modules register what they were given last, the sharded parameters.
  void check_registered(const Gil& gil) const;
  PyObject* registered_while_sharded(size_t param) const;
  // Plain parameters to whose `.data` somebody assigned move back into the pool, with the new values.
  void fetch_reassigned();
  at::Tensor plain(const at::Tensor& gradient, size_t param) const;

  // Where it is gathered and reduced, and what of it lies elsewhere.
  struct Place {
    at::Device device;
    Offload offload;
    int replicas;
  };
  // What it belongs to, from the time it joins a unit or a root.
  struct Membership {
    const UnitFacts* unit = nullptr;  // owns this group
    std::shared_ptr<Transport> transport;
    std::shared_ptr<Commons> commons;
    uint32_t index = 0;  // in its transport
    AgreementSeat shard_seat, replica_seat;
  };
  // The smaller world that keeps the rows after forward.
  struct PostForward {
    std::shared_ptr<ParamGroup> group;
    std::vector<PyRef> params;
    std::map<const ParamGroup*, CopyProgram> rows_to_keep;  // by gathered_from_
  };

  std::string name_;
  Membership member_;
  Layout layout_;
  Shards shards_;
  Place place_;
  std::vector<Param> params_;
  GroupCalls calls_;
  Gradients gradients_;
  GatherSlot gather_;
  ParamGroup* gathered_from_ = this;  // whose transport and slot the last gather used
  PostForward post_forward_;
  WaitingTensors waiting_;
};

// Throws the exception that a collective of `group` left in the interpreter, as `explain` tells it. `operation`:
// "all-gather".
[[noreturn]] void throw_collective_error(const Gil& gil, const ParamGroup& group, const PyRef& explain,
                                         const std::string& operation);

}  // namespace fsdp2x
