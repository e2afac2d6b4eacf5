// Binds the agreement of ranks over a process group.
#include "engine/transport/agreement.hpp"

#include <optional>

#include "bind/parts.hpp"
#include "engine/memory/storage.hpp"

namespace fsdp2x {

void bind_agreement(py::module_& m) {
  py::class_<Agreement, std::shared_ptr<Agreement>>(m, "Agreement")
      .def(py::init([](const py::object& ask, const py::object& leave) {
             return std::make_shared<Agreement>(own(ask), own(leave));
           }),
           py::arg("ask"), py::arg("leave"))
      // A collective of Python: an all-reduce of `bytes` of `dtype`, or without them another one.
      .def(
          "agree",
          [](Agreement& self, const std::string& kind, const std::string& what, size_t bytes,
             std::optional<at::ScalarType> dtype) {
            self.agree_on_other(Gil::of_caller(), kind, what, dtype ? Operation::all_reduce : Operation::other, bytes,
                                dtype ? engine_dtype(*dtype) : DType::byte);
          },
          py::arg("kind"), py::arg("what"), py::arg("bytes") = 0, py::arg("dtype") = std::nullopt)
      .def("count", &Agreement::count)
      .def("begin_call", &Agreement::begin_call)
      .def("leave_call", &Agreement::leave_call, py::arg("why"))
      .def("ask_next", &Agreement::ask_next)
      .def("restart", &Agreement::restart)
      .def_property("is_broken", &Agreement::is_broken, &Agreement::set_broken)
      .def_property_readonly("num_posted", &Agreement::num_posted)
      .def(
          "describe_posted",
          [](const Agreement& self, uint64_t number) { return self.describe_posted(Gil::of_caller(), number); },
          py::arg("number"));
}

}  // namespace fsdp2x
