// A group: gather and free, gradients in, reduced rows out.
#include "engine/params/param_group.hpp"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.hpp"
#include "engine/memory/device_copy.hpp"
#include "engine/params/gradient_stream.hpp"
#include "engine/schedule/root.hpp"
#include "engine/schedule/unit.hpp"
#include "engine/torch/transforms.hpp"

namespace fsdp2x {

namespace {

void call(const PyRef& function) {
  if (!function) return;
  pybind11::gil_scoped_acquire gil;
  const PyRef result = PyRef::steal(PyObject_CallNoArgs(function.get()));
  if (!result) throw_python_error();
}

// For gradients beside the shards. Whether memory is pinned is asked of a driver, so only where it may be.
at::TensorOptions memory_like(const at::Tensor& pool, bool offloads) {
  return at::TensorOptions().device(pool.device()).pinned_memory(offloads && pool.is_pinned());
}

}  // namespace

ParamGroup::ParamGroup(Layout group_layout, at::Tensor shard_pool, std::vector<Param> group_params,
                       GroupCalls group_calls, int replicas, at::Device group_device, Offload group_offload)
    : layout(std::move(group_layout)),
      pool(std::move(shard_pool)),
      device(group_device),
      offload(group_offload),
      params(std::move(group_params)),
      calls(std::move(group_calls)),
      gradients(layout, params, memory_like(pool, offloads()), std::move(calls.make_gradient),
                std::move(calls.add_to_foreign)),
      replicas_(replicas) {
  scratch.filled.assign(params.size(), 0);
}

void ParamGroup::rename(std::string new_name) {
  name = std::move(new_name);
  if (post_forward) post_forward->rename(name + " (after forward)");
}

void throw_collective_error(const ParamGroup& group, const PyRef& explain, const std::string& operation) {
  if (!explain) throw_python_error();
  pybind11::error_already_set error;
  const std::string what = operation + " of unit '" + group.name + "'";
  const PyRef told = PyRef::steal(PyObject_CallFunction(explain.get(), "Os", error.value().ptr(), what.c_str()));
  if (told.get() == error.value().ptr()) {
    error.restore();
  } else if (told) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(told.get())), told.get());
  }
  throw_python_error();
}

const UnitOptions& ParamGroup::options() const { return unit->options; }

Root& ParamGroup::root() const { return *unit->root; }

// --- parameters ---

void ParamGroup::begin_gather() {
  const OutsideTransforms outside;
  ++root().counters.gathers;
  call(calls.gather_slowly);  // before the pool is read: it refreshes aliases
  gathered_from_ = holds_post_forward_ ? post_forward.get() : this;
  if (gathered_from_ == this) fetch_moved_shards();
  gathered_from_->transport->begin_gather(*gathered_from_);
}

// Shards whose storages other processes share now: optimizers write to them there, and gathers read the pool.
void ParamGroup::fetch_moved_shards() {
  if (!pool.is_cpu()) return;  // only memory of the host can be shared so
  auto* const begin = static_cast<std::byte*>(pool.data_ptr());
  for (size_t i = 0; i < params.size(); ++i) {
    const void* memory = params[i].shard_memory();
    const ParamPlace& place = layout.params()[i];
    std::byte* const in_pool = begin + place.shard_offset;
    if (memory == nullptr || memory == in_pool || place.shard_numel == 0) continue;
    std::memcpy(in_pool, memory, static_cast<size_t>(place.shard_numel) * dtype_bytes(place.shape.orig));
  }
}

void ParamGroup::check_registered() const {
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* const found = params[i].registered_instead_of(registered_while_sharded(i));
    if (found == nullptr) continue;
    throw Error("fsdp2x: parameter '" + params[i].fqn() + "' was replaced on its module: rank " +
                std::to_string(layout.rank()) + " found a " + Py_TYPE(found)->tp_name +
                " where the sharded parameter is expected. torch.func.functional_call and the like replace whole "
                "parameters: call them inside `with fsdp2x.unsharded(model):`. To change a parameter for good, write "
                "to it in place or use load_state_dict().");
  }
}

PyObject* ParamGroup::registered_while_sharded(size_t param) const {
  return holds_post_forward_ ? post_forward_params_[param].get() : params[param].sharded_object();
}

void ParamGroup::register_again() const {
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* const found = params[i].registered_instead_of(params[i].unsharded_object());
    if (found != nullptr && found == registered_while_sharded(i)) params[i].register_unsharded();
  }
}

