// Binds the sizes and steps of a planned model: the planner counts with the engine's rules and schedule.
#include "bind/parts.hpp"

#include <optional>
#include <tuple>
#include <vector>

#include "core/layout.hpp"
#include "core/schedule/planned_steps.hpp"
#include "core/wire_layout.hpp"

namespace py = pybind11;

namespace fsdp2x {

namespace {

template <size_t (TransportMemory::*Bytes)() const>
size_t total(const PlannedSteps& steps) {
  size_t bytes = 0;
  for (const auto& transport : steps.transports()) bytes += ((*transport).*Bytes)();
  return bytes;
}

void bind_planned_steps(py::module_& m) {
  py::class_<GroupBytes>(m, "GroupBytes")
      .def(py::init<>())
      .def_readwrite("shard_pool_bytes", &GroupBytes::shard_pool)
      .def_readwrite("slot_bytes", &GroupBytes::slot)
      .def_readwrite("scratch_bytes", &GroupBytes::scratch)
      .def_readwrite("wide_scratch_bytes", &GroupBytes::wide_scratch)
      .def_readwrite("gather_segment_bytes", &GroupBytes::gather_segment)
      .def_readwrite("reduce_segment_bytes", &GroupBytes::reduce_segment)
      .def_readwrite("coded_reduce_bytes", &GroupBytes::coded_reduce)
      .def_readwrite("received_bytes", &GroupBytes::received)
      .def_readwrite("staging_bytes", &GroupBytes::staging)
      .def_readwrite("gradient_bytes", &GroupBytes::gradient)
      .def_readwrite("gradient_pool_bytes", &GroupBytes::gradient_pool)
      .def_readwrite("reduced_bytes", &GroupBytes::reduced)
      .def_readwrite("landing_bytes", &GroupBytes::landing)
      .def_readwrite("is_trainable", &GroupBytes::is_trainable)
      .def_readwrite("reduces_in_place", &GroupBytes::reduces_in_place)
      .def_readwrite("offloads", &GroupBytes::offloads)
      .def_readwrite("keeps_shards", &GroupBytes::keeps_shards)
      .def_readwrite("rests", &GroupBytes::rests)
      .def_readwrite("reduce_buffer_bytes", &GroupBytes::reduce_buffer)
      .def_readwrite("reduces_unused", &GroupBytes::reduces_unused);
  py::class_<PlannedRanks>(m, "PlannedRanks")
      .def(py::init([](size_t world, size_t replicas, bool registers_memory, std::optional<size_t> max_reduce_buffers) {
             return PlannedRanks{world, replicas, registers_memory, max_reduce_buffers};
           }),
           py::arg("world"), py::arg("replicas"), py::arg("registers_memory"), py::arg("max_reduce_buffers"));
  py::enum_<PlannedEvent::Kind>(m, "PlannedEventKind")
      .value("open", PlannedEvent::Kind::open)
      .value("read", PlannedEvent::Kind::read)
      .value("use", PlannedEvent::Kind::use)
      .value("sum", PlannedEvent::Kind::sum)
      .value("close", PlannedEvent::Kind::close);
  py::class_<PlannedEvent>(m, "PlannedEvent")
      .def(py::init([](PlannedEvent::Kind kind, size_t unit, size_t group, bool has_node, size_t bytes) {
             return PlannedEvent{kind, unit, group, has_node, bytes};
           }),
           py::arg("kind"), py::arg("unit"), py::arg("group"), py::arg("has_node"), py::arg("bytes") = 0);
  py::class_<PlannedBackward>(m, "PlannedBackward")
      .def(py::init([](bool syncs, size_t num, bool all_reduces) {
             return PlannedBackward{syncs, num, all_reduces};
           }),
           py::arg("syncs"), py::arg("num"), py::arg("all_reduces") = true);
  py::class_<PlannedSteps>(m, "PlannedSteps")
      .def(py::init<size_t>(), py::arg("page_bytes"))
      .def("add_transport", &PlannedSteps::add_transport, py::arg("transport"), py::arg("ranks"))
      .def("add_unit", &PlannedSteps::add_unit, py::arg("name"), py::arg("reshards_after_forward"),
           py::arg("reshards_after_backward"), py::arg("unshards_in_backward"))
      .def("add_group", &PlannedSteps::add_group, py::arg("unit"), py::arg("transport"), py::arg("sizes"),
           py::arg("smaller"))
      // Returns (identical backwards, gathered groups, reduced groups) for each backward of the last step.
      .def(
          "run",
          [](PlannedSteps& self, const std::vector<PlannedEvent>& events,
             const std::vector<PlannedBackward>& backwards) {
            std::vector<std::tuple<size_t, std::vector<size_t>, std::vector<size_t>>> moved;
            for (auto& backward : self.run(events, backwards)) {
              moved.emplace_back(backward.num, std::move(backward.gathers), std::move(backward.reductions));
            }
            return moved;
          },
          py::arg("events"), py::arg("backwards"))
      .def_property_readonly("device_bytes", &PlannedSteps::device_bytes)
      .def_property_readonly("gather_slot_bytes", &total<&TransportMemory::gather_slot_bytes>)
      .def_property_readonly("own_gather_slot_bytes", &total<&TransportMemory::own_gather_slot_bytes>)
      .def_property_readonly("peak_gather_bytes", &total<&TransportMemory::peak_gather_bytes>)
      .def_property_readonly("scratch_bytes", &total<&TransportMemory::scratch_bytes>)
      .def_property_readonly("resident_shard_bytes", &total<&TransportMemory::resident_shard_bytes>)
      .def_property_readonly("landing_bytes", &total<&TransportMemory::landing_bytes>);
}

}  // namespace

void bind_accounting(py::module_& m) {
  m.attr("ALIGN_BYTES") = kAlignBytes;
  m.def(
      "align_up", [](size_t num_bytes) { return align_up(num_bytes); }, py::arg("num_bytes"));
  py::enum_<WireFormat>(m, "WireFormat")
      .value("plain", WireFormat::plain)
      .value("int8", WireFormat::int8)
      .value("fp8", WireFormat::fp8)
      .value("bf16", WireFormat::bf16);
  // The gathered and the reduced bytes of a rank's segment in a wire format.
  m.def(
      "wire_gather_bytes",
      [](const Layout& layout, WireFormat format) { return WireLayout::of_weights(layout, format).segment_bytes(); },
      py::arg("layout"), py::arg("format"));
  m.def(
      "gathers_codes",
      [](const Layout& layout, WireFormat format) { return WireLayout::of_weights(layout, format).has_codes(); },
      py::arg("layout"), py::arg("format"));
  m.def(
      "wire_reduce_bytes",
      [](const Layout& layout, WireFormat format) {
        const size_t flags_bytes = layout.flagged_segment_bytes() - layout.reduce_segment_bytes();
        return WireLayout::of_gradients(layout, format, flags_bytes).segment_bytes();
      },
      py::arg("layout"), py::arg("format"));
  bind_planned_steps(m);
}

}  // namespace fsdp2x
