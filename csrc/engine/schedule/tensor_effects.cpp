// Executes effects on tensors.
#include "engine/schedule/tensor_effects.hpp"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

#include "core/error.hpp"
#include "engine/schedule/root.hpp"
#include "engine/torch/profile_range.hpp"
#include "engine/torch/transforms.hpp"

namespace fsdp2x {

namespace {

Unit& of(ScheduledUnit& unit) { return static_cast<Unit&>(unit); }
const Unit& of(const ScheduledUnit& unit) { return static_cast<const Unit&>(unit); }
ParamGroup& of(ScheduledGroup& group) { return static_cast<ParamGroup&>(group); }
const ParamGroup& of(const ScheduledGroup& group) { return static_cast<const ParamGroup&>(group); }

const std::string& name_of(const RangeNames& ranges, Section section) {
  switch (section) {
    case Section::all_gather:
      return ranges.all_gather;
    case Section::all_gather_copy_out:
      return ranges.all_gather_copy_out;
    case Section::pre_backward:
      return ranges.pre_backward;
    case Section::forward_prefetch:
      return ranges.forward_prefetch;
    case Section::backward_prefetch:
      return ranges.backward_prefetch;
    case Section::post_backward_reshard:
      return ranges.post_backward_reshard;
    case Section::post_backward_reduce:
      break;
  }
  return ranges.post_backward_reduce;
}

struct ProfiledSection final : OpenSection {
  explicit ProfiledSection(const std::string& name) : range(name) {}
  ProfileRange range;
};

template <class T>
void add_once(std::vector<T>& list, const T& item) {
  if (std::find(list.begin(), list.end(), item) == list.end()) list.push_back(item);
}

}  // namespace

Backward::~Backward() {
  const auto root = root_.lock();
  if (root && root->schedule().backward_has_raised()) {
    root->leave_pass("left its backward, which raised: its own output says why");
  }
}

void TensorEffects::add_transport(const std::shared_ptr<Transport>& transport) {
  add_once(transports_, transport);
  if (const auto shared = transport->shared_group()) add_once(shared_groups_, shared);
}

void TensorEffects::set_facts(ParamGroup& group, bool may_overlap) {
  const Transport& transport = group.transport();
  group.set_facts({.num_params = group.params().size(),
                   .all_reduces_later = group.has_replicas() && !transport.has_streams(),
                   .downloads = group.offloads(),
                   .may_overlap = may_overlap,
                   .transport = &transport,
                   .max_downloads = transport.max_reduce_buffers()});
}

void TensorEffects::add_shared_group(const std::shared_ptr<cpu::ShmGroup>& group) { add_once(shared_groups_, group); }

void TensorEffects::add_agreement(const std::shared_ptr<Agreement>& agreement) { add_once(agreements_, agreement); }

void TensorEffects::release_unused_gradients(const ScheduledUnits& units) {
  const pybind11::gil_scoped_acquire gil;
  for (const auto& unit : units) {
    for (const auto& group : of(*unit).groups) group->gradients().release_if_unused(gil);
  }
}

// --- questions ---

bool TensorEffects::inside_backward() const { return fsdp2x::inside_backward(); }

bool TensorEffects::forward_runs() const {
  const pybind11::gil_scoped_acquire gil;
  return call(gil, root_.settings().forward_runs.get()).get() == Py_True;
}

bool TensorEffects::has_outstanding_calls(const ScheduledUnit& unit) const { return of(unit).has_outstanding_calls(); }

bool TensorEffects::has_gradient(ScheduledGroup& group, size_t param) const {
  return of(group).has_unpacked_gradient(param);
}

bool TensorEffects::expects_gradients(const ScheduledGroup& group) const {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto& params = of(group).params();
  return std::any_of(params.begin(), params.end(), [nodes](const Param& param) {
    return param.accumulator && nodes->contains(param.accumulator.get());
  });
}

bool TensorEffects::is_collective(const ScheduledGroup& group) const {
  // Over shared memory, a rank sees what the others have posted.
  return of(group).layout().world() > 1 && !of(group).transport().shared_group() && of(group).has_trainable();
}

bool TensorEffects::needs_empty_reduction(const ScheduledGroup& group) const {
  return of(group).transport().needs_empty_reduction(of(group));
}

bool TensorEffects::needs_room(const ScheduledGroup& group, std::optional<size_t> param) {
  return of(group).transport().needs_room(of(group), param);
}

void TensorEffects::check_process(const ScheduledUnit& unit, const char* action) const {
  of(unit).check_process(action);
}

// --- parameters ---

std::optional<std::string> TensorEffects::take_lost(ScheduledUnit& unit) {
  const Param* const lost = of(unit).take_lost();
  return lost == nullptr ? std::nullopt : std::optional(lost->fqn());
}

bool TensorEffects::follow_gathered(ScheduledUnit& unit) {
  bool is_whole = true;
  for (const auto& group : of(unit).groups) {
    group->register_again(Gil::of_caller());
    is_whole = group->follow_gathered() && is_whole;
  }
  return is_whole;
}

void TensorEffects::begin_gather(ScheduledGroup& group, ShardsNow shards) {
  const OutsideTransforms outside;
  ParamGroup& source = of(group).begin_gather();
  source.transport().begin_gather(source, shards != ShardsNow::may_change);
  if (shards != ShardsNow::are_watched) return;
  const pybind11::gil_scoped_acquire gil;  // a recomputing backward comes here without it
  of(group).note_shards(gil);
}

bool TensorEffects::were_shards_written(const ScheduledUnit& unit) const {
  const pybind11::gil_scoped_acquire gil;
  const auto& groups = of(unit).groups;
  return std::ranges::any_of(groups, [&gil](const auto& group) { return group->were_shards_written(gil); });
}

void TensorEffects::finish_gather(ScheduledUnit& unit, ScheduledGroup& group) {
  const OutsideTransforms outside;
  ParamGroup& source = of(group).gathered_from();
  source.transport().finish_gather(source);
  of(group).fill();
  listen(unit, of(group));
}

void TensorEffects::listen(ScheduledUnit& unit, ParamGroup& group) {
  const std::optional<c10::Stream> current = current_stream(group.device());
  for (size_t i = 0; i < group.params().size(); ++i) {
    Param& param = group.params()[i];
    if (!param.unsharded().requires_grad()) continue;
    // An accumulator belongs to the stream it was made on. If the model has moved to another stream, make a new
    // accumulator, unless a live graph still holds this one and its hook.
    if (param.accumulator) {
      if (!current || param.accumulator->input_metadata(0).stream() == *current) continue;
      if (param.accumulator.use_count() > 1) continue;
    }
    const pybind11::gil_scoped_acquire gil;
    param.accumulator = nullptr;
    param.accumulator = torch::autograd::impl::grad_accumulator(param.unsharded());
    auto hook = [weak = unit.weak_from_this(), &group, i](const torch::autograd::variable_list& outputs,
                                                          const torch::autograd::variable_list&) {
      if (const auto owner = weak.lock()) of(*owner).root->take_gradient(of(*owner), group, i);
      return outputs;
    };
    param.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(std::move(hook)));
  }
}

