// The hooks that run around a module's forward.
#include "engine/schedule/hooks.hpp"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>

#include "core/error.hpp"
#include "engine/schedule/root.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/profile_range.hpp"
#include "engine/torch/torch_compat.hpp"
#include "engine/torch/transforms.hpp"
#include "engine/torch/walk.hpp"

namespace fsdp2x {

namespace {

[[noreturn]] void refuse_compiled_autograd() {
  throw Error(
      "fsdp2x does not support compiled autograd: its hooks move memory that a traced graph cannot see. Compile the "
      "forward of blocks with torch.compile, and set torch._dynamo.config.compiled_autograd to False.");
}

// Sits between the inputs of a unit and everything before them. It runs when the gradients of all those inputs are
// known, that is, when the unit's own backward is done.
struct PostBackwardNode final : public compat::Node {
  PostBackwardNode(const std::shared_ptr<Unit>& unit, std::optional<uint64_t> number, torch::autograd::edge_list edges)
      : Node(std::move(edges)), call(unit, number) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    call.end();
    return std::move(grads);
  }

  std::string name() const override { return "fsdp2x::PostBackward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  UnitCall call;
};

// Sits between the inputs of a module that reads parameters and everything before them. With the last such node of a
// unit, the rest of its backward reads no parameter.
struct EndOfReadsNode final : public compat::Node {
  EndOfReadsNode(std::shared_ptr<Unit> read_unit, std::shared_ptr<bool> read, torch::autograd::edge_list edges)
      : Node(std::move(edges)), unit(std::move(read_unit)), is_known(std::move(read)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    // A second backward of a retained graph finds no count. Then the unit stays until its end.
    const std::shared_ptr<bool> last = std::exchange(is_known, nullptr);
    if (last && last.use_count() <= 2 && *last) unit->root->schedule().end_reads(*unit);
    return std::move(grads);
  }

  std::string name() const override { return "fsdp2x::EndOfReads"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  std::shared_ptr<Unit> unit;
  std::shared_ptr<bool> is_known;  // see UnitHooks::reads_
};

// Hooks an output of a unit and runs before the first node of the unit's backward. `reads`: see Schedule::pre_backward.
struct PreBackwardHook final : public torch::autograd::FunctionPreHook {
  PreBackwardHook(std::shared_ptr<Unit> hook_unit, bool hook_reads) : unit(std::move(hook_unit)), reads(hook_reads) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    unit->root->pre_backward(*unit, reads);
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  std::shared_ptr<Unit> unit;
  bool reads;
};

TensorMap to_dtype(at::ScalarType dtype) {
  return [dtype](PyObject* object) -> py::object {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.is_floating_point() || tensor.scalar_type() == dtype) return {};
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor.to(dtype)));
  };
}

struct EmptyNode final : public compat::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

// Runs an empty backward to drain this thread's queue. After a backward that raised, the rest of its nodes stay there
// until the thread's next backward, and with them the units and the files of their transports.
void run_empty_backward() noexcept {
  if (inside_backward()) return;
  try {
    const OutsideTransforms outside;
    const at::Tensor nothing = at::zeros({});
    const auto node = compat::make_node<EmptyNode>();
    node->add_input_metadata(nothing);
    const ReleaseGil released;
    torch::autograd::Engine::get_default_engine().execute({torch::autograd::Edge(node, 0)}, {nothing},
                                                          /*keep_graph=*/false, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  } catch (const std::exception&) {
    // Then the thread's next backward drains the queue.
  }
}

// Returns text such as "KeyError: 'x'", not longer than peers need.
std::string text_of(const py::object& error) {
  constexpr size_t kMaxBytes = 400;
  std::string text = Py_TYPE(error.ptr())->tp_name;
  const auto message = py::reinterpret_steal<py::object>(PyObject_Str(error.ptr()));
  Py_ssize_t bytes = 0;
  const char* const data = message ? PyUnicode_AsUTF8AndSize(message.ptr(), &bytes) : nullptr;
  if (data != nullptr) {
    auto num = std::min(static_cast<size_t>(bytes), kMaxBytes);
    while (num > 0 && (static_cast<unsigned char>(data[num]) & 0xC0) == 0x80) --num;  // inside a character
    text += ": " + std::string(data, num);
  } else {
    PyErr_Clear();
  }
  return text;
}

}  // namespace

UnitCall::UnitCall(std::shared_ptr<Unit> unit, std::optional<uint64_t> number)
    : unit_(std::move(unit)), token_(unit_->take_call_token()), number_(number) {}