void ParamGroup::finish_gather() {
  const OutsideTransforms outside;
  gathered_from_->transport->finish_gather(*gathered_from_);
  call(calls.finish_slowly);
  pybind11::gil_scoped_acquire gil;
  check_registered();
  for (size_t i = 0; i < params.size(); ++i) {
    params[i].fill(gathered_from_->gather.read + gathered_from_->layout.params()[i].slot_offset);
    params[i].register_unsharded();
  }
  root().counters.parameter_stores += params.size();
  is_filled_ = true;
  attach_accumulator_hooks();
}

void ParamGroup::free() {
  const OutsideTransforms outside;
  is_filled_ = false;
  {
    pybind11::gil_scoped_acquire gil;
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].empty();
      params[i].register_sharded();
    }
  }
  holds_post_forward_ = false;
  release_slot();
}

const Slot& ParamGroup::open_slot(SlotLedger& ledger) {
  gather.slot = gather.kept.id >= 0 ? ledger.reuse(gather.kept.id)
                                    : ledger.acquire(std::max<size_t>(layout.slot_bytes(), 1), name);
  return gather.slot;
}

bool ParamGroup::close_slot(SlotLedger& ledger) {
  const Slot slot = gather.slot;
  gather = GatherSlot();
  if (options().keep_unsharded_storage) {
    gather.kept = slot;
    return false;
  }
  ledger.release(slot.id);
  return true;
}

void ParamGroup::release_slot() {
  root().counters.parameter_stores += params.size();
  call(calls.free_slowly);
  gathered_from_->transport->release_gather(*gathered_from_);
}

void ParamGroup::set_post_forward(std::shared_ptr<ParamGroup> group, std::vector<PyRef> sharded) {
  post_forward = std::move(group);
  post_forward->unit = unit;
  rename(name);
  post_forward_params_ = std::move(sharded);
}

const CopyProgram& ParamGroup::rows_to_keep(const ParamGroup& source) {
  CopyProgram& program = rows_to_keep_[&source];
  if (!program.empty()) return program;
  // Whole parameters lie in both slots, not always at the same offsets.
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamPlace& place = post_forward->layout.params()[i];
    if (place.shard_numel == 0) continue;
    Copy copy = shard_to_whole(place.shape, place.rows, place.shard_offset, place.shape.compute,
                               source.layout.params()[i].slot_offset, place.shape.compute);
    std::swap(copy.src_offset, copy.dst_offset);
    std::swap(copy.src_stride, copy.dst_stride);
    program.copies.push_back(copy);
  }
  return program;
}

void ParamGroup::free_after_forward() {
  if (!post_forward) return free();
  const OutsideTransforms outside;
  is_filled_ = false;
  post_forward->transport->write_pool(*post_forward, rows_to_keep(*gathered_from_), gathered_from_->gather.read);
  {
    pybind11::gil_scoped_acquire gil;
    for (size_t i = 0; i < params.size(); ++i) {
      params[i].empty();
      params[i].register_object(post_forward_params_[i].get());
    }
  }
  holds_post_forward_ = true;
  release_slot();
}

void ParamGroup::drop_post_forward() {
  if (!std::exchange(holds_post_forward_, false)) return;
  pybind11::gil_scoped_acquire gil;
  for (const Param& param : params) param.register_sharded();
}

void ParamGroup::cancel_gather() {
  const OutsideTransforms outside;
  if (is_filled_) return free();  // another group of the unit failed
  call(calls.free_slowly);
  gathered_from_->transport->release_gather(*gathered_from_);
}

void ParamGroup::attach_accumulator_hooks() {
  const std::optional<c10::Stream> current = current_stream(device);
  for (size_t i = 0; i < params.size(); ++i) {
    Param& param = params[i];
    if (!param.unsharded().requires_grad()) continue;
    if (param.accumulator) {
      // It belongs to the stream it was made on. A model that has moved to another one gets a new one, unless a graph
      // that lives has this one, and with it our hook.
      if (!current || param.accumulator->input_metadata(0).stream() == *current) continue;
      if (param.accumulator.use_count() > 1) continue;
      param.accumulator = nullptr;
    }
    param.accumulator = torch::autograd::impl::grad_accumulator(param.unsharded());
    auto hook = [weak = unit->weak_from_this(), this, i](const torch::autograd::variable_list& outputs,
                                                         const torch::autograd::variable_list&) {
      if (const auto owner = weak.lock()) {
        if (owner->packs_late) {
          owner->root->begin_backward();
          return outputs;
        }
        const GradientStream scope(owner->backward_stream, params[i]);
        pack_gradient(i);
      }
      return outputs;
    };
    param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook)));
  }
}

// --- gradients ---

