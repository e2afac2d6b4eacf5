// The extension module fsdp2x._C: names only, no decisions.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bind/parts.hpp"
#include "core/error.hpp"
#include "engine/memory/changes.hpp"
#include "engine/memory/device_kernels.hpp"
#include "engine/memory/storage.hpp"
#include "engine/schedule/hooks.hpp"
#include "engine/schedule/root.hpp"
#include "engine/torch/module_tree.hpp"
#include "engine/torch/parallel.hpp"
#include "engine/transport/agreement.hpp"
#include "engine/transport/process_group/process_group_transport.hpp"
#include "engine/transport/shm/host_all_reduce.hpp"
#include "engine/transport/shm/shared_memory_transport.hpp"
#include "kernels/cpu/kernels.hpp"
#include "shm/shm_group.hpp"

namespace fsdp2x {

namespace {

// ParamShape with torch's dtypes, under the name that Python uses.
struct TorchShape {
  int64_t outer, dim, inner;
  at::ScalarType original, compute, reduce;
  bool in_slot;
  std::optional<at::ScalarType> grad_override;
  bool takes_any_grad;

  at::ScalarType grad() const { return grad_override.value_or(original); }
  // Dtypes that the engine cannot cast are passed as bytes.
  ParamShape in_engine() const {
    ParamShape shape{outer, dim,    inner, engine_dtype(original), engine_dtype(compute), engine_dtype(reduce),
                     true,  in_slot};
    if (grad_override) shape.grad_override = engine_dtype(*grad_override);
    shape.takes_any_grad = takes_any_grad;
    if (shape.orig == DType::byte) {
      shape.inner *= static_cast<int64_t>(c10::elementSize(original));
      shape.compute = shape.reduce = DType::byte;
      shape.trainable = false;
    }
    return shape;
  }
};

std::vector<ParamShape> in_engine(const std::vector<TorchShape>& shapes) {
  std::vector<ParamShape> result;
  for (const TorchShape& shape : shapes) result.push_back(shape.in_engine());
  return result;
}

// (fqn, sharded, unsharded or None, local or None, gradient spec, [(parameters dict, name, weakref or None)])
using OwnerTuple = std::tuple<py::dict, py::str, py::object>;
using ParamTuple = std::tuple<std::string, py::object, py::object, py::object, py::object, std::vector<OwnerTuple>>;

Owner owner_of(const OwnerTuple& owner) {
  const auto& [parameters, name, weak_module] = owner;
  return {own(parameters), own(name), own_unless_none(weak_module)};
}

std::vector<Param> params_of(const std::vector<ParamTuple>& tuples) {
  std::vector<Param> params;
  for (const auto& [fqn, sharded, unsharded, local, spec, owner_tuples] : tuples) {
    std::vector<Owner> owners;
    for (const OwnerTuple& owner : owner_tuples) owners.push_back(owner_of(owner));
    params.emplace_back(fqn, own(sharded), own_unless_none(unsharded), own_unless_none(local), own(spec),
                        std::move(owners));
  }
  return params;
}

py::dict stats_of(const Root& root) {
  const TransportStats stats = root.transport_stats();
  py::dict result;
  result["gather_slots_owned"] = stats.gather_slots_owned;
  result["gather_slot_bytes"] = stats.gather_slot_bytes;
  result["peak_gather_bytes"] = stats.peak_gather_bytes;
  result["scratch_slots_owned"] = stats.scratch_slots_owned;
  result["scratch_bytes"] = stats.scratch_bytes;
  result["resident_shard_bytes"] = stats.resident_shard_bytes;
  result["wire_bytes"] = stats.wire_bytes;
  result["transport_allocations"] = stats.num_allocations;
  result["owners"] = stats.owners;
  result["gradient_block_allocations"] = root.blocks().num_allocations();
  result["gathers"] = root.counters().gathers;
  result["prefetched_gathers"] = root.schedule().num_prefetches();
  result["reductions"] = root.counters().reductions;
  result["wire_encodings"] = root.counters().wire_encodings;
  result["parameter_stores"] = root.counters().parameter_stores;
  uint64_t python_calls = root.counters().python_calls;
  for (const auto& unit : root.units()) {
    for (const auto& group : unit->groups) python_calls += group->gradients().num_python_calls();
  }
  result["python_calls"] = python_calls;
  return result;
}

// Copies contiguous CPU tensors of the same sizes past the caches, on the threads that this rank owns.
void stream_copies(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  if (targets.size() != sources.size()) throw Error("stream_copies: as many targets as sources are needed");
  Items items;
  for (size_t i = 0; i < targets.size(); ++i) {
    for (const at::Tensor& tensor : {targets[i], sources[i]}) {
      if (!tensor.is_cpu() || !tensor.is_contiguous()) throw Error("stream_copies: contiguous CPU tensors are needed");
    }
    if (targets[i].nbytes() != sources[i].nbytes())
      throw Error("stream_copies: a target and its source differ in size");
    items.add(static_cast<int64_t>(sources[i].nbytes()));
  }
  const py::gil_scoped_release released;
  items.for_each_range([&](size_t i, int64_t begin, int64_t end) {
    cpu::stream_copy(static_cast<std::byte*>(targets[i].data_ptr()) + begin,
                     static_cast<const std::byte*>(sources[i].const_data_ptr()) + begin,
                     static_cast<size_t>(end - begin));
  });
}

void bind_layout(py::module_& m) {
  py::class_<cuda::Kernels>(m, "Kernels");  // tests pass it as on_host
  py::class_<TorchShape>(m, "ParamShape")
      .def(py::init<int64_t, int64_t, int64_t, at::ScalarType, at::ScalarType, at::ScalarType, bool,
                    std::optional<at::ScalarType>, bool>(),
           py::arg("outer"), py::arg("dim"), py::arg("inner"), py::arg("original"), py::arg("compute"),
           py::arg("reduce"), py::arg("in_slot") = true, py::arg("grad_override") = py::none(),
           py::arg("takes_any_grad") = false)
      .def_readonly("outer", &TorchShape::outer)
      .def_readonly("dim", &TorchShape::dim)
      .def_readonly("inner", &TorchShape::inner)
      .def_readonly("original", &TorchShape::original)
      .def_readonly("compute", &TorchShape::compute)
      .def_readonly("reduce", &TorchShape::reduce)
      .def_property_readonly("grad", &TorchShape::grad)
      .def_readonly("in_slot", &TorchShape::in_slot)
      .def_property_readonly("numel", [](const TorchShape& shape) { return shape.outer * shape.dim * shape.inner; })
      // For memory plans: bytes of the gradient as peers read it.
      .def_property_readonly("packed_bytes", [](const TorchShape& shape) {
        const ParamShape packed = shape.in_engine();
        return static_cast<size_t>(packed.numel()) * dtype_bytes(packed.packed());
      });
  py::class_<Layout>(m, "Layout")
      .def(py::init([](const std::vector<TorchShape>& shapes, int world, int rank, bool whole_chunks) {
             return Layout(in_engine(shapes), world, rank, whole_chunks);
           }),
           py::arg("shapes"), py::arg("world"), py::arg("rank"), py::arg("whole_chunks") = false)
      .def_property_readonly("shard_pool_bytes", &Layout::shard_pool_bytes)
      .def_property_readonly("gradient_pool_bytes", &Layout::gradient_pool_bytes)
      .def_property_readonly("can_reduce_in_place", &Layout::can_reduce_in_place)
      .def_property_readonly("slot_bytes", &Layout::slot_bytes)
      .def_property_readonly("pool_is_slot", &Layout::pool_is_slot)
      .def_property_readonly("can_rest_in_slot", &Layout::can_rest_in_slot)
      .def_property_readonly("offsets_in_slot", &Layout::offsets_in_slot)
      .def_property_readonly("scratch_bytes", &Layout::scratch_bytes)
      .def_property_readonly("wide_scratch_bytes", &Layout::wide_scratch_bytes)
      .def_property_readonly("gather_segment_bytes", &Layout::gather_segment_bytes)
      .def_property_readonly("reduce_segment_bytes", &Layout::reduce_segment_bytes)
      .def_property_readonly("flagged_segment_bytes", &Layout::flagged_segment_bytes)
      .def("training", py::overload_cast<const std::vector<bool>&>(&Layout::training, py::const_), py::arg("trains"))
      .def_property_readonly("shard_offsets",
                             [](const Layout& layout) {
                               std::vector<size_t> offsets;
                               for (const ParamPlace& place : layout.params()) offsets.push_back(place.shard_offset);
                               return offsets;
                             })
      .def_property_readonly("shard_numels",
                             [](const Layout& layout) {
                               std::vector<int64_t> numels;
                               for (const ParamPlace& place : layout.params()) numels.push_back(place.shard_numel);
                               return numels;
                             })
      // This rank's rows without pads, as stored and as gathered.
      .def_property_readonly("shard_bytes",
                             [](const Layout& layout) {
                               size_t bytes = 0;
                               for (const ParamPlace& place : layout.params()) {
                                 bytes += static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig);
                               }
                               return bytes;
                             })
      .def_property_readonly("row_bytes", [](const Layout& layout) {
        size_t bytes = 0;
        for (const ParamPlace& place : layout.params()) {
          if (place.shape.in_slot) bytes += static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.compute);
        }
        return bytes;
      });
  m.def(
      "shard_rows",
      [](int64_t dim, int world, int rank) {
        const RowRange rows = shard_rows(dim, world, rank);
        return std::make_pair(rows.begin, rows.end);
      },
      py::arg("dim"), py::arg("world"), py::arg("rank"));
  m.def(
      "take_changes",
      [](const at::Tensor& now, const at::Tensor& held, int64_t max, const cuda::Kernels* on_host) {
        const cuda::Kernels* const kernels = on_host != nullptr ? on_host : kernels_on(held.device());
        const py::gil_scoped_release released;
        return take_changes(now, held, max, kernels);
      },
      py::arg("now"), py::arg("held"), py::arg("max"), py::arg("on_host") = nullptr);
  m.def("stream_copies", &stream_copies, py::arg("targets"), py::arg("sources"));
  m.def(
      "pool_memory",
      [](int64_t bytes, at::Device device) { return pool_memory(bytes, at::TensorOptions().device(device)); },
      py::arg("bytes"), py::arg("device"));
  m.def("tensor_in_pool", &tensor_in_pool, py::arg("pool"), py::arg("offset"), py::arg("sizes"), py::arg("dtype"));
  m.def("detach_memory", &detach_memory, py::arg("tensor"), py::arg("message"));
  m.def("attach_to_pool", &attach_to_pool, py::arg("tensor"), py::arg("pool"), py::arg("offset"));
  m.def("tensor_without_memory", &tensor_without_memory, py::arg("sizes"), py::arg("dtype"), py::arg("device"));
}