void UnitCall::end() {
  token_.reset();
  unit_->root->schedule().post_backward(*unit_, number_);
}

UnitHooks::UnitHooks(const std::vector<py::object>& modules, const std::vector<py::object>& lookups,
                     py::object lazy_init, py::object explain, py::object is_running,
                     std::vector<py::object> backward_hooks)
    : calls_{std::move(lazy_init), std::move(explain), std::move(is_running), {}, {}},
      backward_hooks_(std::move(backward_hooks)) {
  for (const py::object& module : modules) modules_.push_back(module.ptr());
  for (const py::object& module : lookups) lookups_.push_back(module.ptr());
}

UnitHooks::~UnitHooks() {
  if (!unit_ || !unit_->root || !unit_->root->schedule().backward_has_raised()) return;
  unit_->root->schedule().reductions().forget_pending();
  run_empty_backward();
}

UnitHooks::Handled UnitHooks::Handled::now() {
  const py::object exception = py::reinterpret_steal<py::object>(PyErr_GetHandledException());
  if (!exception || exception.is_none()) return {};
  // The handler of an exception holds the exception and its traceback. An exception that is raised and caught again has
  // a longer traceback.
  return {exception.ptr(), py::reinterpret_steal<py::object>(PyException_GetTraceback(exception.ptr())).ptr()};
}

py::object UnitHooks::pre_forward(const py::object& module, py::object args, py::object kwargs) {
  guard_.require("run a sharded model");
  use_unit();
  Unit& unit = *unit_;
  Schedule& schedule = unit.root->schedule();
  const ProfileRange range(unit.ranges.pre_forward);
  handled_before_ = Handled::now();
  const PyObject* const old_args = args.ptr();
  const PyObject* const old_kwargs = kwargs.ptr();

  const Schedule::Entry entry = enter(module);
  if (entry.begins_root && !unit.device.is_cpu()) move_inputs(args, kwargs);
  cast_inputs(args, kwargs);
  schedule.gather_for_forward(unit, entry);
  if (entry.begins_unit && at::GradMode::is_enabled()) {
    schedule.await_backward(unit);
    unit.packs_late = has_backward_hooks();
    if (reads_ && reads_.use_count() == 1 && !unit.has_outstanding_calls()) reads_.reset();
    attach_post_backward(args, kwargs);
    first_node_ = at::sequence_number::peek();
  }
  if (!lookups_.empty() && !entry.is_recomputed && at::GradMode::is_enabled()) {
    count_reads(module, args, kwargs, entry.begins_unit);
  }
  if (args.ptr() == old_args && kwargs.ptr() == old_kwargs) return py::none();
  return py::make_tuple(std::move(args), std::move(kwargs));
}

void UnitHooks::use_unit() {
  if (unit_) unit_->root->schedule().settle_raised_backward();
  if (!unit_ || (begins_forward() && unit_->root->has_replaced_shards(Gil::of_caller()))) {
    const OutsideTransforms outside;
    calls_.lazy_init();
  }
  if (!unit_) throw Error("fsdp2x: lazy initialization left a module without its unit");
}

Schedule::Entry UnitHooks::enter(const py::object& module) {
  Root& root = *unit_->root;
  Schedule& schedule = root.schedule();
  // Exceptions that do not derive from `Exception` leave a forward without a call of post_forward.
  const bool was_interrupted = unit_->phase() != Phase::backward && unit_->num_running() > 0 &&
                               schedule.is_forward_root(unit_.get()) && root.is_forward_thread() &&
                               !calls_.is_running(module).cast<bool>();
  if (was_interrupted) root.leave_pass("left its forward, which was interrupted");
  if (was_interrupted || !schedule.in_forward()) root.note_thread();
  const Schedule::Entry entry = schedule.enter(*unit_, at::GradMode::is_enabled(), was_interrupted);
  if (!entry.is_recomputed && modules_.size() > 1 && remaining_.empty()) remaining_ = modules_;
  return entry;
}

py::object UnitHooks::post_forward(const py::object& module, const py::object&, const py::object& output) {
  if (!unit_ || !unit_->root) return py::none();  // lazy init raised
  if (!guard_.is_here()) return py::none();       // the running forward is the parent's
  Unit& unit = *unit_;
  Schedule& schedule = unit.root->schedule();
  schedule.leave(unit);
  if (output.is_none()) {
    // always_call hooks also run, with None, while the exception of a failed forward is being handled. Another
    // exception may have been handled since before this forward.
    const Handled handled = Handled::now();
    if (handled.exception != nullptr && handled != handled_before_) {
      fail_forward();
      return py::none();
    }
  }
  const ProfileRange range(unit.ranges.post_forward);
  py::object result = output;
  if (unit.phase() != Phase::backward) {
    attach_pre_backward(output, reads(module));
    result = mark_outputs(output);
    if (is_last_call(module)) {
      schedule.finish_forward(unit, at::GradMode::is_enabled());
      if (schedule.is_forward_root(&unit)) {
        result = complete_others(result);
        schedule.end_forward();
      }
    }
  }
  result = cast_output(result);
  return result.ptr() == output.ptr() ? py::none() : result;
}

