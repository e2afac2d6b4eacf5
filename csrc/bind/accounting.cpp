// Who gets which transient memory, and how large it is: the planner counts by the engine's own rules.
#include "bind/accounting.hpp"

#include "core/layout.hpp"
#include "core/slots.hpp"
#include "engine/device_buffers.hpp"

namespace py = pybind11;

namespace fsdp2x {

void bind_accounting(py::module_& m) {
  m.attr("ALIGN_BYTES") = kAlignBytes;
  m.def("align_up", &align_up, py::arg("num_bytes"));
  m.def("size_class", &size_class, py::arg("num_bytes"));
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
