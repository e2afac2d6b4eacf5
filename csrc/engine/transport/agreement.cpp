// The ranks of a process group agree on each collective.
#include "engine/transport/agreement.hpp"

#include <torch/csrc/Exceptions.h>

#include <array>
#include <functional>
#include <thread>
#include <utility>

#include "engine/params/param_group.hpp"

namespace fsdp2x {

namespace {

bool is_trained(const ParamGroup& group, size_t param) {
  return group.params()[param].trains(group.layout().params()[param]);
}

CollectiveSettings settings_of(const ParamGroup& group) {
  const UnitOptions& options = group.options();
  CollectiveSettings settings;
  settings.unit = {flags_of(options, group.pass().odd_steps), group.divisor()};
  settings.wire_weights = options.wire_weights;
  settings.wire_gradients = options.wire_gradients;
  for (size_t i = 0; i < group.params().size(); ++i) {
    settings.trained = settings.trained * 31 + (is_trained(group, i) ? 2 : 1);
  }
  return settings;
}

const char* name_of(WireFormat format) {
  constexpr std::array kNames{"None", "int8", "fp8", "bfloat16"};
  return kNames[static_cast<size_t>(format)];
}

// Returns what a rank does, and what it is.
std::pair<std::string, std::string> words_of(Operation operation) {
  if (operation == Operation::all_gather) return {"gathers", "all-gather"};
  if (operation == Operation::all_reduce) return {"all-reduces", "all-reduce"};
  return {"reduces", "reduction"};
}

}  // namespace

void agree_on_shards(const ParamGroup& group, Operation operation, size_t segment_bytes, DType type, Counts counts,
                     const std::vector<size_t>& parts) {
  const auto& [agreement, subject] = group.shard_seat();
  if (!agreement) return;
  agreement->agree(subject, group, operation, segment_bytes, type, parts);
  if (counts == Counts::now) agreement->count();
}

void agree_on_replicas(const ParamGroup& group, size_t segment_bytes, DType type, Counts counts) {
  const auto& [agreement, subject] = group.replica_seat();
  if (!agreement) return;
  agreement->agree(subject, group, Operation::all_reduce, segment_bytes, type, {});
  if (counts == Counts::now) agreement->count();
}

uint64_t Agreement::add_subject(const std::string& label) {
  subjects_[++num_subjects_].label = label;
  return num_subjects_;
}

void Agreement::agree(uint64_t subject, const ParamGroup& group, Operation operation, size_t segment_bytes, DType type,
                      const std::vector<size_t>& parts) {
  Collective next;
  next.subject = subject;
  next.operation = operation;
  next.pass = group.pass();
  next.settings = settings_of(group);
  next.segment_bytes = segment_bytes;
  next.type = type;
  next.averages = operation != Operation::all_gather && group.averages();
  const GroupCalls& calls = group.calls();
  next.is_custom = (operation == Operation::all_gather && calls.all_gather) ||
                   (operation == Operation::reduce_scatter && calls.reduce_scatter);
  next.is_separate = (operation == Operation::reduce_scatter && calls.separate_reduce_scatter) ||
                     (operation == Operation::all_to_all && calls.separate_all_to_all);
  Subject& known = subjects_[subject];
  if (known.name != group.name()) known.name = group.name();  // units are renamed when they move to another root
  next.is_in_place = !parts.empty();
  if (next.is_in_place && known.parts != parts) known.parts = parts;
  agree(next, &group);
}

void Agreement::agree_on_other(const Gil& /*gil*/, const std::string& kind, const std::string& what,
                               Operation operation, size_t segment_bytes, DType type) {
  Collective next;
  // The highest bit keeps it apart from the numbers of units.
  next.subject = std::hash<std::string>()(kind) | uint64_t{1} << 63;
  next.operation = operation;
  next.pass = call();
  next.segment_bytes = segment_bytes;
  next.type = type;
  subjects_[next.subject].name = what;
  agree(next, nullptr);
}

void Agreement::agree(const Collective& next, const ParamGroup* group) {
  std::unique_lock lock(mutex_);
  if (must_ask_ || !order_.expects(next)) {
    Collective counted = next;
    counted.num_passes = order_.num_passes(next.pass);
    const uint64_t number = order_.num_posted();
    lock.unlock();
    const pybind11::gil_scoped_acquire gil;
    const pybind11::dict description = describe(counted, number, group);
    fsdp2x::call(gil, ask_.get(), description.ptr());
    must_ask_ = false;
    lock.lock();
  }
  agreed_ = next;
}

void Agreement::count() {
  const std::lock_guard lock(mutex_);
  if (agreed_) order_.add(*std::exchange(agreed_, std::nullopt));
}

void Agreement::leave(const Pass& pass, const std::string& why) noexcept {
  if (!Py_IsInitialized()) return;
  const pybind11::gil_scoped_acquire gil;
  agreed_.reset();
  order_.leave(pass);  // Python threads wait for the GIL
  // In another thread, no signal handler raises, and the exception in flight stays.
  std::thread reporter([&] {
    const pybind11::gil_scoped_acquire gil_of_thread;
    const PyRef done = PyRef::steal(PyObject_CallFunction(leave_.get(), "sK", why.c_str(), order_.num_passes(pass)));
    if (!done) PyErr_Clear();  // the store is gone, and the peers with it
  });
  const ReleaseGil released;
  reporter.join();
}

uint64_t Agreement::num_posted() const {
  const std::lock_guard lock(mutex_);
  return order_.num_posted();
}

void Agreement::restart() {
  const std::lock_guard lock(mutex_);
  order_.restart();
  must_ask_ = is_broken_ = false;
}

pybind11::object Agreement::describe_posted(const Gil& /*gil*/, uint64_t number) const {
  Collective found;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t first = order_.num_posted() - order_.recent().size();
    if (number < first || number >= order_.num_posted()) return pybind11::none();
    found = order_.recent()[number - first];
  }
  return describe(found, number, nullptr);
}