void bind_transports(py::module_& m) {
  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport").def_property_readonly("name", &Transport::name);
  m.def("local_transport",
        []() -> std::shared_ptr<Transport> { return std::make_shared<CpuTransport>(cpu::ShmGroup::page_bytes()); });
  m.def(
      "shm_transport",
      [](std::shared_ptr<cpu::ShmGroup> group) -> std::shared_ptr<Transport> {
        return std::make_shared<SharedMemoryTransport>(std::move(group));
      },
      py::arg("group"));
  py::class_<HostAllReduce>(m, "HostAllReduce")
      .def(py::init<std::shared_ptr<cpu::ShmGroup>>(), py::arg("group"))
      .def("__call__", &HostAllReduce::run, py::arg("values"), py::arg("average"));
  m.def("all_reduce_scratch_bytes", &HostAllReduce::scratch_bytes, py::arg("sizes"), py::arg("page_bytes"));
  m.def(
      "group_transport",
      [](const py::object& all_gather, const py::object& gather_in_place, const py::object& reduce_scatter,
         const py::object& all_to_all, const py::object& wait, const py::object& may_replace, size_t message_bytes,
         size_t pack_below_bytes) -> std::shared_ptr<Transport> {
        return std::make_shared<ProcessGroupTransport>(
            Collectives{own(all_gather), own(gather_in_place), own(reduce_scatter), own(all_to_all), own(wait),
                        own_unless_none(may_replace), message_bytes, pack_below_bytes});
      },
      py::arg("all_gather"), py::arg("gather_in_place"), py::arg("reduce_scatter"), py::arg("all_to_all"),
      py::arg("wait"), py::arg("may_replace"), py::arg("message_bytes"), py::arg("pack_below_bytes"));
}

