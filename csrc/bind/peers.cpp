// Names of collectives over the memory of peers in fsdp2x._C; no decisions.
#include "bind/peers.hpp"

#include "bind/own.hpp"
#include "engine/transport/device/peer_collectives.hpp"

namespace fsdp2x {

void bind_peers(py::module_& m) {
  // Its methods are what DeviceTransport takes as collectives.
  py::class_<PeerCollectives, std::shared_ptr<PeerCollectives>>(m, "PeerCollectives")
      .def(py::init([](int rank, std::vector<int> ranks, const py::function& share, double timeout_seconds,
                       bool with_twins) {
             return std::make_shared<PeerCollectives>(rank, std::move(ranks), own(share), timeout_seconds, with_twins);
           }),
           py::arg("rank"), py::arg("ranks"), py::arg("share"), py::arg("timeout_seconds"),
           py::arg("with_twins") = false)
      .def("allocate", &PeerCollectives::allocate, py::arg("num_bytes"))
      .def(
          "all_gather",
          [](PeerCollectives& self, const at::Tensor& output, const at::Tensor& source) {
            self.all_gather({output}, {source});
          },
          py::arg("output"), py::arg("source"))
      .def("all_gather_group", &PeerCollectives::all_gather, py::arg("outputs"), py::arg("sources"))
      .def("reduce_scatter", &PeerCollectives::reduce_scatter, py::arg("output"), py::arg("source"), py::arg("average"))
      .def("check", &PeerCollectives::check);
}

}  // namespace fsdp2x