at::Tensor ParamGroup::plain(const at::Tensor& gradient, size_t param) const {
  pybind11::gil_scoped_acquire gil;
  const PyRef object = PyRef::steal(THPVariable_Wrap(gradient));
  const PyRef local = PyRef::steal(
      PyObject_CallFunctionObjArgs(calls.plain_gradient.get(), params[param].gradient_spec(), object.get(), nullptr));
  if (!local) throw_python_error();
  ++root().counters.python_calls;
  return THPVariable_Unpack(local.get());
}

void ParamGroup::pack_gradient(size_t i) {
  if (params[i].unsharded_object() == nullptr) return;
  const at::Tensor& parameter = params[i].unsharded();
  if (!parameter.grad().defined()) return;
  const OutsideTransforms outside;
  at::Tensor gradient = std::exchange(parameter.mutable_grad(), at::Tensor());
  root().begin_backward();
  if (gradient.layout() != at::kStrided) {
    throw Error("fsdp2x: the gradient of '" + params[i].fqn() +
                "' is sparse; only dense gradients can be sharded (use sparse=False in the embedding)");
  }
  if (gradient.unsafeGetTensorImpl()->is_python_dispatch()) gradient = plain(gradient, i);
  if (gradient.is_complex()) gradient = at::view_as_real(gradient.resolve_conj());
  // A gradient that comes late (a weight used outside its unit) must not change what peers read.
  if (scratch.posted) finish_reduce(/*flush=*/true);
  scratch.parts.add(root().backward_number(), /*is_first=*/!scratch.open);
  transport->pack(*this, i, gradient);
}

void ParamGroup::sweep_gradients() {
  for (size_t i = 0; i < params.size(); ++i) pack_gradient(i);
}

void ParamGroup::begin_reduce() {
  const OutsideTransforms outside;
  ++root().counters.reductions;
  scratch.parts.add(root().backward_number(), /*is_first=*/!scratch.open);
  transport->begin_reduce(*this);
}

bool ParamGroup::finish_reduce(bool flush) {
  const OutsideTransforms outside;
  const bool holds_earlier =
      scratch.posted && (scratch.parts.backward != root().backward_number() || scratch.parts.holds_earlier);
  try {
    return transport->finish_reduce(*this, flush);
  } catch (...) {
    // The user's hooks run when the rows have left the transport: what they leave undone is nowhere any more.
    if (holds_earlier) root().lose(name);
    throw;
  }
}

bool ParamGroup::reduces_unused() const {
  if (!options().reduce_unused_params) return false;
  for (size_t i = 0; i < params.size(); ++i) {
    if (layout.params()[i].shape.trainable && params[i].sharded().requires_grad()) return true;
  }
  return false;
}

bool ParamGroup::gathers_alone() const { return layout.world() == 1 || layout.gather_segment_bytes() == 0; }

DType ParamGroup::reduce_type() const {
  for (const ParamPlace& place : layout.params()) {
    if (place.shape.reduce != DType::byte) return place.shape.reduce;
  }
  return DType::f32;
}

bool ParamGroup::averages() const {
  // fp16 sums overflow early, so they are divided in two halves around the collective.
  if (options().force_sum_reduction || reduce_type() == DType::f16) return false;
  return divisor() == static_cast<double>(layout.world() * replicas_);
}

double ParamGroup::divisor() const {
  return options().divide_factor.value_or(static_cast<double>(layout.world() * replicas_));
}

double pre_divisor(const ParamGroup& group) {
  if (group.reduce_type() != DType::f16) return 1.0;
  const double factor = group.divisor();
  double before = 1.0;
  while (std::fmod(factor, before) == 0.0 && factor / before > before) before *= 2.0;
  return before;
}

void ParamGroup::take_segment(const at::Tensor& segment, const std::shared_ptr<const Layout>& plan, double divisor) {
  if (!has_replicas()) {
    attach_segment(segment, *plan, divisor);
    return;
  }
  const size_t bytes = plan->flagged_segment_bytes();
  const at::Tensor rows = typed(segment, reduce_type(), 0, bytes);
  if (partial_.defined() && partial_.nbytes() != bytes) {
    throw Error("fsdp2x: parameters of unit '" + name +
                "' were frozen or unfrozen while gradients wait for their all-reduce; change requires_grad after a "
                "backward with set_requires_all_reduce(True)");
  }
  partial_parts_.add(root().backward_number(), /*is_first=*/!partial_.defined());
  if (scratch.parts.holds_earlier) partial_parts_.holds_earlier = true;
  if (partial_.defined()) {
    typed(partial_, reduce_type(), 0, bytes).add_(rows);
  } else {
    partial_ = segment.narrow(0, 0, static_cast<int64_t>(bytes)).clone();
  }
  partial_plan_ = plan;
  partial_divisor_ = divisor;
}