void bind_root(py::module_& m) {
  py::class_<RootSettings, std::shared_ptr<RootSettings>>(m, "RootSettings")
      .def(py::init<>())
      .def_readwrite("is_last_backward", &RootSettings::is_last_backward)
      .def_readwrite("manual_finalization", &RootSettings::manual_finalization)
      .def("set_forward_runs", [](RootSettings& self, const py::object& runs) { self.forward_runs = own(runs); })
      .def("set_post_optimizer_event",
           [](RootSettings& self, const py::object& event) { self.post_optimizer_event = own(event); });
  py::class_<Root, std::shared_ptr<Root>>(m, "Root")
      .def(py::init<std::shared_ptr<RootSettings>>(), py::arg("settings"))
      .def("add_unit", &Root::add_unit, py::arg("unit"), py::arg("transports"))
      .def("add_post_forward", &Root::add_post_forward, py::arg("group"), py::arg("transport"))
      .def("add_agreement", &Root::add_agreement, py::arg("agreement"))
      .def("add_replicas",
           [](Root& self, const HostAllReduce& all_reduce) { self.add_replicas(all_reduce.shared_group()); })
      .def("reset", &Root::reset)
      .def_property_readonly("has_replaced_shards",
                             [](const Root& self) { return self.has_replaced_shards(Gil::of_caller()); })
      .def("release_idle", &Root::release_idle)
      .def("finalize_backward", &Root::finalize_backward)
      .def("finish_held_backwards", &Root::finish_held_backwards)
      .def("synchronize_gradients", &Root::synchronize_gradients, py::arg("units"))
      .def_property_readonly("in_forward", [](const Root& self) { return self.schedule().in_forward(); })
      .def_property_readonly("awaits_finalization",
                             [](const Root& self) { return self.schedule().awaits_finalization(); })
      .def_property_readonly("in_backward", [](const Root& self) { return self.schedule().in_backward(); })
      .def("set_max_reduce_buffers",
           [](Root& self, size_t num) {
             for (const auto& transport : self.transports()) transport->set_max_reduce_buffers(num);
           })
      // (kind, last owner, address, bytes) of the memory that transports lend to units.
      .def("loans",
           [](const Root& self) {
             std::vector<std::tuple<std::string, std::string, uintptr_t, size_t>> loans;
             for (const auto& transport : self.transports()) {
               for (const Transport::Loan& loan : transport->loans()) {
                 loans.emplace_back(loan.kind, loan.owner, reinterpret_cast<uintptr_t>(loan.data), loan.bytes);
               }
             }
             return loans;
           })
      .def("stats", &stats_of);
}

