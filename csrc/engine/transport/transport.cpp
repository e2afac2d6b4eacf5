// Messages and calls that transports share.
#include "engine/transport/transport.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "core/error.hpp"

namespace fsdp2x {

TransportStats& TransportStats::operator+=(const TransportStats& other) {
  gather_slots_owned += other.gather_slots_owned;
  gather_slot_bytes += other.gather_slot_bytes;
  peak_gather_bytes += other.peak_gather_bytes;
  scratch_slots_owned += other.scratch_slots_owned;
  scratch_bytes += other.scratch_bytes;
  resident_shard_bytes += other.resident_shard_bytes;
  wire_bytes += other.wire_bytes;
  num_allocations += other.num_allocations;
  owners.insert(owners.end(), other.owners.begin(), other.owners.end());
  return *this;
}

void throw_unfrozen(const ParamGroup& group, size_t param) {
  throw Error("fsdp2x: parameter '" + group.params()[param].fqn() +
              "' was unfrozen while its unit holds unreduced gradients. Change requires_grad between optimizer steps.");
}

void throw_frozen_while_partial(const ParamGroup& group) {
  throw Error("fsdp2x: parameters of unit '" + group.name() +
              "' were frozen or unfrozen while gradients wait for their all-reduce. Change requires_grad after a "
              "backward with set_requires_all_reduce(True).");
}

void throw_collective_error(const Gil& /*gil*/, const ParamGroup& group, const PyRef& explain,
                            const std::string& operation) {
  if (!explain) throw_python_error();
  pybind11::error_already_set error;
  const std::string what = operation + " of unit '" + group.name() + "'";
  const PyRef explained = PyRef::steal(PyObject_CallFunction(explain.get(), "Os", error.value().ptr(), what.c_str()));
  if (explained.get() == error.value().ptr()) {
    error.restore();
  } else if (explained) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(explained.get())), explained.get());
  }
  throw_python_error();
}

PyRef call_collective(const Gil& gil, ParamGroup& group, const PyRef& collective, PyObject* output, PyObject* input,
                      const char* operation, PyObject* option) {
  PyRef work = PyRef::steal(PyObject_CallFunctionObjArgs(collective.get(), output, input, option, nullptr));
  if (!work) throw_collective_error(gil, group, group.calls().explain, operation);
  ++group.counters().python_calls;
  return work;
}

PyRef call_collective(const Gil& gil, ParamGroup& group, const PyRef& collective, const at::Tensor& output,
                      const at::Tensor& input, const char* operation, PyObject* option) {
  const PyRef py_output = PyRef::steal(THPVariable_Wrap(output));
  const PyRef py_input = PyRef::steal(THPVariable_Wrap(input));
  return call_collective(gil, group, collective, py_output.get(), py_input.get(), operation, option);
}

void call_all_reduce(ParamGroup& group, const at::Tensor& rows) {
  const pybind11::gil_scoped_acquire gil;
  const GroupCalls& calls = group.calls();
  const PyRef tensor = PyRef::steal(THPVariable_Wrap(rows));
  const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(calls.all_reduce.get(), tensor.get(),
                                                               group.averages() ? Py_True : Py_False, nullptr));
  if (!done) throw_collective_error(gil, group, calls.explain_all_reduce, "all-reduce");
  ++group.counters().python_calls;
}

}  // namespace fsdp2x