void ParamGroup::all_reduce() {
  const OutsideTransforms outside;
  if (!partial_.defined()) {
    // No gradient here, but other replicas may have some: zeros, flags included.
    partial_plan_ = transport->segment_layout(*this);
    partial_ = at::zeros({static_cast<int64_t>(partial_plan_->flagged_segment_bytes())},
                         at::TensorOptions().dtype(at::kByte).device(device));
    partial_divisor_ = averages() ? 1.0 : divisor() / pre_divisor(*this);
  }
  const at::Tensor partial = std::exchange(partial_, at::Tensor());
  const Parts parts = std::exchange(partial_parts_, Parts());
  try {
    all_reduce(partial);
  } catch (...) {
    if (parts.backward != root().backward_number() || parts.holds_earlier) root().lose(name);
    throw;
  }
}

void ParamGroup::all_reduce(const at::Tensor& partial) {
  {
    pybind11::gil_scoped_acquire gil;
    const PyRef rows = PyRef::steal(THPVariable_Wrap(typed(partial, reduce_type(), 0, partial.nbytes())));
    const PyRef done = PyRef::steal(
        PyObject_CallFunctionObjArgs(calls.all_reduce.get(), rows.get(), averages() ? Py_True : Py_False, nullptr));
    if (!done) throw_collective_error(*this, calls.explain_all_reduce, "all-reduce");
    ++root().counters.python_calls;
  }
  attach_segment(partial, *partial_plan_, partial_divisor_);
}

void ParamGroup::attach_segment(const at::Tensor& segment, const Layout& plan, double divisor) {
  const DType type = reduce_type();
  const size_t flags_at = plan.reduce_segment_bytes();
  const at::Tensor flags = typed(segment, type, flags_at, params.size() * dtype_bytes(type))
                               .to(at::TensorOptions().dtype(at::kFloat).device(at::kCPU));
  pybind11::gil_scoped_acquire gil;
  if (calls.all_reduce_hook) {
    const PyRef rows = PyRef::steal(THPVariable_Wrap(typed(segment, type, 0, flags_at)));
    const PyRef done = PyRef::steal(PyObject_CallFunctionObjArgs(calls.all_reduce_hook.get(), rows.get(), nullptr));
    if (!done) throw_python_error();
  }
  std::vector<GradientTarget> targets(params.size());
  const auto wanted = [&](size_t i) { return flags.const_data_ptr<float>()[i] > 0.0F; };
  for (size_t i = 0; i < params.size(); ++i) {
    if (!wanted(i)) continue;
    const ParamPlace& place = plan.params()[i];
    targets[i] = gradients.prepare(i, root().blocks);
    scale_into(device, place.shape.orig, targets[i].data, type,
               static_cast<const std::byte*>(segment.const_data_ptr()) + place.reduce_segment_offset, place.shard_numel,
               divisor, targets[i].accumulate);
  }
  for (size_t i = 0; i < params.size(); ++i) {
    if (wanted(i)) attach(i, targets[i]);
  }
  gradients.release_if_unused(root().blocks);
}

void ParamGroup::attach(size_t param, const GradientTarget& target) {
  gradients.attach(param, target);
  const at::Tensor& sharded = params[param].sharded();
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded);
  if (!hook) return;
  try {
    (*hook)(sharded);
  } catch (python_error& error) {
    error.persist();  // out of the thread state: Python goes on
    root().keep_error_of_hook();
  } catch (...) {
    root().keep_error_of_hook();
  }
}

void ParamGroup::drop_partial() {
  partial_ = at::Tensor();
  partial_parts_ = Parts();
  transport->drop_partial(*this);
}

void ParamGroup::abandon_backward() {
  const OutsideTransforms outside;
  const uint64_t number = root().backward_number();
  const bool is_in_scratch = scratch.parts.backward == number;
  if (is_in_scratch && transport->abandon_reduce(*this) && scratch.parts.holds_earlier) root().lose(name);
  if (partial_parts_.backward == number) {
    if (partial_parts_.holds_earlier) root().lose(name);
    drop_partial();
  }
  scratch.reduced_this_backward = false;
  drop_unpacked();
}

void ParamGroup::drop_gradients() {
  const OutsideTransforms outside;
  transport->abandon_reduce(*this);
  drop_partial();
  scratch.reduced_this_backward = false;
  drop_unpacked();
}

void ParamGroup::drop_unpacked() {
  for (const Param& param : params) {
    if (param.unsharded_object() != nullptr) param.unsharded().mutable_grad() = at::Tensor();
  }
}

}  // namespace fsdp2x