// A property that takes a callable or None.
template <PyRef GroupCalls::*Member>
void bind_call(py::class_<ParamGroup, std::shared_ptr<ParamGroup>>& group, const char* name) {
  group.def_property(
      name,
      [](const ParamGroup& self) {
        PyObject* object = (self.calls().*Member).get();
        return object == nullptr ? py::object(py::none()) : py::reinterpret_borrow<py::object>(object);
      },
      [](ParamGroup& self, const py::object& function) { self.calls().*Member = own_unless_none(function); });
}

void bind_group(py::module_& m) {
  py::enum_<Offload>(m, "Offload")
      .value("nothing", Offload::nothing)
      .value("gradients", Offload::gradients)
      .value("everything", Offload::everything);
  py::class_<ParamGroup, std::shared_ptr<ParamGroup>> group(m, "ParamGroup");
  group
      .def(py::init([](const Layout& layout, const at::Tensor& pool, const std::vector<ParamTuple>& params,
                       const py::object& make_gradient, const py::object& add_to_foreign,
                       const py::object& plain_gradient, int replicas, at::Device device, Offload offload) {
             GroupCalls calls;
             calls.make_gradient = own(make_gradient);
             calls.add_to_foreign = own(add_to_foreign);
             calls.plain_gradient = own(plain_gradient);
             return std::make_shared<ParamGroup>(layout, pool, params_of(params), std::move(calls), replicas, device,
                                                 offload);
           }),
           py::arg("layout"), py::arg("pool"), py::arg("params"), py::arg("make_gradient"), py::arg("add_to_foreign"),
           py::arg("plain_gradient"), py::arg("replicas"), py::arg("device"), py::arg("offload"))
      .def("add_owner", [](ParamGroup& self, size_t index,
                           const OwnerTuple& owner) { self.params().at(index).add_owner(owner_of(owner)); })
      .def("forget_missing_owners",
           [](ParamGroup& self) {
             for (Param& param : self.params()) param.forget_missing_owners(Gil::of_caller());
           })
      .def("forget_gradients", [](ParamGroup& self) { self.gradients().forget(); })
      .def("set_post_forward",
           [](ParamGroup& self, const Layout& layout, const at::Tensor& pool, const std::vector<py::object>& sharded,
              const py::object& explain) {
             std::vector<PyRef> params;
             for (const py::object& param : sharded) params.push_back(own(param));
             GroupCalls calls;
             calls.explain = own_unless_none(explain);
             self.set_post_forward(std::make_shared<ParamGroup>(layout, pool, std::vector<Param>(), std::move(calls),
                                                                /*replicas=*/1, self.device(), Offload::nothing),
                                   std::move(params));
           })
      .def("clear_post_forward", &ParamGroup::clear_post_forward)
      // The agreements over its shards, its replicas, and the ranks that keep it after forward. None: there is none.
      .def(
          "take_seats",
          [](ParamGroup& self, const std::shared_ptr<Agreement>& shards, const std::shared_ptr<Agreement>& replicas,
             const std::shared_ptr<Agreement>& post_forward, const std::string& label) {
            const auto seat = [&label](const std::shared_ptr<Agreement>& agreement) {
              return AgreementSeat{agreement, agreement ? agreement->add_subject(label) : 0};
            };
            self.take_seats(seat(shards), seat(replicas));
            if (self.post_forward()) self.post_forward()->take_seats(seat(post_forward), {});
          },
          py::arg("shards"), py::arg("replicas"), py::arg("post_forward"), py::arg("label"))
      .def("set_sharded_param",
           [](ParamGroup& self, size_t index, const py::object& param, const py::object& spec) {
             self.params().at(index).set_sharded_object(own(param));
             self.params().at(index).set_gradient_spec(own(spec));
           })
      .def("watch_shards", &ParamGroup::watch_shards, py::arg("locals"))
      .def_property_readonly("holds_unreduced", &ParamGroup::holds_unreduced)
      .def("set_unsharded_param",
           [](ParamGroup& self, size_t index, const py::object& param) {
             self.params().at(index).set_unsharded_object(own(param));
           })
      .def("unsharded_param",
           [](const ParamGroup& self, size_t index) {
             return py::reinterpret_borrow<py::object>(self.params().at(index).unsharded_object());
           })
      .def_property_readonly("name", &ParamGroup::name)
      .def_property_readonly("index", &ParamGroup::index)
      // The memory of the shards and their offsets: a pool, or a slot that they rest in.
      .def_property_readonly("pool",
                             [](ParamGroup& self) {
                               self.shards().close();
                               return self.pool();
                             })
      .def_property_readonly("shard_offsets",
                             [](ParamGroup& self) {
                               std::vector<size_t> offsets;
                               for (size_t i = 0; i < self.params().size(); ++i) {
                                 offsets.push_back(self.shards().offset(i));
                               }
                               return offsets;
                             })
      .def_property_readonly("has_resting_shards",
                             [](ParamGroup& self) { return self.shards().state() != ShardState::in_pool; })
      .def("give_back_shards",
           [](ParamGroup& self) {
             if (self.has_joined()) self.transport().give_back_shards(self);
           })
      .def_property_readonly("has_streams", [](const ParamGroup& self) { return self.transport().has_streams(); })
      .def_property_readonly("transport_name", [](const ParamGroup& self) { return self.transport().name(); })
      .def_property_readonly("slot_bytes", [](const ParamGroup& self) { return self.layout().slot_bytes(); })
      .def_property_readonly("shard_pool_bytes",
                             [](const ParamGroup& self) { return self.layout().shard_pool_bytes(); })
      .def_property_readonly("gradient_pool_address",
                             [](const ParamGroup& self) {
                               const at::Tensor& pool = self.gradients().pool();
                               return reinterpret_cast<uintptr_t>(pool.defined() ? pool.const_data_ptr() : nullptr);
                             })
      .def_property_readonly("gradient_pool_bytes",
                             [](const ParamGroup& self) { return self.gradients().pool_bytes(); });
  bind_call<&GroupCalls::all_reduce>(group, "all_reduce");
  bind_call<&GroupCalls::all_reduce_hook>(group, "all_reduce_hook");
  bind_call<&GroupCalls::all_gather>(group, "all_gather");
  bind_call<&GroupCalls::reduce_scatter>(group, "reduce_scatter");
  bind_call<&GroupCalls::gather_memory>(group, "gather_memory");
  bind_call<&GroupCalls::reduce_memory>(group, "reduce_memory");
  bind_call<&GroupCalls::separate_reduce_scatter>(group, "separate_reduce_scatter");
  bind_call<&GroupCalls::separate_all_to_all>(group, "separate_all_to_all");
  bind_call<&GroupCalls::begin_extension_gather>(group, "begin_extension_gather");
  bind_call<&GroupCalls::prepare_extensions>(group, "prepare_extensions");
  bind_call<&GroupCalls::extension_gathers>(group, "extension_gathers");
  bind_call<&GroupCalls::finish_extension_gather>(group, "finish_extension_gather");
  bind_call<&GroupCalls::free_extension_gather>(group, "free_extension_gather");
  bind_call<&GroupCalls::explain>(group, "explain");
  bind_call<&GroupCalls::explain_all_reduce>(group, "explain_all_reduce");
}

