// The schedule on byte counts.
#include "core/schedule/planned_steps.hpp"

#include <algorithm>
#include <utility>

namespace fsdp2x {

namespace {

PlannedGroup& of(ScheduledGroup& group) { return static_cast<PlannedGroup&>(group); }
const PlannedGroup& of(const ScheduledGroup& group) { return static_cast<const PlannedGroup&>(group); }

}  // namespace

void MemoryEffects::add_group(PlannedGroup& group, TransportMemory& transport, PlannedGroup* smaller) {
  PerGroup& added = groups_.emplace_back();
  added.group = &group;
  added.transport = &transport;
  added.smaller = smaller;
  group.set_facts({.num_params = 1,
                   .downloads = group.bytes.offloads,
                   .may_overlap = transport.may_overlap(group),
                   .transport = &transport,
                   .max_downloads = transport.max_downloads()});
}

bool MemoryEffects::has_gradient(ScheduledGroup& group, size_t /*param*/) const { return ready_ == &group; }

bool MemoryEffects::is_collective(const ScheduledGroup& group) const {
  return !state_of(group).transport->is_shared() && of(group).bytes.is_trainable;
}

bool MemoryEffects::needs_empty_reduction(const ScheduledGroup& group) const {
  return of(group).bytes.reduces_unused || state_of(group).transport->is_shared();
}

bool MemoryEffects::needs_room(const ScheduledGroup& group, std::optional<size_t> param) {
  return state_of(group).transport->needs_room(of(group), param.has_value());
}

PlannedGroup& MemoryEffects::source_of(ScheduledGroup& group) {
  return group.keeps_rows() ? *state_of(group).smaller : of(group);
}

void MemoryEffects::begin_gather(ScheduledGroup& group, ShardsNow /*shards*/) {
  const PlannedGroup& source = source_of(group);
  gathers_.push_back(source.number);
  state_of(source).transport->begin_gather(source);
}

void MemoryEffects::finish_gather(ScheduledUnit& /*unit*/, ScheduledGroup& group) {
  const PlannedGroup& source = source_of(group);
  state_of(source).transport->finish_gather(source);
}

bool MemoryEffects::release_gather(ScheduledGroup& group, GatherEnd end) {
  const PlannedGroup& source = source_of(group);
  state_of(source).transport->release_gather(source);
  return end == GatherEnd::keeps_rows && state_of(group).smaller != nullptr;
}

void MemoryEffects::make_room(ScheduledGroup& group) { state_of(group).transport->make_room(of(group)); }

void MemoryEffects::take_pool(PlannedGroup& group) {
  if (group.bytes.offloads || std::exchange(state_of(group).has_pool, true)) return;
  whole_.take(group.bytes.gradient_pool);
}

void MemoryEffects::take_gradient(ScheduledGroup& group, size_t /*param*/) {
  PerGroup& state = state_of(group);
  ready_ = nullptr;
  if (std::exchange(state.holds_gradients, true)) return;
  state.transport->open(of(group), /*syncs=*/syncs_);
  whole_.take(of(group).bytes.gradient);
}

void MemoryEffects::pack_pending(ScheduledGroup& group) {
  PerGroup& state = state_of(group);
  if (!state.holds_gradients || !state.transport->pack_pending(of(group))) return;
  state.holds_gradients = false;
  whole_.give_back(of(group).bytes.gradient);
}

void MemoryEffects::begin_reduce(ScheduledGroup& scheduled, ForwardCounts /*forwards*/) {
  PlannedGroup& group = of(scheduled);
  PerGroup& state = state_of(group);
  reductions_.push_back(group.number);
  if (state.transport->packs_into_pool(group)) take_pool(group);
  const size_t gradient_bytes = std::exchange(state.holds_gradients, false) ? group.bytes.gradient : 0;
  if (!state.transport->begin_reduce(group, gradient_bytes)) whole_.give_back(gradient_bytes);  // packed
  if (group.bytes.reduces_in_place && !state.transport->keeps_partial()) take_pool(group);
  state.transport->take_rows(group);
}

// Assumes the worst case of ranks that share memory: at the end of a backward, peers may be elsewhere, so that nothing
// waits for them and no group gives its memory back before all are posted.
Reduced MemoryEffects::finish_reduce(ScheduledGroup& scheduled, bool flush) {
  PlannedGroup& group = of(scheduled);
  const PerGroup& state = state_of(group);
  if (!flush && is_ending_ && state.transport->is_shared()) return Reduced::later;
  state.transport->finish_reduce(group);
  if (state.transport->keeps_partial()) return Reduced::kept;
  take_pool(group);
  return Reduced::rows;
}

void MemoryEffects::begin_download(ScheduledGroup& group) { state_of(group).transport->begin_download(of(group)); }

void MemoryEffects::attach(ScheduledGroup& group) {
  if (group.facts().downloads) state_of(group).transport->finish_download(of(group));
}

void MemoryEffects::end_backward() {
  for (const PerGroup& state : groups_) state.transport->end_backward();
}

void MemoryEffects::drop_gradients() {
  for (PerGroup& state : groups_) {
    if (std::exchange(state.has_pool, false)) whole_.give_back(state.group->bytes.gradient_pool);
    state.transport->forget_gradients();
  }
}

// --- steps ---

size_t PlannedSteps::add_transport(const std::string& transport, const PlannedRanks& ranks) {
  transports_.push_back(make_transport_memory(transport, ranks, page_bytes_, effects_.whole()));
  if (!transports_.back()->overlaps()) schedule_.set_synchronous();
  return transports_.size() - 1;
}

size_t PlannedSteps::add_unit(const std::string& name, bool reshards_after_forward, bool reshards_after_backward,
                              bool unshards_in_backward) {
  units_.push_back(std::make_shared<PlannedUnit>(name, reshards_after_forward, reshards_after_backward));
  units_.back()->options.unshard_in_backward = unshards_in_backward;
  schedule_.add_unit(units_.back());
  calls_.emplace_back();
  return units_.size() - 1;
}

size_t PlannedSteps::add_group(std::optional<size_t> unit, size_t transport, const GroupBytes& bytes,
                               std::optional<size_t> smaller) {
  const std::string name = unit ? units_.at(*unit)->name() : std::string();
  groups_.push_back(std::make_unique<PlannedGroup>(groups_.size(), name, bytes));
  effects_.add_group(*groups_.back(), *transports_.at(transport), smaller ? groups_.at(*smaller).get() : nullptr);
  if (unit) units_[*unit]->add_group(*groups_.back());
  return groups_.size() - 1;
}

std::vector<PlannedSteps::Moved> PlannedSteps::run(const std::vector<PlannedEvent>& events,
                                                   const std::vector<PlannedBackward>& backwards) {
  constexpr int kMaxSteps = 8;  // the first one predicts nothing in forward, and after a few no memory grows any more
  std::vector<size_t> before;
  std::vector<Moved> moved;
  for (int step = 0; step < kMaxSteps; ++step) {
    moved.clear();
    for (const PlannedBackward& backward : backwards) {
      effects_.set_all_reduces(backward.all_reduces);
      run_forward(events);
      run_backward(events, backward.syncs);
      moved.push_back({backward.num, effects_.take_gathers(), effects_.take_reductions()});
      for (const size_t group : moved.back().reductions) effects_.note_gradients(*groups_[group]);
    }
    effects_.drop_gradients();
    std::vector<size_t> now;
    for (const auto& transport : transports_) {
      for (const size_t bytes :
           {transport->gather_slot_bytes(), transport->scratch_bytes(), transport->peak_gather_bytes()}) {
        now.push_back(bytes);
      }
    }
    if (now == before) break;
    before = std::move(now);
  }
  return moved;
}

void PlannedSteps::run_forward(const std::vector<PlannedEvent>& events) {
  for (const PlannedEvent& event : events) {
    PlannedUnit& unit = *units_.at(event.unit);
    if (event.kind == PlannedEvent::Kind::open) {
      schedule_.gather_for_forward(unit, schedule_.enter(unit, /*has_grad=*/true, /*was_interrupted=*/false));
      schedule_.await_backward(unit);
      calls_[event.unit] = schedule_.number_call();
      unit.is_outstanding = event.has_node;
    } else if (event.kind == PlannedEvent::Kind::close) {
      schedule_.leave(unit);
      schedule_.finish_forward(unit, /*has_grad=*/true);
      if (schedule_.is_forward_root(&unit)) schedule_.end_forward();
    }
  }
}

void PlannedSteps::run_backward(const std::vector<PlannedEvent>& events, bool syncs) {
  effects_.run_backward(true, syncs);
  for (const auto& unit : units_) unit->options.requires_gradient_sync = syncs;
  for (auto event = events.rbegin(); event != events.rend(); ++event) {
    PlannedUnit& unit = *units_.at(event->unit);
    if (event->kind == PlannedEvent::Kind::use) {
      ScheduledGroup& group = *unit.scheduled_groups().at(event->group);
      effects_.set_gradient(of(group));
      schedule_.gradient_ready(unit, group, 0);
    } else if (event->kind == PlannedEvent::Kind::sum) {
      effects_.sum_gradients(event->bytes);
    } else if (event->kind == PlannedEvent::Kind::read) {
      schedule_.end_reads(unit);
    } else if (event->has_node && event->kind == PlannedEvent::Kind::close) {
      schedule_.pre_backward(unit);
    } else if (event->has_node) {
      unit.is_outstanding = false;
      schedule_.post_backward(unit, calls_[event->unit]);
    }
  }
  effects_.end(true);
  schedule_.end_backward();
  effects_.end(false);
  effects_.run_backward(false, syncs);
}

}  // namespace fsdp2x
