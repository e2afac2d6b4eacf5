// The parameters of a unit that share a mesh: gathered in one operation, reduced in one operation. Owns the shard pool,
// the parameters and their gradients. A unit has one group, or several if parameters choose separate meshes.
#pragma once

#include <ATen/ATen.h>

#include <map>
#include <memory>
#include <optional>
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

// Parts of a group that stay in CPU memory (the pool included) while the group is gathered and reduced on a device.
enum class Offload : uint8_t {
  nothing,
  gradients,   // shards and gradients. The device keeps a copy of the shards from a forward until its backward ends
  everything,  // shards and gradients. The device gets the shards for each gather
};

// Python callables of a group. Null if there is nothing to call.
struct GroupCalls {
  PyRef make_gradient;            // (spec, local tensor) -> DTensor
  PyRef add_to_foreign;           // (parameter, local tensor): adds to a `.grad` in the user's memory
  PyRef plain_gradient;           // (spec, gradient) -> plain local tensor, for gradients that are tensor subclasses
  PyRef all_reduce;               // (tensor, average: bool): over the replicas of a 2-D mesh, returns when done
  PyRef all_reduce_hook;          // (tensor): the user's hook on the reduced rows
  PyRef all_gather;               // replaces the transport's, same arguments, process group only
  PyRef reduce_scatter;           // likewise
  PyRef gather_memory;            // of all_gather's output: (custom collective, check), null: the transport's
  PyRef reduce_memory;            // likewise for reduce_scatter's input and output
  PyRef separate_reduce_scatter;  // the transport's over another process group
  PyRef separate_all_to_all;      // likewise, without streams only
  PyRef begin_extension_gather;   // (): refreshes aliases, and starts extension gathers unless the transport does
  PyRef prepare_extensions;       // (): makes inputs of extension gathers, on the current stream of a device
  PyRef extension_gathers;        // () -> (outputs, inputs): of their bytes, for the transport to gather
  PyRef finish_extension_gather;  // (): fills their unsharded parameters
  PyRef free_extension_gather;    // ()
  PyRef explain;                  // (exception, failed operation) -> the exception to raise
  PyRef explain_all_reduce;       // the same over the replicas
};

// The gather slot that a group owns between begin_unshard and reshard.
struct GatherSlot {
  Slot slot;
  Slot kept;  // stays with the group between reshard and the next unshard (UnitOptions::keep_unsharded_storage)
  uint64_t sequence = 0;
  std::byte* write = nullptr;  // the engine's view
  std::byte* read = nullptr;   // the tensors' view
};

// The place of a group in the agreement over one of its process groups. Without an agreement, nothing is compared.
struct AgreementSeat {
  std::shared_ptr<Agreement> agreement;
  uint64_t subject = 0;  // its number in the agreement, the same on every rank
};

// Gradients of a group on their way, by tensors. The states of ScheduledGroup say how far they are.
struct WaitingTensors {
  std::vector<at::Tensor> shown;           // packed full gradients by parameter. Empty: the transport holds them
  std::unique_ptr<ReducedRows> reduced;    // rows of the last reduction, until they are attached or kept
  std::unique_ptr<ReducedRows> downloads;  // rows on their way to the host
  std::unique_ptr<SegmentRows> partial;    // rows that wait for an all-reduce, unless the transport keeps them
};

class ParamGroup final : public ScheduledGroup {
 public:
  // `device`: where the group is gathered and reduced. `offload`: what stays in CPU memory, which only transports with
  // streams support.
  ParamGroup(Layout layout, at::Tensor pool, std::vector<Param> params, GroupCalls calls, int replicas,
             at::Device device, Offload offload);

  // --- what it is ---
  const std::string& name() const override { return name_; }  // empty until its unit names it
  // Sets the name for errors and the ledgers, also for its smaller world.
  void rename(std::string name);
  const Layout& layout() const { return layout_; }
  Shards& shards() { return shards_; }
  const at::Tensor& pool() const { return shards_.memory(); }
  at::Device device() const { return place_.device; }
  Offload offload() const { return place_.offload; }
  // Returns whether shards and gradients are in CPU memory for the optimizer.
  bool offloads() const { return place_.offload != Offload::nothing; }
  std::vector<Param>& params() { return params_; }
  const std::vector<Param>& params() const { return params_; }
  GroupCalls& calls() { return calls_; }
  const GroupCalls& calls() const { return calls_; }
  Gradients& gradients() { return gradients_; }
  const Gradients& gradients() const { return gradients_; }

  // Sets the local tensors of the sharded parameters, with none for one outside of the pool. Throws if one does not
  // match the layout.
  void watch_shards(const std::vector<std::optional<at::Tensor>>& locals);
  // Returns whether a sharded parameter is not the watched tensor, or has another dtype, `grad_dtype` or size.
  bool has_replaced_shards(const Gil& gil) const;