void bind_unit(py::module_& m) {
  py::class_<UnitOptions, std::shared_ptr<UnitOptions>>(m, "UnitOptions")
      .def(py::init<>())
      .def_readwrite("reshard_after_forward", &UnitOptions::reshard_after_forward)
      .def_readwrite("reshard_without_grad", &UnitOptions::reshard_without_grad)
      .def_readwrite("reshard_after_backward", &UnitOptions::reshard_after_backward)
      .def_readwrite("requires_gradient_sync", &UnitOptions::requires_gradient_sync)
      .def_readwrite("requires_all_reduce", &UnitOptions::requires_all_reduce)
      .def_readwrite("reduce_unused_params", &UnitOptions::reduce_unused_params)
      .def_readwrite("unshard_in_backward", &UnitOptions::unshard_in_backward)
      .def_readwrite("keep_unsharded_storage", &UnitOptions::keep_unsharded_storage)
      .def_readwrite("cast_forward_inputs", &UnitOptions::cast_forward_inputs)
      .def_readwrite("param_dtype", &UnitOptions::param_dtype)
      .def_readwrite("output_dtype", &UnitOptions::output_dtype)
      .def_readwrite("divide_factor", &UnitOptions::divide_factor)
      .def_readwrite("force_sum_reduction", &UnitOptions::force_sum_reduction)
      .def_readwrite("wire_weights", &UnitOptions::wire_weights)
      .def_readwrite("wire_gradients", &UnitOptions::wire_gradients);
  py::class_<Unit, std::shared_ptr<Unit>>(m, "Unit")
      .def(py::init<std::string, at::Device, std::vector<std::shared_ptr<ParamGroup>>, std::shared_ptr<UnitOptions>>(),
           py::arg("name"), py::arg("device"), py::arg("groups"), py::arg("options"))
      .def("rename", &Unit::rename, py::arg("name"), py::arg("fqns"))
      .def("set_groups", &Unit::set_groups, py::arg("groups"))
      .def("begin_unshard", &Unit::begin_unshard)
      .def("finish_unshard", &Unit::finish_unshard)
      .def("unshard", [](Unit& self) { self.root->schedule().unshard(self); })
      .def("reshard", &Unit::reshard)
      // (full, rows) of a gradient that waits, with flat rows.
      .def(
          "waiting_gradient",
          [](Unit& self, size_t group, size_t param) {
            self.root->waiting();
            ParamGroup& held = *self.groups.at(group);
            return std::pair(WaitingGradients::unreduced(held, param), WaitingGradients::partial_rows(held, param));
          },
          py::arg("group"), py::arg("param"))
      .def("retire", &Unit::retire)
      .def(
          "pre_backward", [](Unit& self) { self.root->schedule().pre_backward(self); },
          py::call_guard<py::gil_scoped_release>())
      .def("set_forward_prefetch",
           [](Unit& unit, const std::vector<std::shared_ptr<Unit>>& units) {
             unit.set_forward_prefetch({units.begin(), units.end()});
           })
      .def("set_backward_prefetch",
           [](Unit& unit, const std::vector<std::shared_ptr<Unit>>& units) {
             unit.set_backward_prefetch({units.begin(), units.end()});
           })
      .def_property_readonly("name", [](const Unit& unit) { return unit.name(); })
      .def_readonly("groups", &Unit::groups)
      .def_property_readonly("param_state", [](const Unit& unit) { return to_string(unit.param_state()); })
      .def_property_readonly("phase", [](const Unit& unit) { return to_string(unit.phase()); });
  py::class_<UnitCall>(m, "UnitCall").def("end", &UnitCall::end, py::call_guard<py::gil_scoped_release>());
  py::class_<UnitMove>(m, "UnitMove")
      .def(py::init<std::shared_ptr<Unit>>(), py::arg("unit"))
      .def("finish", &UnitMove::finish);
  py::class_<UnitHooks, std::shared_ptr<UnitHooks>>(m, "UnitHooks")
      .def(py::init<const std::vector<py::object>&, const std::vector<py::object>&, py::object, py::object, py::object,
                    std::vector<py::object>>(),
           py::arg("modules"), py::arg("lookups"), py::arg("lazy_init"), py::arg("explain"), py::arg("is_running"),
           py::arg("backward_hooks"))
      .def("set_marks", &UnitHooks::set_marks, py::arg("mark_inputs"), py::arg("mark_output"))
      .def("add_backward_hooks", &UnitHooks::add_backward_hooks)
      .def("lazy_init", &UnitHooks::lazy_init)
      .def("set_unit", &UnitHooks::set_unit)
      .def("set_all",
           [](UnitHooks& hooks, const std::vector<std::shared_ptr<UnitHooks>>& all) {
             hooks.set_all({all.begin(), all.end()});
           })
      .def("forget_progress", &UnitHooks::forget_progress)
      .def("pre_forward", &UnitHooks::pre_forward)
      .def("post_forward", &UnitHooks::post_forward);
  m.def(
      "is_same_tree", [](const py::tuple& snapshot) { return is_same_tree(Gil::of_caller(), snapshot); },
      py::arg("snapshot"));
}

}  // namespace

}  // namespace fsdp2x

// Bind types before functions that use them, so that the stub's signatures have their names.
PYBIND11_MODULE(_C, m) {
  m.doc() = "The engine of fsdp2x; import it through fsdp2x.base.native only.";
  pybind11::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const fsdp2x::Error& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (python_error& error) {
      error.restore();
    }
  });
  fsdp2x::bind_layout(m);
  fsdp2x::bind_accounting(m);
  fsdp2x::bind_shared_memory(m);
  fsdp2x::bind_agreement(m);
  fsdp2x::bind_transports(m);
  fsdp2x::bind_device(m);
  fsdp2x::bind_group(m);
  fsdp2x::bind_unit(m);
  fsdp2x::bind_root(m);
  fsdp2x::bind_waiting(m);
  fsdp2x::bind_optim(m);
}
