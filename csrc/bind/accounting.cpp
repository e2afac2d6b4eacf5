// Who gets which transient memory, and how large it is: the planner counts by the engine's own rules.
#include "bind/parts.hpp"

#include <optional>

#include "core/buffers.hpp"
#include "core/layout.hpp"
#include "core/reduction_queue.hpp"
#include "core/slots.hpp"
#include "core/wire_layout.hpp"

namespace py = pybind11;

namespace fsdp2x {

void bind_accounting(py::module_& m) {
  m.attr("ALIGN_BYTES") = kAlignBytes;
  m.def(
      "align_up", [](size_t num_bytes) { return align_up(num_bytes); }, py::arg("num_bytes"));
  py::enum_<WireFormat>(m, "WireFormat")
      .value("plain", WireFormat::plain)
      .value("int8", WireFormat::int8)
      .value("fp8", WireFormat::fp8)
      .value("bf16", WireFormat::bf16);
  // Of a rank's segment in a wire format, what is gathered and what is reduced.
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
  py::class_<MemoryTally>(m, "MemoryTally")
      .def(py::init([](std::optional<MemoryTally*> whole) { return MemoryTally(whole.value_or(nullptr)); }),
           py::arg("whole"), py::keep_alive<1, 2>())
      .def("take", &MemoryTally::take, py::arg("num_bytes"))
      .def("give_back", &MemoryTally::give_back, py::arg("num_bytes"))
      .def_property_readonly("peak_bytes", &MemoryTally::peak_bytes);
  py::class_<BufferLedger>(m, "BufferLedger")
      .def(py::init<bool, MemoryTally*>(), py::arg("keeps"), py::arg("tally"), py::keep_alive<1, 3>())
      .def(
          "acquire",
          [](BufferLedger& ledger, size_t num_bytes) {
            return ledger.acquire(num_bytes, [](int, size_t bytes) { return bytes; }).id;
          },
          py::arg("num_bytes"))
      .def(
          "release",
          [](BufferLedger& ledger, int buffer) { ledger.release(buffer, [&](int unkept) { ledger.close(unkept); }); },
          py::arg("buffer"))
      .def("bytes_of", &BufferLedger::bytes_of, py::arg("buffer"))
      .def_property_readonly("bytes", &BufferLedger::bytes)
      .def_property_readonly("standing_bytes", &BufferLedger::standing_bytes)
      .def_property_readonly("peak_bytes", &BufferLedger::peak_owned_bytes);
  py::class_<ReductionQueue>(m, "ReductionQueue")
      .def(py::init<>())
      .def("set_max_buffers", &ReductionQueue::set_max_buffers, py::arg("num"))
      .def("allowed_before", &ReductionQueue::allowed_before, py::arg("num_bytes"), py::arg("given_back"))
      .def("begin", &ReductionQueue::begin, py::arg("buffer"), py::arg("num_bytes"))
      .def("add_segment", &ReductionQueue::add_segment, py::arg("number"), py::arg("segment"))
      .def("pop",
           [](ReductionQueue& queue) {
             const ReductionQueue::Reduction oldest = queue.pop();
             return py::make_tuple(oldest.number, oldest.buffer, oldest.segments);
           })
      .def("__len__", &ReductionQueue::size)
      .def_property_readonly("allowed_beside", &ReductionQueue::allowed_beside)
      .def_property_readonly("max_buffers", &ReductionQueue::max_buffers);
  py::class_<SlotLedger>(m, "SlotLedger")
      .def(py::init<size_t>(), py::arg("page_bytes"))
      .def(
          "acquire", [](SlotLedger& ledger, size_t num_bytes) { return ledger.acquire(num_bytes, "").id; },
          py::arg("num_bytes"))
      .def("release", &SlotLedger::release, py::arg("slot"))
      .def(
          "capacity", [](const SlotLedger& ledger, int slot) { return ledger.slot(slot).bytes; }, py::arg("slot"))
      .def_property_readonly("arena_bytes", &SlotLedger::arena_bytes)
      .def_property_readonly("peak_bytes", &SlotLedger::peak_owned_bytes);
}

}  // namespace fsdp2x