void TensorEffects::end_prefetch() {
  for (const auto& transport : transports_) transport->end_prefetch();
}

bool TensorEffects::release_gather(ScheduledGroup& group, GatherEnd end) {
  const OutsideTransforms outside;
  ParamGroup& source = of(group).gathered_from();
  ParamGroup* const smaller = end == GatherEnd::keeps_rows ? of(group).post_forward().get() : nullptr;
  if (smaller != nullptr) smaller->transport().write_pool(*smaller, of(group).rows_to_keep(), source.gather().read);
  if (end != GatherEnd::canceled) of(group).empty(/*keeps_post_forward=*/smaller != nullptr);
  if (end == GatherEnd::canceled) source.transport().settle_gather(source);
  of(group).free_extensions();
  source.transport().release_gather(source);
  return smaller != nullptr;
}

void TensorEffects::drop_rows(ScheduledGroup& group) { of(group).drop_post_forward(); }

// --- passes ---

void TensorEffects::begin_pass(PassKind kind) {
  const bool odd_steps = last_pass_.odd_steps != commons_->has_stepped.exchange(false);
  last_pass_ = {kind, &root_, last_pass_.number + 1, odd_steps};
  commons_->pass = last_pass_;
}

void TensorEffects::end_pass(bool notifies_peers) {
  commons_->pass = Pass();
  if (!notifies_peers) {
    error_of_hook_ = nullptr;
    return;
  }
  for (const auto& shared : shared_groups_) shared->end_pass();
}