  // --- who it belongs to ---
  void set_unit(const UnitFacts* unit);
  const UnitFacts& unit() const { return *member_.unit; }
  const UnitOptions& options() const { return member_.unit->options; }
  // Sets what moves its bytes. The group itself never calls it.
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
  // Returns the group whose slot the next gather fills: this one, after updating its pool, or its smaller world.
  ParamGroup& begin_gather();
  ParamGroup& gathered_from() const { return *gathered_from_; }
  // Points unsharded parameters at the full slot and registers them in modules. Takes the GIL.
  void fill();
  // Registers gathered parameters again if modules have the sharded ones: torch.func.functional_call restores what it
  // found.
  void register_again(const Gil& gil) const;
  // Follows changes of requires_grad, before a forward over parameters that were gathered earlier. Returns false if a
  // parameter got other memory and must be gathered again.
  bool follow_gathered();
  // Returns the sum of torch's version counters of the shards. It grows if a shard is written, except through `.data`
  // and by foreach functions over DTensors.
  uint64_t shard_versions(const Gil& gil) const;
  // Remembers the versions until the next gather begins.
  void note_shards(const Gil& gil) { noted_versions_ = shard_versions(gil); }
  bool were_shards_written(const Gil& gil) const { return noted_versions_ && *noted_versions_ != shard_versions(gil); }
  // Returns a parameter that lost a change at a reshard since the last call, usually null.
  const Param* take_lost();
  // Poisons the unsharded parameters and registers the sharded ones. `keeps_post_forward`: registers those of the
  // smaller world, which serves the next gather until drop_post_forward(). Takes the GIL.
  void empty(bool keeps_post_forward);
  void drop_post_forward();
  // Frees the memory of extensions. Only then may the slot go.
  void free_extensions();

  GatherSlot& gather() { return gather_; }
  const GatherSlot& gather() const { return gather_; }
  // For transports. open_slot takes a slot of `ledger` for the next gather, or the kept one. close_slot ends its use
  // and returns true if it went back to the ledger.
  const Slot& open_slot(SlotLedger& ledger);
  bool close_slot(SlotLedger& ledger);

  // Sets the smaller world that it may be resharded to after forward. `group` has its layout in the compute dtype, a
  // pool, and no parameters. `sharded` are the parameters to register meanwhile, over its pool.
  void set_post_forward(std::shared_ptr<ParamGroup> group, std::vector<PyRef> sharded);
  void clear_post_forward();
  const std::shared_ptr<ParamGroup>& post_forward() const { return post_forward_.group; }
  // Copies rows from the slot of the gathered group to the pool of the smaller world.
  const CopyProgram& rows_to_keep();

  // --- gradients ---
  bool has_unpacked_gradient(size_t param) const;
  // Takes what autograd has accumulated.
  at::Tensor take_gradient(size_t param);
  // Makes the gradient dense and plain, as transports take it.
  at::Tensor packable(at::Tensor gradient, size_t param) const;
  // Drops what autograd has accumulated.
  void drop_unpacked();
  WaitingTensors& waiting() { return waiting_; }
  const WaitingTensors& waiting() const { return waiting_; }

  // --- how it is reduced ---
  // Returns whether the summed rows go through a separate segment instead of directly into `.grad`.
  bool is_staged() const { return calls_.all_reduce || calls_.all_reduce_hook; }
  bool has_replicas() const { return static_cast<bool>(calls_.all_reduce); }
  // Returns whether parameters without a gradient are reduced as zeros. This must not depend on what this rank ran or
  // on its gradient mode, because other ranks may have run something else.
  bool reduces_unused() const;
  bool has_trainable() const;
  // Returns whether it needs nothing from other ranks: there are none, or every parameter has a gather extension.
  bool gathers_alone() const;
  DType reduce_type() const;
  // Returns whether its unsharded parameters are views of its pool on the device, without a slot.
  bool views_pool() const { return layout_.pool_is_slot() && !offloads(); }
  // Returns whether the collectives divide by the number of ranks. Otherwise they sum.
  bool averages() const;
  // Returns the divisor of a sum over all ranks, replicas included.
  double divisor() const;
  // Returns the divisor to apply before a summing collective. For fp16 this is about the square root of the divisor, as
  // in FSDP2, because fp16 sums overflow early. The rest is divided afterwards.
  double pre_divisor() const;

 private:
  // Throws unless the sharded parameter has the layout's dtype.
  void check_dtype(size_t param, const at::Tensor& tensor) const;
  // Throws if a shard's storage has become too small for what the layout reads.
  void check_sizes() const;
  // Throws unless modules still register the sharded parameters that they got last.
  void check_registered(const Gil& gil) const;
  PyObject* registered_while_sharded(size_t param) const;
  // Moves plain parameters whose `.data` was assigned back into the pool, with the new values.
  void fetch_reassigned();
  at::Tensor plain(const at::Tensor& gradient, size_t param) const;

  // Where the group is gathered and reduced, and what is stored elsewhere.
  struct Place {
    at::Device device;
    Offload offload;
    int replicas;
  };
  // The owners of the group, from the time it joins a unit or a root.
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
  std::optional<uint64_t> noted_versions_;  // of the shards, see note_shards
  ParamGroup* gathered_from_ = this;        // the group whose transport and slot served the last gather
  PostForward post_forward_;
  WaitingTensors waiting_;
};

}  // namespace fsdp2x
