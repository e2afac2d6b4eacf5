// Binds device transports and layers to fsdp2x._C, without decisions.
#include "bind/parts.hpp"

#include "engine/memory/device_kernels.hpp"
#include "engine/transport/device/device_transport.hpp"

namespace fsdp2x {
namespace py = pybind11;

void bind_device(py::module_& m) {
  // Whether fsdp2x was built with device kernels, and whether a device can run them.
  m.def("has_device_kernels", [] { return DeviceKernels().exist(); });
  m.def(
      "can_run_kernels", [](at::Device device) { return kernels_on(device) != nullptr; }, py::arg("device"));
  py::enum_<Lane>(m, "Lane")
      .value("compute", Lane::compute)
      .value("copy_in", Lane::copy_in)
      .value("copy_out", Lane::copy_out);
  py::class_<DeviceEvent>(m, "DeviceEvent");
  // Lanes and events for Python's own copies to and from the device.
  py::class_<DeviceLayer, std::shared_ptr<DeviceLayer>>(m, "DeviceLayer")
      .def_property_readonly("device", &DeviceLayer::device)
      .def("make_event", &DeviceLayer::make_event, py::arg("name"))
      .def("record", &DeviceLayer::record, py::arg("event"), py::arg("lane"))
      .def("wait", &DeviceLayer::wait, py::arg("lane"), py::arg("event"))
      .def("synchronize", &DeviceLayer::synchronize, py::arg("event"))
      .def(
          "transfer",
          [](DeviceLayer& self, Lane lane, const at::Tensor& target, const at::Tensor& source) {
            const LaneScope scope(self, lane);
            self.transfer(target, source);
          },
          py::arg("lane"), py::arg("target"), py::arg("source"));
  py::class_<TorchLayer, DeviceLayer, std::shared_ptr<TorchLayer>>(m, "TorchLayer")
      .def(py::init<at::Device>(), py::arg("device"));
  py::class_<DeviceTransport, Transport, std::shared_ptr<DeviceTransport>>(m, "DeviceTransport")
      .def(py::init([](const py::object& all_gather, const py::object& all_gather_group,
                       const py::object& reduce_scatter, const py::object& all_to_all, const py::object& allocate,
                       std::shared_ptr<DeviceLayer> layer, size_t pack_below_bytes, std::pair<size_t, size_t> pieces) {
             DeviceCollectives collectives{own_unless_none(all_gather), own_unless_none(all_gather_group),
                                           own_unless_none(reduce_scatter), own_unless_none(all_to_all),
                                           own_unless_none(allocate)};
             return std::make_shared<DeviceTransport>(std::move(collectives), std::move(layer), pack_below_bytes,
                                                      PieceSizes{pieces.first, pieces.second});
           }),
           py::arg("all_gather"), py::arg("all_gather_group"), py::arg("reduce_scatter"), py::arg("all_to_all"),
           py::arg("allocate"), py::arg("layer"), py::arg("pack_below_bytes"), py::arg("pieces"));
  m.attr("PACK_BELOW_BYTES") = kPackBelowBytes;
  m.attr("PACK_EVERYTHING") = kPackEverything;
  m.attr("PIECES") = std::pair(PieceSizes().whole_bytes, PieceSizes().piece_bytes);
  // For memory plans: a rank's part of packed gathers.
  m.def(
      "packed_segment_bytes",
      [](const Layout& layout, size_t pack_below_bytes, bool on_cpu) {
        return (on_cpu ? plan_gather_on_cpu : plan_gather)(layout, pack_below_bytes).segment_bytes;
      },
      py::arg("layout"), py::arg("pack_below_bytes"), py::arg("on_cpu") = false);
  // Likewise, for each parameter with a separate collective.
  m.def(
      "direct_chunk_bytes",
      [](const Layout& layout, size_t pack_below_bytes) {
        std::vector<size_t> chunks;
        for (const DirectGather& direct : plan_gather(layout, pack_below_bytes).direct)
          chunks.push_back(direct.chunk_bytes);
        return chunks;
      },
      py::arg("layout"), py::arg("pack_below_bytes"));
  py::class_<ReductionPlan>(m, "ReductionPlan")
      .def(py::init([](const Layout& layout, const std::vector<bool>& trains, std::pair<size_t, size_t> pieces) {
             return plan_reduction(layout, trains, {pieces.first, pieces.second});
           }),
           py::arg("layout"), py::arg("trains"), py::arg("pieces"))
      .def_readonly("segment_bytes", &ReductionPlan::segment_bytes)
      .def("buffer_bytes", &ReductionPlan::buffer_bytes, py::arg("in_pieces"));
}

}  // namespace fsdp2x