void TensorEffects::leave_pass(const std::string& why) noexcept {
  for (const auto& shared : shared_groups_) shared->leave(why);
  for (const auto& agreement : agreements_) agreement->leave(commons_->pass, why);
}

void TensorEffects::warn_of_zeroed(const ScheduledUnits& units) { waiting_.warn_of_zeroed(units); }

void TensorEffects::begin_forward(uint64_t number, const ScheduledUnits& units) {
  static const std::string name = "FSDP::root_pre_forward";
  const ProfileRange range(name);
  for (const auto& unit : units) {
    for (const auto& group : of(*unit).groups) set_facts(*group, group->transport().may_overlap(*group));
  }
  for (const auto& shared : shared_groups_) shared->enter_forward(number);
  release_unused_gradients(units);
  const PyRef after = std::exchange(root_.settings().post_optimizer_event, PyRef());
  for (const auto& transport : transports_) transport->begin_forward(after);
  // An optimizer on a separate stream may still read gradients. Then their memory may only serve this step's
  // reductions, which are ordered after that stream.
  if (!after) commons_->blocks.end_loans();
}

void TensorEffects::end_forward() {
  for (const auto& transport : transports_) transport->end_forward();
}

bool TensorEffects::begin_backward(uint64_t number, bool is_alone) {
  const auto task = std::make_shared<const Backward>(root_.weak_from_this());
  backward_ = task;
  for (const auto& shared : shared_groups_) shared->enter_backward(number, is_alone);
  torch::autograd::Engine::get_default_engine().queue_callback([weak = root_.weak_from_this(), task] {
    if (const auto root = weak.lock()) root->end_backward();
  });
  // torch.autograd.grad and backward(inputs=...) list what they compute, and a plain backward() does not.
  return torch::autograd::get_current_graph_task_exec_info()->empty();
}

void TensorEffects::end_backward() {
  for (const auto& transport : transports_) transport->end_backward();
  commons_->blocks.end_loans();
}

void TensorEffects::begin_unit_backward(ScheduledUnit& unit) {
  of(unit).backward_stream = current_stream(of(unit).device);
}

void TensorEffects::publish_progress(uint64_t position) {
  for (const auto& transport : transports_) transport->publish_progress(position);
}

std::unique_ptr<OpenSection> TensorEffects::open_section(const ScheduledUnit& unit, Section section) {
  if (!ProfileRange::is_profiling()) return nullptr;
  return std::make_unique<ProfiledSection>(name_of(of(unit).ranges, section));
}

// --- gradients ---

void TensorEffects::make_room(ScheduledGroup& group) { of(group).transport().make_room(of(group)); }

void TensorEffects::take_gradient(ScheduledGroup& group, size_t param) {
  const OutsideTransforms outside;
  const at::Tensor gradient = of(group).packable(of(group).take_gradient(param), param);
  if (group.is_shown()) {
    add_to_shown(of(group), param, gradient);
  } else {
    of(group).transport().pack_into_segment(of(group), param, gradient);
  }
}

void TensorEffects::pack_shown(ScheduledGroup& group, size_t param) {
  std::vector<at::Tensor>& shown = of(group).waiting().shown;
  const at::Tensor gradient = std::exchange(shown[param], at::Tensor());
  if (gradient.defined()) of(group).transport().pack_into_segment(of(group), param, gradient);
  if (param + 1 < shown.size()) return;
  shown.clear();
  group.set_shown(false);
}

void TensorEffects::pack_pending(ScheduledGroup& group) { of(group).transport().pack_pending(of(group)); }

void TensorEffects::begin_reduce(ScheduledGroup& group, ForwardCounts forwards) {
  const OutsideTransforms outside;
  ++commons_->counters.reductions;
  of(group).transport().begin_reduce(of(group), forwards);
}

Reduced TensorEffects::finish_reduce(ScheduledGroup& group, bool flush) {
  const OutsideTransforms outside;
  Transport::Finished finished = of(group).transport().finish_reduce(of(group), flush);
  if (finished.is_later) return Reduced::later;
  of(group).waiting().reduced = std::move(finished.rows);
  return of(group).waiting().reduced ? Reduced::rows : Reduced::kept;
}

void TensorEffects::skip_reduce(ScheduledGroup& group) { of(group).transport().skip_reduce(of(group)); }

