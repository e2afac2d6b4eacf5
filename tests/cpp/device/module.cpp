// The extension module fsdp2x._C_testing, which no wheel has: devices simulated on CPU memory. It takes the engine from
// fsdp2x._C, which must be imported first.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/recording_layer.hpp"
#include "device/reference_kernels.hpp"

namespace py = pybind11;

namespace {

std::vector<std::pair<uintptr_t, size_t>> ranges_of(const std::vector<fsdp2x::MemoryRange>& ranges) {
  std::vector<std::pair<uintptr_t, size_t>> result;
  for (const auto& range : ranges) result.emplace_back(reinterpret_cast<uintptr_t>(range.data), range.bytes);
  return result;
}

}  // namespace

PYBIND11_MODULE(_C_testing, m) {
  using fsdp2x::RecordingLayer;
  m.def("reference_kernels", &fsdp2x::cuda::reference_kernels, py::return_value_policy::reference);
  py::class_<RecordingLayer, fsdp2x::DeviceLayer, std::shared_ptr<RecordingLayer>>(m, "RecordingLayer")
      .def(py::init<bool>(), py::arg("with_kernels"))
      .def("clear", &RecordingLayer::clear)
      .def(
          "note_work",
          [](RecordingLayer& self, const std::string& operation, const std::vector<at::Tensor>& reads,
             const std::vector<at::Tensor>& writes,
             bool on_host) { self.note_work(operation, reads, writes, on_host); },
          py::arg("operation"), py::arg("reads"), py::arg("writes"), py::arg("on_host") = false)
      .def("use_stream", &RecordingLayer::use_stream, py::arg("number"))
      .def("wait_stream", &RecordingLayer::wait_stream, py::arg("number"))
      .def("begin_capture", &RecordingLayer::begin_capture)
      .def("end_capture", &RecordingLayer::end_capture)
      .def("delay", &RecordingLayer::delay, py::arg("seed"), py::arg("lane") = "", py::arg("event") = "")
      .def(
          "defer",
          [](RecordingLayer& self, const py::function& work) {
            // Late work may be dropped without the GIL.
            const auto drop = [](py::function* owned) {
              const py::gil_scoped_acquire gil;
              delete owned;
            };
            self.defer([owned = std::shared_ptr<py::function>(new py::function(work), drop)] {
              const py::gil_scoped_acquire gil;
              (*owned)();
            });
          },
          py::arg("work"))
      .def("finish", &RecordingLayer::finish)
      // Each entry has operation, lane, subject, and the (address, bytes) that it reads and writes.
      .def_property_readonly("entries", [](const RecordingLayer& layer) {
        py::list result;
        // Iterates over a copy: Python's collector may run here and destroy transports, whose end is recorded.
        for (const std::vector<RecordingLayer::Entry> entries = layer.entries(); const auto& entry : entries) {
          result.append(py::make_tuple(entry.operation, entry.lane, entry.subject, ranges_of(entry.reads),
                                       ranges_of(entry.writes)));
        }
        return result;
      });
}
