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
         bool bf16_moments, const py::object& stochastic, uint64_t seed) {
        std::vector<AdamWGroup> groups;
        for (const auto& [params, lr, single, beta1, beta2, eps, decay, amsgrad, maximize] : tuples) {
          groups.push_back({own(params), lr, single, beta1, beta2, eps, decay, amsgrad, maximize});
        }
        return adamw_step(groups, state.ptr(), make_state.ptr(), {bf16_moments, own_unless_none(stochastic), seed});
      },
      py::arg("groups"), py::arg("state"), py::arg("make_state"), py::arg("bf16_moments"), py::arg("stochastic"),
      py::arg("seed"));
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
  m.def(
      "sum_gradient_squares",
      [](const py::list& params, const py::function& bucket_of) {
        GradientSums result = sum_gradient_squares(params.ptr(), bucket_of.ptr());
        return std::make_pair(std::move(result.sums), std::move(result.left_over));
      },
      py::arg("params"), py::arg("bucket_of"));
  m.def(
      "multiply_gradients",
      [](const py::list& params, double factor) { return multiply_gradients(params.ptr(), factor); }, py::arg("params"),
      py::arg("factor"));
}

}  // namespace fsdp2x