void TensorEffects::keep_partial(ScheduledGroup& group) {
  WaitingTensors& waiting = of(group).waiting();
  std::unique_ptr<SegmentRows> rows = to_segment(std::move(waiting.reduced));
  if (waiting.partial && !waiting.partial->add(*rows)) throw_frozen_while_partial(of(group));
  if (!waiting.partial) waiting.partial = std::move(rows);  // the user may hold the existing rows
}

void TensorEffects::all_reduce(ScheduledGroup& scheduled) {
  const OutsideTransforms outside;
  ParamGroup& group = of(scheduled);
  std::unique_ptr<SegmentRows> rows = std::move(group.waiting().partial);
  if (!rows) {  // no gradient here, but other replicas may have some
    const double divisor = group.averages() ? 1.0 : group.divisor() / group.pre_divisor();
    rows = SegmentRows::zeros(group.transport().segment_layout(group), group.reduce_type(), divisor);
  }
  agree_on_replicas(group, rows->values().nbytes(), group.reduce_type(), Counts::at_post);
  call_all_reduce(group, rows->values());
  group.waiting().reduced = std::move(rows);
}

void TensorEffects::run_reduce_hook(ScheduledGroup& group) {
  if (!of(group).calls().all_reduce_hook) return;
  const OutsideTransforms outside;
  const pybind11::gil_scoped_acquire gil;
  of(group).waiting().reduced->run_hook(gil, of(group).calls().all_reduce_hook);
}

void TensorEffects::attach(ScheduledGroup& group) {
  const OutsideTransforms outside;
  const pybind11::gil_scoped_acquire gil;
  WaitingTensors& waiting = of(group).waiting();
  write(gil, of(group), std::move(group.facts().downloads ? waiting.downloads : waiting.reduced));
}

void TensorEffects::begin_download(ScheduledGroup& group) {
  const OutsideTransforms outside;
  const pybind11::gil_scoped_acquire gil;
  const std::unique_ptr<ReducedRows> rows = std::move(of(group).waiting().reduced);
  of(group).waiting().downloads = rows->to_host(gil);
}

void TensorEffects::write(const Gil& gil, ParamGroup& group, std::unique_ptr<ReducedRows> rows) {
  Gradients& gradients = group.gradients();
  gradients.end_reduction();
  const std::vector<uint8_t> has_gradient = rows->has_gradient();
  GradientTargets targets(has_gradient.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (has_gradient[i]) targets[i] = gradients.prepare(gil, i);
  }
  rows->write(targets);
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) continue;
    gradients.attach(gil, i, *targets[i]);
    run_hooks(gil, group.params()[i]);
  }
  if (gradients.release_if_unused(gil)) rows->note_block_given_back();
}

void TensorEffects::run_hooks(const Gil& /*gil*/, const Param& param) {
  const at::Tensor& sharded = param.sharded();
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(sharded);
  if (!hook) return;
  try {
    (*hook)(sharded);
  } catch (python_error& error) {
    error.persist();  // out of the thread state, because Python continues
    if (!error_of_hook_) error_of_hook_ = std::current_exception();
  } catch (...) {
    if (!error_of_hook_) error_of_hook_ = std::current_exception();
  }
}

void TensorEffects::raise_error_of_hook() {
  if (error_of_hook_) std::rethrow_exception(std::exchange(error_of_hook_, nullptr));
}

// --- what goes ---

bool TensorEffects::drop(ScheduledGroup& scheduled, Dropped what) {
  const OutsideTransforms outside;
  ParamGroup& group = of(scheduled);
  switch (what) {
    case Dropped::packed: {
      const bool was_shown = !std::exchange(group.waiting().shown, {}).empty();
      if (!group.offloads()) group.gradients().end_reduction();  // else a download of an earlier backward may run
      group.set_shown(false);
      return group.transport().abandon_reduce(group) || was_shown;
    }
    case Dropped::partial:
      group.waiting().partial = nullptr;
      group.transport().drop_partial(group);
      break;
    case Dropped::reduced:
      group.waiting().reduced = nullptr;
      if (!group.offloads()) group.gradients().end_reduction();
      break;
    case Dropped::downloads:
      group.waiting().downloads = nullptr;
      group.gradients().end_reduction();
      break;
    case Dropped::accumulated:
      group.drop_unpacked();
      break;
  }
  return false;
}

}  // namespace fsdp2x
