// Binds shared memory between the ranks of a host, and the handling of forked children.
#include "bind/parts.hpp"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/schedule/unit.hpp"
#include "shm/process_guard.hpp"
#include "shm/shm_group.hpp"
#include "shm/shm_handshake.hpp"

namespace fsdp2x {

namespace {

// Lets Ctrl-C end a wait. Only the main thread handles signals, so this does nothing on other threads.
void raise_on_signal() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw_python_error();
}

// Wraps Python's exchange of strings between ranks.
std::function<std::vector<std::string>(const std::string&)> exchange_by(const py::object& exchange) {
  // Shared, because a std::function must be copyable.
  const auto function = std::make_shared<PyRef>(own(exchange));
  return [function](const std::string& outcome) {
    const py::gil_scoped_acquire gil;
    const PyRef text =
        PyRef::steal(PyUnicode_DecodeUTF8(outcome.data(), static_cast<Py_ssize_t>(outcome.size()), "replace"));
    const PyRef outcomes =
        PyRef::steal(text ? PyObject_CallFunctionObjArgs(function->get(), text.get(), nullptr) : nullptr);
    if (!outcomes) throw_python_error();
    return py::reinterpret_borrow<py::object>(outcomes.get()).cast<std::vector<std::string>>();
  };
}

// `global_ranks`: the numbers of the group's ranks in messages.
cpu::ShmOptions shm_options(int rank, const std::vector<int>& global_ranks, const std::string& socket_name,
                            const py::bytes& token, double timeout_s, const py::object& exchange) {
  const int world = static_cast<int>(global_ranks.size());
  return {
      rank, world, socket_name, std::string(token), timeout_s, &raise_on_signal, global_ranks, exchange_by(exchange)};
}

}  // namespace

void bind_shared_memory(py::module_& m) {
  py::class_<cpu::ShmGroup, std::shared_ptr<cpu::ShmGroup>>(m, "ShmGroup");
  // Returns (group, "") or (None, why the ranks cannot share memory).
  m.def(
      "shm_group",
      [](int rank, const std::vector<int>& global_ranks, const std::string& socket_name, const py::bytes& token,
         double timeout_s, const py::object& exchange) {
        const cpu::ShmOptions options = shm_options(rank, global_ranks, socket_name, token, timeout_s, exchange);
        std::string reason;
        std::shared_ptr<cpu::ShmGroup> group;
        {
          const py::gil_scoped_release released;
          group = cpu::ShmGroup::create(options, reason);
        }
        return std::make_pair(group, reason);
      },
      py::arg("rank"), py::arg("global_ranks"), py::arg("socket_name"), py::arg("token"), py::arg("timeout_s"),
      py::arg("exchange"));
  // Calls use(descriptor) with a memory file of `num_bytes` that all ranks have, and closes the descriptor afterwards.
  // Returns "", or why that failed on some rank.
  m.def(
      "share_memory_file",
      [](int rank, const std::vector<int>& global_ranks, const std::string& socket_name, const py::bytes& token,
         const py::object& exchange, size_t num_bytes, const py::object& use) {
        const cpu::ShmOptions options =
            shm_options(rank, global_ranks, socket_name, token, /*timeout_s=*/0.0, exchange);
        const auto call_use = [&use](const cpu::Rendezvous& result) {
          const py::gil_scoped_acquire gil;
          const PyRef file = PyRef::steal(PyLong_FromLong(result.memory.get()));
          const PyRef done =
              PyRef::steal(file ? PyObject_CallFunctionObjArgs(use.ptr(), file.get(), nullptr) : nullptr);
          if (!done) throw_python_error();
        };
        std::string reason;
        const py::gil_scoped_release released;
        cpu::rendezvous(options, {num_bytes, num_bytes}, call_use, reason);
        return reason;
      },
      py::arg("rank"), py::arg("global_ranks"), py::arg("socket_name"), py::arg("token"), py::arg("exchange"),
      py::arg("num_bytes"), py::arg("use"));
  py::class_<cpu::ProcessGuard>(m, "ProcessGuard")
      .def(py::init<>())
      .def(
          "require", [](const cpu::ProcessGuard& guard, const std::string& what) { guard.require(what.c_str()); },
          py::arg("what"));
  // For os.register_at_fork.
  m.def("begin_fork", [] {
    for (const auto& group : Unit::live_groups(Gil::of_caller())) group->shards().begin_fork();
  });
  m.def("end_fork", [] {
    for (const auto& group : Unit::live_groups(Gil::of_caller())) group->shards().end_fork();
  });
  m.def("forbid_in_child", [] { Unit::forbid_all(Gil::of_caller()); });
}

}  // namespace fsdp2x