bool UnitHooks::is_last_call(const py::object& module) {
  if (modules_.size() == 1) return true;
  const size_t num_before = remaining_.size();
  std::erase(remaining_, module.ptr());
  if (remaining_.size() < num_before && remaining_.empty()) return true;
  // A member was called past the root, so no other call ends this forward.
  if (!unit_->root->schedule().is_forward_root(unit_.get()) || unit_->num_running() > 0) return false;
  remaining_.clear();
  return true;
}

py::object UnitHooks::complete_others(py::object output) {
  for (auto it = all_.rbegin(); it != all_.rend(); ++it) {
    const auto hooks = it->lock();
    if (!hooks || hooks.get() == this || hooks->remaining_.empty()) continue;
    hooks->remaining_.clear();
    hooks->unit_->root->schedule().finish_forward(*hooks->unit_, at::GradMode::is_enabled());
    output = hooks->cast_output(output);
  }
  return output;
}

void UnitHooks::fail_forward() {
  remaining_.clear();
  Schedule& schedule = unit_->root->schedule();
  const bool is_root = schedule.is_forward_root(unit_.get());
  if (inside_backward()) {
    if (is_root) schedule.leave_recomputation();
    return;
  }
  if (!is_root) return schedule.fail_forward(*unit_);
  const auto error = py::reinterpret_steal<py::object>(PyErr_GetHandledException());
  calls_.explain(error);
  for (const auto& weak : all_) {
    if (const auto hooks = weak.lock()) hooks->forget_progress();
  }
  unit_->root->fail_forward("left its forward, which raised " + text_of(error));
}

void UnitHooks::set_unit(std::shared_ptr<Unit> unit) {
  if (unit_ != unit) leaf_hook_ = py::object();  // it refers to the unit before
  unit_ = std::move(unit);
}

bool UnitHooks::begins_forward() const {
  const Schedule& schedule = unit_->root->schedule();
  return unit_->phase() == Phase::idle && !schedule.in_forward() && !schedule.in_backward();
}

uint64_t& UnitHooks::python_calls() const { return unit_->root->counters().python_calls; }

void UnitHooks::move_inputs(py::object& args, py::object& kwargs) const {
  static const std::string name = "FSDP::inputs_to_device";
  const ProfileRange range(name);
  const TensorMap move = [device = unit_->device](PyObject* object) -> py::object {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.device() == device) return {};
    return py::reinterpret_steal<py::object>(
        THPVariable_Wrap(tensor.to(device, tensor.scalar_type(), /*non_blocking=*/true)));
  };
  args = map_tensors(args.ptr(), move, python_calls());
  kwargs = map_tensors(kwargs.ptr(), move, python_calls());
}

void UnitHooks::cast_inputs(py::object& args, py::object& kwargs) const {
  if (!unit_->options.cast_forward_inputs || !unit_->options.param_dtype) return;
  static const std::string name = "FSDP::cast_forward_inputs";
  const ProfileRange range(name);
  const TensorMap cast = to_dtype(*unit_->options.param_dtype);
  args = map_tensors(args.ptr(), cast, python_calls());
  kwargs = map_tensors(kwargs.ptr(), cast, python_calls());
}

py::object UnitHooks::cast_output(const py::object& output) const {
  if (!unit_->options.output_dtype) return output;
  static const std::string name = "FSDP::cast_forward_outputs";
  const ProfileRange range(name);
  return map_tensors(output.ptr(), to_dtype(*unit_->options.output_dtype), python_calls());
}

torch::autograd::variable_list UnitHooks::inputs_with_gradients(const py::object& args,
                                                                const py::object& kwargs) const {
  torch::autograd::variable_list inputs;
  const auto collect = [&inputs](PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.requires_grad()) inputs.push_back(tensor);
  };
  for_each_tensor(args.ptr(), collect, python_calls());
  for_each_tensor(kwargs.ptr(), collect, python_calls());
  return inputs;
}

