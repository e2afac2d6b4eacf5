// The hooks around a module's forward (pre-forward and post-forward) and the autograd nodes that they attach.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "core/schedule/schedule.hpp"
#include "engine/schedule/unit.hpp"

namespace fsdp2x {

namespace py = pybind11;

// One forward call of a unit under grad, from its pre-forward until its backward has run or its graph is freed.
class UnitCall {
 public:
  // `number`: see Schedule::number_call.
  UnitCall(std::shared_ptr<Unit> unit, std::optional<uint64_t> number);
  // Called when the gradients of all inputs of the call are known.
  void end();

 private:
  std::shared_ptr<Unit> unit_;
  std::shared_ptr<int> token_;
  std::optional<uint64_t> number_;
};

// The hooks of one unit. A unit of several modules gathers before the first of them and reshards after the last. Inputs
// and outputs of each module are cast, and each output starts the unit's backward.
class UnitHooks {
 public:
  // `modules`: the unit's modules, remembered by identity only. `lookups`: those of them that only look rows up, so
  // that their backward reads no parameter. Empty: the unit stays gathered until its backward ends. `lazy_init` is
  // called before the first forward and must call set_unit. `explain(exception)` is called on the root's hooks after
  // its forward raised and before it is abandoned. `is_running(module)`: whether this thread is inside an earlier call
  // of `module`. `backward_hooks`: weak references to the dicts of backward hooks that may read the unit's gradients.
  UnitHooks(const std::vector<py::object>& modules, const std::vector<py::object>& lookups, py::object lazy_init,
            py::object explain, py::object is_running, std::vector<py::object> backward_hooks);
  ~UnitHooks();
  UnitHooks(const UnitHooks&) = delete;
  UnitHooks& operator=(const UnitHooks&) = delete;

  // Sets substitutes for the autograd nodes inside torch.func's transforms, which only follow Python functions.
  // `mark_inputs(call, tensors)` returns tensors whose backward ends the UnitCall. `mark_output(unit, tensor)` returns
  // one whose backward begins that of the unit.
  void set_marks(py::object mark_inputs, py::object mark_output) {
    calls_.mark_inputs = std::move(mark_inputs);
    calls_.mark_output = std::move(mark_output);
  }
  // Adds to the constructor's `backward_hooks`.
  void add_backward_hooks(const std::vector<py::object>& more) {
    backward_hooks_.insert(backward_hooks_.end(), more.begin(), more.end());
  }
  void lazy_init() const { calls_.lazy_init(); }
  // Null: the next forward calls `lazy_init`.
  void set_unit(std::shared_ptr<Unit> unit);
  // Sets the hooks of all units of a root, in the order of its units. Called on the root's own hooks.
  void set_all(std::vector<std::weak_ptr<UnitHooks>> all) { all_ = std::move(all); }

  // For register_forward_pre_hook(with_kwargs=True): (args, kwargs), or None when nothing changed.
  py::object pre_forward(const py::object& module, py::object args, py::object kwargs);
  // For register_forward_hook(always_call=True): the new output, or None when nothing changed. Exceptions that do not
  // derive from `Exception` (KeyboardInterrupt) skip this hook. The next pre_forward of the root cleans up after them.
  py::object post_forward(const py::object& module, const py::object& args, const py::object& output);
  // Forgets which modules ran, after an exception.
  void forget_progress() { remaining_.clear(); }

 private:
  // Python functions.
  struct Calls {
    py::object lazy_init, explain, is_running, mark_inputs, mark_output;
  };
  // The exception that is being handled where a module is called, and its traceback, by identity.
  struct Handled {
    static Handled now();
    bool operator==(const Handled&) const = default;
    const void* exception = nullptr;
    const void* traceback = nullptr;
  };
  // Gives the module its unit, by lazy initialization if that is due.
  void use_unit();
  Schedule::Entry enter(const py::object& module);
  py::object cast_output(const py::object& output) const;
  void move_inputs(py::object& args, py::object& kwargs) const;
  void cast_inputs(py::object& args, py::object& kwargs) const;
  torch::autograd::variable_list inputs_with_gradients(const py::object& args, const py::object& kwargs) const;
  // Replaces them by `outputs`, in the same order.
  void replace_inputs(py::object& args, py::object& kwargs, const torch::autograd::variable_list& outputs) const;
  void attach_post_backward(py::object& args, py::object& kwargs);
  // Marks the inputs of a call that reads parameters, so that the unit is resharded after the last of these calls.
  void count_reads(const py::object& module, py::object& args, py::object& kwargs, bool begins_unit);
  bool reads(const py::object& module) const;
  void attach_pre_backward(const py::object& output, bool reads);
  // Inside a transform, a tensor may need a gradient although requires_grad is false.
  py::object mark_outputs(const py::object& output) const;
  void hook_leaf(PyObject* tensor);
  // Returns whether every module of the unit has run, or the one that was called past the root.
  bool is_last_call(const py::object& module);
  py::object complete_others(py::object output);
  void fail_forward();
  bool has_backward_hooks() const;
  // Returns whether the call that begins now is the outermost one. Parameters may have been replaced before it.
  bool begins_forward() const;
  uint64_t& python_calls() const;

  cpu::ProcessGuard guard_;
  std::shared_ptr<Unit> unit_;
  Calls calls_;
  std::vector<py::object> backward_hooks_;
  Handled handled_before_;   // in the running forward
  py::object leaf_hook_;     // the pre-backward hook on inputs and parameters that the unit returned unchanged
  uint64_t first_node_ = 0;  // number of the first autograd node after the inputs of the last forward under grad
  std::vector<PyObject*> modules_;
  std::vector<PyObject*> lookups_;
  // Held by each call that reads parameters until its backward has run. False: one of them does not announce it. Null:
  // no backward is left.
  std::shared_ptr<bool> reads_;
  std::vector<PyObject*> remaining_;  // modules of the unit that did not run yet in this forward
  std::vector<std::weak_ptr<UnitHooks>> all_;
};

}  // namespace fsdp2x
