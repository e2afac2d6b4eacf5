// Binds optimizer steps and gradient clipping to fsdp2x._C, without decisions.
#include "bind/parts.hpp"

#include "engine/memory/storage.hpp"
#include "engine/optim/clip.hpp"
#include "engine/optim/coded_moments.hpp"
#include "engine/optim/optimizer.hpp"
#include "engine/schedule/writable_shards.hpp"

namespace fsdp2x {
namespace {

// (params, lr, lr is float32, beta1, beta2, eps, 1 - lr * weight_decay, amsgrad, maximize)
using AdamWTuple = std::tuple<py::list, double, bool, double, double, double, double, bool, bool>;

std::vector<AdamWGroup> groups_of(const std::vector<AdamWTuple>& tuples) {
  const auto make = [](const py::list& params, const auto&... settings) {
    return AdamWGroup{own(params), settings...};
  };
  std::vector<AdamWGroup> groups;
  for (const AdamWTuple& tuple : tuples) groups.push_back(std::apply(make, tuple));
  return groups;
}

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<DeviceSteps>(m, "DeviceSteps")
      .def(py::init<const cuda::Kernels*>(), py::arg("on_host") = nullptr)
      .def_property_readonly("num_plans", &DeviceSteps::num_plans);
  m.def(
      "adamw_step",
      [](const std::vector<AdamWTuple>& tuples, const py::dict& state, const py::function& make_state,
         bool narrow_moments, const py::object& stochastic, uint64_t seed, std::optional<DeviceSteps*> on_device,
         const std::optional<at::Tensor>& grad_scale) {
        return adamw_step(groups_of(tuples), state.ptr(), make_state.ptr(),
                          {narrow_moments, own_unless_none(stochastic), seed}, on_device.value_or(nullptr),
                          grad_scale.value_or(at::Tensor()));
      },
      py::arg("groups"), py::arg("state"), py::arg("make_state"), py::arg("narrow_moments"), py::arg("stochastic"),
      py::arg("seed"), py::arg("on_device"), py::arg("grad_scale"));
  m.def("num_moment_blocks", &num_moment_blocks, py::arg("numel"));
  m.def("decode_moments", &decode_moments, py::arg("codes"), py::arg("scales"), py::arg("is_signed"));
  m.def("encode_moments", &encode_moments, py::arg("values"), py::arg("is_signed"));
  m.def("pooled_zeros", &pooled_zeros, py::arg("shapes"));
  py::class_<WritableShards>(m, "WritableShards")
      .def(py::init([](const py::object& param_groups) {
             return std::make_unique<WritableShards>(Gil::of_caller(), param_groups.ptr());
           }),
           py::arg("param_groups"))
      .def("close", &WritableShards::close);
  py::class_<DeviceClip>(m, "DeviceClip")
      .def(py::init<const cuda::Kernels*>(), py::arg("on_host") = nullptr)
      .def("serves", [](const DeviceClip& self, at::Device device) { return self.kernels().serve(device); })
      .def(
          "clip_numbers",
          [](const DeviceClip& self, const at::Tensor& square_sum, double max_norm, bool in_f64) {
            ClipNumbers numbers = self.clip_numbers(square_sum, max_norm, in_f64);
            return std::make_pair(std::move(numbers.norm), std::move(numbers.factor));
          },
          py::arg("square_sum"), py::arg("max_norm"), py::arg("in_f64"))
      .def_property_readonly("num_plans", &DeviceClip::num_plans);
  py::class_<LocalGradients>(m, "LocalGradients")
      .def(py::init([](const py::list& params, std::optional<DeviceClip*> on_device) {
             return std::make_unique<LocalGradients>(params.ptr(), on_device.value_or(nullptr));
           }),
           py::arg("params"), py::arg("on_device"), py::keep_alive<1, 3>())
      // Returns sums of squares on the host and (a tensor, or None) on the device, per bucket, and the indices of the
      // rest.
      .def(
          "sum_squares",
          [](LocalGradients& self, const py::function& bucket_of) {
            GradientSums sums = self.sum_squares(bucket_of.ptr());
            std::optional<at::Tensor> on_device;
            if (sums.on_device.defined()) on_device = std::move(sums.on_device);
            return std::make_tuple(std::move(sums.on_host), std::move(on_device), std::move(sums.left_over));
          },
          py::arg("bucket_of"))
      .def("multiply", &LocalGradients::multiply, py::arg("factor"))
      .def_property_readonly("device", &LocalGradients::device)
      .def_property_readonly("any_double", &LocalGradients::any_double);
}

}  // namespace fsdp2x
