// Names of optimizer steps and gradient clipping in fsdp2x._C; no decisions.
#include "bind/optim.hpp"

#include "bind/own.hpp"
#include "engine/optimizer.hpp"

namespace fsdp2x {
namespace {

// (params, lr, lr is float32, beta1, beta2, eps, 1 - lr * weight_decay, amsgrad, maximize)
using AdamWTuple = std::tuple<py::list, double, bool, double, double, double, double, bool, bool>;
// (params, lr, momentum, dampening, weight_decay, nesterov, maximize)
using SgdTuple = std::tuple<py::list, double, double, double, double, bool, bool>;

}  // namespace

void bind_optim(py::module_& m) {
  m.def(
      "adamw_step",
      [](const std::vector<AdamWTuple>& tuples, const py::dict& state, const py::function& make_state,
         bool bf16_moments, const py::object& stochastic, uint64_t seed, DeviceSteps* on_device) {
        std::vector<AdamWGroup> groups;
        for (const auto& [params, lr, single, beta1, beta2, eps, decay, amsgrad, maximize] : tuples) {
          groups.push_back({own(params), lr, single, beta1, beta2, eps, decay, amsgrad, maximize});
        }
        return adamw_step(groups, state.ptr(), make_state.ptr(), {bf16_moments, own_unless_none(stochastic), seed},
                          on_device);
      },
      py::arg("groups"), py::arg("state"), py::arg("make_state"), py::arg("bf16_moments"), py::arg("stochastic"),
      py::arg("seed"), py::arg("on_device"));
  py::class_<DeviceSteps>(m, "DeviceSteps")
      .def(py::init<bool>(), py::arg("with_twins") = false)
      .def_property_readonly("num_plans", &DeviceSteps::num_plans)
      .def_property_readonly("has_kernels", &DeviceSteps::has_kernels);
  m.def("pooled_zeros", &pooled_zeros, py::arg("shapes"));
  m.def(
      "sgd_step",
      [](const std::vector<SgdTuple>& tuples, const py::dict& state, const py::function& make_buffer) {
        std::vector<SgdGroup> groups;
        for (const auto& [params, lr, momentum, dampening, weight_decay, nesterov, maximize] : tuples) {
          groups.push_back({own(params), lr, momentum, dampening, weight_decay, nesterov, maximize});
        }
        return sgd_step(groups, state.ptr(), make_buffer.ptr());
      },
      py::arg("groups"), py::arg("state"), py::arg("make_buffer"));
  py::class_<LocalGradients>(m, "LocalGradients")
      .def(py::init([](const py::list& params) { return std::make_unique<LocalGradients>(params.ptr()); }),
           py::arg("params"))
      .def(
          "sum_squares",
          [](const LocalGradients& self, const py::function& bucket_of) {
            GradientSums result = self.sum_squares(bucket_of.ptr());
            return std::make_pair(std::move(result.sums), std::move(result.left_over));
          },
          py::arg("bucket_of"))
      .def("multiply", &LocalGradients::multiply, py::arg("factor"))
      .def_property_readonly("device", &LocalGradients::device)
      .def_property_readonly("any_double", &LocalGradients::any_double);
}

}  // namespace fsdp2x