void UnitHooks::replace_inputs(py::object& args, py::object& kwargs,
                               const torch::autograd::variable_list& outputs) const {
  size_t next = 0;
  const TensorMap replace = [&outputs, &next](PyObject* object) -> py::object {
    if (!THPVariable_Unpack(object).requires_grad()) return {};
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(outputs.at(next++)));
  };
  args = map_tensors(args.ptr(), replace, python_calls());
  kwargs = map_tensors(kwargs.ptr(), replace, python_calls());
}

void UnitHooks::count_reads(const py::object& module, py::object& args, py::object& kwargs, bool begins_unit) {
  if (!reads_) reads_ = std::make_shared<bool>(true);
  if (!reads(module)) return;
  const torch::autograd::variable_list inputs = inputs_with_gradients(args, kwargs);
  if (begins_unit || inputs.empty() || unit_->packs_late || inside_transforms()) {
    *reads_ = false;  // nothing announces the end of this call
    return;
  }
  const auto node = compat::make_node<EndOfReadsNode>(unit_, reads_, torch::autograd::collect_next_edges(inputs));
  replace_inputs(args, kwargs, compat::pass_through(inputs, node));
}

bool UnitHooks::reads(const py::object& module) const {
  return std::find(lookups_.begin(), lookups_.end(), module.ptr()) == lookups_.end();
}

void UnitHooks::attach_post_backward(py::object& args, py::object& kwargs) {
  const torch::autograd::variable_list inputs = inputs_with_gradients(args, kwargs);
  // Number the call also without such inputs: ranks may train different parameters, and the numbers must mean the same
  // place.
  const std::optional<uint64_t> number = unit_->root->schedule().number_call();
  if (inputs.empty()) return;
  torch::autograd::variable_list outputs;
  if (inside_transforms()) {
    outputs = calls_.mark_inputs(UnitCall(unit_, number), inputs).cast<torch::autograd::variable_list>();
  } else {
    const auto node = compat::make_node<PostBackwardNode>(unit_, number, torch::autograd::collect_next_edges(inputs));
    outputs = compat::pass_through(inputs, node);
  }
  replace_inputs(args, kwargs, outputs);
}

py::object UnitHooks::mark_outputs(const py::object& output) const {
  if (!at::GradMode::is_enabled() || !inside_transforms()) return output;
  const TensorMap mark = [this](PyObject* object) -> py::object {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (tensor.requires_grad() || !(tensor.is_floating_point() || tensor.is_complex())) return {};
    return calls_.mark_output(unit_, py::handle(object));
  };
  return map_tensors(output.ptr(), mark, python_calls());
}

bool UnitHooks::has_backward_hooks() const {
  return std::any_of(backward_hooks_.begin(), backward_hooks_.end(), [](const py::object& weak) {
    PyObject* const hooks = PyWeakref_GetObject(weak.ptr());  // borrowed; None when its module is gone
    return hooks != Py_None && PyDict_Size(hooks) > 0;
  });
}

// A leaf has room for one C++ hook, or for the Python hooks that users register. This hook is a Python one, added once
// per leaf since a parameter outlives its forward. It must not own the unit, which owns the parameter.
void UnitHooks::hook_leaf(PyObject* tensor) {
  if (!leaf_hook_) {
    leaf_hook_ = py::cpp_function([weak = std::weak_ptr<Unit>(unit_)](const py::object&) {
      if (const auto unit = weak.lock()) unit->root->pre_backward(*unit, /*reads=*/true);
    });
  }
  const py::handle leaf(tensor);
  ++python_calls();
  if (const py::object known = leaf.attr("_backward_hooks"); !known.is_none()) {
    for (const py::handle hook : known.attr("values")()) {
      if (hook.is(leaf_hook_)) return;
    }
  }
  leaf.attr("register_hook")(leaf_hook_);
}

void UnitHooks::attach_pre_backward(const py::object& output, bool reads) {
  if (!at::GradMode::is_enabled()) return;
  const auto attach = [this, reads](PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.requires_grad()) return;
    if (const auto& node = tensor.grad_fn()) {
      node->add_tensor_pre_hook(std::make_unique<PreBackwardHook>(unit_, reads));
    } else {
      hook_leaf(object);
    }
    if (!tensor.is_view()) return;
    // An in-place operation on a view replaces its node and keeps that of its base.
    const auto& base = tensor._base().grad_fn();
    if (base && base != tensor.grad_fn() && base->sequence_nr() >= first_node_) {
      base->add_tensor_pre_hook(std::make_unique<PreBackwardHook>(unit_, reads));
    }
  };
  for_each_tensor(output.ptr(), attach, python_calls());
}

}  // namespace fsdp2x