pybind11::dict Agreement::describe(const Collective& collective, uint64_t number, const ParamGroup* group) const {
  const Subject& subject = subjects_.at(collective.subject);
  const bool is_unit = collective.subject >> 63 == 0;
  pybind11::dict facts;  // in the order in which messages choose one
  if (is_unit) {
    facts["model"] = subject.label;
    for (size_t i = 0; i < kUnitFlagNames.size(); ++i) {
      facts[kUnitFlagNames[i]] = (collective.settings.unit.flags >> i & 1) != 0;
    }
    facts["gradient_divide_factor"] = collective.settings.unit.divide_factor;
    facts["wire_dtype of weights"] = name_of(collective.settings.wire_weights);
    facts["wire_dtype of gradients"] = name_of(collective.settings.wire_gradients);
    for (size_t i = 0; group != nullptr && i < group->params().size(); ++i) {
      facts[pybind11::str("requires_grad of '" + group->params()[i].fqn() + "'")] = is_trained(*group, i);
    }
    facts["under a dispatch mode, under a patch of torch.distributed, or with a custom collective"] =
        !collective.is_in_place && collective.operation != Operation::all_to_all;
    facts["pass"] = collective.num_passes;
  }
  facts["bytes"] = collective.segment_bytes;
  const auto [verb, noun] = words_of(collective.operation);
  const std::string unit = " unit '" + subject.name + "'";
  pybind11::dict result;
  result["number"] = number;
  result["tag"] = collective.tag();
  result["num_passes"] = collective.num_passes;
  result["action"] = is_unit ? verb + unit + " " + to_string(collective.pass.kind) : subject.name;
  result["operation"] = is_unit ? noun + (" of" + unit) : subject.name;
  result["facts"] = facts;
  result["kind"] = to_string(collective.operation);
  result["segment_bytes"] = collective.segment_bytes;
  result["dtype"] = dtype_name(collective.type);
  result["is_custom"] = collective.is_custom;
  result["is_separate"] = collective.is_separate;
  result["parts"] = collective.is_in_place ? subject.parts : std::vector<size_t>();
  return result;
}

}  // namespace fsdp2x
