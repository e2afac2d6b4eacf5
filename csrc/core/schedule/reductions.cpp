// The path of gradients, without the gradients.
#include "core/schedule/reductions.hpp"

#include <algorithm>
#include <utility>

#include "core/error.hpp"

namespace fsdp2x {

// --- in ---

void Reductions::make_room(ScheduledGroup& group, std::optional<size_t> param) {
  if (!effects_.needs_room(group, param)) return;
  finish_pending();
  effects_.make_room(group);
}

void Reductions::add_gradient(ScheduledUnit& unit, ScheduledGroup& group, size_t param) {
  if (group.is_posted()) finish(unit.shared_from_this(), group, /*flush=*/true);  // peers read the packed gradients
  group.contributions_.add(backward_number(), /*is_first=*/!group.is_open());
  if (!group.is_shown()) make_room(group, param);
  if (!group.is_open()) group.set_gradients(GradientState::packed);
  effects_.take_gradient(group, param);
}

void Reductions::pack_pending(ScheduledUnit& unit) {
  for (ScheduledGroup* const group : unit.groups_) {
    if (group->gradient_state() != GradientState::packed || group->is_shown()) continue;
    make_room(*group, std::nullopt);
    effects_.pack_pending(*group);
  }
}

bool Reductions::is_awaited(const ScheduledUnit& unit, const ScheduledGroup& group) const {
  if (!reaches_all_ || !unit.awaits_reduction_ || group.is_reduced_) return false;
  return !effects_.has_outstanding_calls(unit) && effects_.is_collective(group);
}

void Reductions::post(ScheduledUnit& unit, ScheduledGroup& group, ForwardCounts forwards) {
  group.contributions_.add(backward_number(), /*is_first=*/!group.is_open());
  if (group.is_shown()) {
    for (size_t i = 0; i < group.facts().num_params; ++i) {
      make_room(group, i);
      effects_.pack_shown(group, i);
    }
  }
  make_room(group, std::nullopt);
  group.set_gradients(GradientState::posted);
  group.posts_late_ = false;
  try {
    effects_.begin_reduce(group, forwards);
    make_room(group, std::nullopt);  // for the memory next to it
  } catch (...) {
    // Outside of a backward, nothing else drops a reduction that is not pending.
    const bool was_earlier = holds_earlier(group.contributions_);
    drop_packed(group);
    if (was_earlier) mark_lost(group);
    throw;
  }
  pending_.push_back({unit.shared_from_this(), &group});
}

// --- out ---

void Reductions::finish_pending() {
  for (size_t i = 0; i < pending_.size();) {
    const OnItsWay reduction = pending_[i];  // user hooks may come here again
    if (reduction.group->posts_late_ || !finish(reduction.unit, *reduction.group, /*flush=*/false)) {
      ++i;
    } else if (i < pending_.size() && pending_[i].group == reduction.group) {
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
}

bool Reductions::finish(const std::shared_ptr<ScheduledUnit>& unit, ScheduledGroup& group, bool flush) {
  if (!group.is_posted()) return true;
  const Contributions& sum = group.contributions_;
  const bool was_earlier = holds_earlier(sum);
  try {
    const Reduced reduced = effects_.finish_reduce(group, flush);
    group.posts_late_ = reduced == Reduced::later;
    if (group.posts_late_) return false;
    group.set_gradients(GradientState::none);
    group.is_reduced_ = true;
    if (reduced == Reduced::kept) return true;
    if (group.facts().all_reduces_later) {
      effects_.keep_partial(group);
      group.partial_contributions_.add(backward_number(), /*is_first=*/!group.holds_partial_);
      if (sum.holds_earlier) group.partial_contributions_.holds_earlier = true;
      group.holds_partial_ = true;
    } else {
      deliver(unit, group);
    }
    return true;
  } catch (...) {
    // User hooks run after the rows have left the transport, so rows that they leave undone exist nowhere else.
    effects_.drop(group, Dropped::reduced);
    if (was_earlier) mark_lost(group);
    throw;
  }
}

void Reductions::deliver(const std::shared_ptr<ScheduledUnit>& unit, ScheduledGroup& group) {
  effects_.run_reduce_hook(group);
  const ScheduledGroup::Facts& facts = group.facts();
  if (!facts.downloads) return effects_.attach(group);
  // Gradients may come in two parts.
  const auto same = std::find_if(downloads_.begin(), downloads_.end(),
                                 [&group](const OnItsWay& other) { return other.group == &group; });
  if (same != downloads_.end()) finish_download(same);
  const auto is_beside = [&](const OnItsWay& other) { return other.group->facts().transport == facts.transport; };
  const auto num = static_cast<size_t>(std::count_if(downloads_.begin(), downloads_.end(), is_beside));
  if (num >= facts.max_downloads) finish_download(std::find_if(downloads_.begin(), downloads_.end(), is_beside));
  effects_.begin_download(group);
  downloads_.push_back({unit, &group});
}

void Reductions::finish_download(std::deque<OnItsWay>::iterator found) {
  const OnItsWay download = std::move(*found);
  downloads_.erase(found);
  effects_.attach(*download.group);
}

// Replicas may finish their reductions in different order, so all-reduces wait for the end of the backward.
void Reductions::all_reduce(const std::shared_ptr<ScheduledUnit>& unit, ScheduledGroup& group) {
  const Contributions sum = std::exchange(group.partial_contributions_, Contributions());
  group.holds_partial_ = false;
  group.was_zeroed_ = false;
  try {
    effects_.all_reduce(group);
    deliver(unit, group);
  } catch (...) {
    effects_.drop(group, Dropped::reduced);
    if (holds_earlier(sum)) mark_lost(group);
    throw;
  }
}

// --- the end of a backward ---

void Reductions::flush(const ScheduledUnits& units, ForwardCounts forwards) {
  // Handles units whose backward autograd did not announce (inputs without gradient), whose calls are still
  // outstanding, or that got gradients after their reduction.
  for (auto it = units.rbegin(); it != units.rend(); ++it) {
    ScheduledUnit& unit = **it;
    if (!unit.options_.requires_gradient_sync) continue;
    for (ScheduledGroup* const group : unit.groups_) {
      if (group->is_posted()) continue;
      const bool is_asked_for =
          is_awaited(unit, *group) || (!group->is_reduced_ && effects_.needs_empty_reduction(*group));
      if (!group->is_open() && !is_asked_for) {
        if (!group->is_reduced_) effects_.skip_reduce(*group);
        continue;
      }
      const auto section = effects_.open_section(unit, Section::post_backward_reduce);
      post(unit, *group, forwards);
    }
  }
  while (!pending_.empty()) {
    const OnItsWay reduction = pending_.front();
    finish(reduction.unit, *reduction.group, /*flush=*/true);
    if (!pending_.empty() && pending_.front().group == reduction.group) pending_.pop_front();
  }
  for (auto it = units.rbegin(); it != units.rend(); ++it) {
    const ScheduleOptions& options = (*it)->options_;
    if (!options.requires_gradient_sync || !options.requires_all_reduce) continue;
    for (ScheduledGroup* const group : (*it)->groups_) {
      if (!group->facts().all_reduces_later) continue;
      if ((*it)->awaits_reduction_ || group->holds_partial_) all_reduce(*it, *group);
    }
  }
  for (const auto& unit : units) {
    if (unit->options_.requires_gradient_sync) unit->awaits_reduction_ = false;
    for (ScheduledGroup* const group : unit->groups_) group->is_reduced_ = false;
  }
  while (!downloads_.empty()) finish_download(downloads_.begin());
}

// --- what goes ---

bool Reductions::drop_packed(ScheduledGroup& group) {
  const bool was_there = effects_.drop(group, Dropped::packed);
  group.set_gradients(GradientState::none);
  group.posts_late_ = false;
  return was_there;
}

void Reductions::drop_partial(ScheduledGroup& group) {
  group.holds_partial_ = false;
  group.partial_contributions_ = Contributions();
  group.was_zeroed_ = false;
  effects_.drop(group, Dropped::partial);
}

void Reductions::forget_pending() {
  // With manual finalization, reductions of earlier backwards continue.
  std::erase_if(pending_, [this](const OnItsWay& reduction) {
    return reduction.group->contributions_.backward == backward_number();
  });
}

void Reductions::abandon(ScheduledUnit& unit) {
  for (ScheduledGroup* const group : unit.groups_) {
    if (group->contributions_.backward == backward_number()) {
      const bool was_packed = drop_packed(*group);
      const size_t num_downloads =
          std::erase_if(downloads_, [group](const OnItsWay& reduction) { return reduction.group == group; });
      if (num_downloads > 0) effects_.drop(*group, Dropped::downloads);
      if ((was_packed || num_downloads > 0) && group->contributions_.holds_earlier) mark_lost(*group);
    }
    if (group->partial_contributions_.backward == backward_number()) {
      if (group->partial_contributions_.holds_earlier) mark_lost(*group);
      drop_partial(*group);
    }
    group->is_reduced_ = false;
    effects_.drop(*group, Dropped::accumulated);
  }
}

void Reductions::drop_all(ScheduledUnit& unit) {
  for (ScheduledGroup* const group : unit.groups_) {
    drop_packed(*group);
    drop_partial(*group);
    group->is_reduced_ = false;
    effects_.drop(*group, Dropped::accumulated);
  }
}

void Reductions::reset() {
  lost_.clear();
  pending_.clear();
  for (const OnItsWay& download : downloads_) effects_.drop(*download.group, Dropped::downloads);
  downloads_.clear();
}

void Reductions::mark_lost(const ScheduledGroup& group) { lost_ += (lost_.empty() ? "'" : ", '") + group.name() + "'"; }

void Reductions::refuse_after_loss() const {
  if (lost_.empty()) return;
  throw Error(
      "fsdp2x: a backward raised while unit " + lost_ +
      " held gradients of earlier backwards (accumulated without gradient sync or all-reduce). They were summed "
      "with gradients of the failed backward and are lost. Call reset_iter_state() on the root module and begin "
      "the step again.");
}

}  // namespace fsdp2x
