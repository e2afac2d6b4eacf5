// Training programs of a few units, run by the schedule on records as autograd and module hooks would run them.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "schedule/recorded_effects.hpp"

namespace fsdp2x::programs {

struct UnitSpec {
  int parent = -1;
  bool trains = true;
  bool repeats = false;          // its parent calls it twice
  bool inputs_need_grad = true;  // autograd announces the end of its backward
};

struct Program {
  std::vector<UnitSpec> units;  // the root is the first
  Connection connection;
  bool reshards_after_forward = true;
  bool is_synchronous = false;
  bool accumulates = false;   // a backward without gradient sync, or all-reduce, comes before the one with it
  bool recomputes = false;    // activation checkpointing inside of each unit
  bool ends_reads = false;    // calls without inputs that need gradients begin with a lookup of rows
  int without_gradient = -1;  // a unit that gets no gradient on this rank

  std::string text() const {
    std::string text = "units";
    for (const UnitSpec& unit : units) {
      text += " " + std::to_string(unit.parent) + (unit.trains ? "t" : "f") + (unit.repeats ? "r" : "") +
              (unit.inputs_need_grad ? "n" : "");
    }
    for (const auto& [is_set, name] :
         std::initializer_list<std::pair<bool, const char*>>{{connection.is_collective, "collective"},
                                                             {connection.peers_are_late, "late"},
                                                             {connection.has_replicas, "replicas"},
                                                             {connection.downloads, "downloads"},
                                                             {reshards_after_forward, "reshards"},
                                                             {is_synchronous, "synchronous"},
                                                             {accumulates, "accumulates"},
                                                             {recomputes, "recomputes"},
                                                             {ends_reads, "ends reads"}}) {
      if (is_set) text += std::string(", ") + name;
    }
    return text;
  }
};

// One rank that runs a program.
template <class Effects = RecordedEffects>
class Rank {
 public:
  template <class... Args>
  explicit Rank(const Program& program, Args&&... args)
      : program_(program), effects_(std::forward<Args>(args)...), schedule_(effects_) {
    if (program.is_synchronous) schedule_.set_synchronous();
    for (size_t i = 0; i < program.units.size(); ++i) {
      units_.push_back(std::make_shared<RecordedUnit>(static_cast<int>(i), program.units[i].trains));
      units_.back()->options.reshard_after_forward = program.reshards_after_forward;
      schedule_.add_unit(units_.back());
    }
  }
  Effects& effects() { return effects_; }

  // Runs a step. Without an exception, it must leave nothing behind.
  void step() {
    if (program_.accumulates) pass(/*syncs=*/false);
    pass(/*syncs=*/true);
    check_idle();
    for (const auto& unit : units_) {
      if (!gets_gradient(unit->group.number)) continue;
      for (const int number : completed_) {
        require(unit->group.attached.contains(number), "a gradient is missing in " + unit->name());
      }
    }
    completed_.clear();
  }
  // Runs a forward without grad that leaves out the last unit, whose gather may have begun ahead.
  void evaluate() {
    tape_.clear();
    left_out_ = units_.size() - 1;
    forward(/*has_grad=*/false);
    left_out_ = 0;
    for (const auto& unit : units_) require(unit->param_state() != ParamState::gathering, "nobody uses a gather");
    if (program_.reshards_after_forward) check_gathers();
  }
  // Gathers all units, and reshards them after forwards that gather nothing. Ranks may run different ones.
  void generate(bool runs) {
    for (const auto& unit : units_) {
      unit->options.reshard_after_forward = false;
      schedule_.unshard(*unit);
    }
    left_out_ = 1;
    if (runs) forward(/*has_grad=*/false);
    left_out_ = 0;
    for (const auto& unit : units_) {
      unit->options.reshard_after_forward = program_.reshards_after_forward;
      schedule_.reshard(*unit);
    }
  }
  // Runs a step in which the effect throws, then the user's recovery.
  void fail_step(size_t effect) {
    effects_.throw_at(effect);
    try {
      step();
    } catch (const Planned&) {
      effects_.runs_backward = effects_.graph_lives = false;
      for (const auto& unit : units_) {
        unit->num_outstanding = 0;
        unit->group.is_expected = false;
      }
    }
    effects_.throw_at(std::nullopt);
    schedule_.settle_raised_backward();
    check_gathers();
    bool has_loss = false;
    try {
      schedule_.reductions().refuse_after_loss();
    } catch (const Error&) {
      has_loss = true;
    }
    for (const auto& unit : units_) check_sums(unit->group, has_loss);
    if (has_loss) schedule_.reset();
    completed_.clear();
    for (const auto& unit : units_) unit->group.attached.clear();
  }

 private:
  struct Call {
    int unit;
    bool opens;
    std::optional<uint64_t> number;
    bool is_first;  // of the forward
  };
  bool gets_gradient(int unit) const {
    return program_.units[static_cast<size_t>(unit)].trains && program_.without_gradient != unit;
  }

  void pass(bool syncs) {
    for (const auto& unit : units_) {
      (program_.connection.has_replicas ? unit->options.requires_all_reduce : unit->options.requires_gradient_sync) =
          syncs;
    }
    const int number = effects_.backward++;
    tape_.clear();
    forward(/*has_grad=*/true);
    backward(number);
    completed_.push_back(number);
  }

  void forward(bool has_grad) {
    schedule_.settle_raised_backward();
    call(0, has_grad, /*is_first=*/true);
  }

  // As UnitHooks does around a module.
  void call(int index, bool has_grad, bool is_first) {
    RecordedUnit& unit = *units_[static_cast<size_t>(index)];
    try {
      const Schedule::Entry entry = schedule_.enter(unit, has_grad, /*was_interrupted=*/false);
      schedule_.gather_for_forward(unit, entry);
      require(unit.group.gather == GatherState::filled, "a forward runs without its parameters: " + unit.name());
      if (has_grad) {
        schedule_.await_backward(unit);
        tape_.push_back({index, true, schedule_.number_call(), is_first});
        if (program_.units[static_cast<size_t>(index)].inputs_need_grad) ++unit.num_outstanding;
      }
      for (size_t child = 1; child < units_.size(); ++child) {
        const UnitSpec& spec = program_.units[child];
        if (spec.parent != index || child == left_out_) continue;
        for (int time = 0; time < 1 + spec.repeats; ++time) call(static_cast<int>(child), has_grad, time == 0);
      }
      if (has_grad) tape_.push_back({index, false, std::nullopt, is_first});
      schedule_.leave(unit);
      schedule_.finish_forward(unit, has_grad);
      if (schedule_.is_forward_root(&unit)) schedule_.end_forward();
    } catch (const Planned&) {
      schedule_.leave(unit);
      if (schedule_.is_forward_root(&unit)) {
        schedule_.abandon_forward(/*interrupted=*/false);
      } else {
        schedule_.fail_forward(unit);
      }
      throw;
    }
  }

  // Runs nodes in the reverse order of their calls, as autograd does. A parameter's gradient is complete with the
  // backward of its first call.
  void backward(int number) {
    effects_.runs_backward = true;
    for (const auto& unit : units_) unit->group.is_expected = gets_gradient(unit->group.number);
    for (auto it = tape_.rbegin(); it != tape_.rend(); ++it) {
      RecordedUnit& unit = *units_[static_cast<size_t>(it->unit)];
      if (!it->opens) {
        schedule_.pre_backward(unit);
        require(unit.group.gather == GatherState::filled, "a backward runs without its parameters: " + unit.name());
        if (program_.recomputes) {
          schedule_.gather_for_forward(unit, schedule_.enter(unit, /*has_grad=*/true, /*was_interrupted=*/false));
          schedule_.leave(unit);
        }
        continue;
      }
      const bool is_announced = program_.units[static_cast<size_t>(it->unit)].inputs_need_grad;
      if (program_.ends_reads && !is_announced) schedule_.end_reads(unit);
      if (it->is_first && unit.group.is_expected) {
        unit.group.is_expected = false;
        unit.group.accumulated.insert(number);
        schedule_.gradient_ready(unit, unit.group, 0);
      }
      if (!is_announced) continue;
      --unit.num_outstanding;
      schedule_.post_backward(unit, it->number);
    }
    schedule_.end_backward();
    effects_.runs_backward = effects_.graph_lives = false;
  }

  void check_gathers() const {
    require(effects_.num_gathered() == 0, "gathers are not released: " + std::to_string(effects_.num_gathered()));
    for (const auto& unit : units_) {
      require(unit->param_state() == ParamState::sharded && unit->phase() == Phase::idle,
              unit->name() + " is not idle");
    }
  }
  void check_idle() const {
    check_gathers();
    for (const auto& unit : units_) {
      const RecordedGroup& group = unit->group;
      require(!group.is_open() && !group.packed && !group.reduced && !group.downloading && !group.partial,
              "gradients are left behind in " + unit->name());
    }
  }
  // Gradients of a backward that raised are in no sum. Gradients of one that ended are in `.grad`, wait, or are
  // reported.
  void check_sums(const RecordedGroup& group, bool has_loss) const {
    require(!group.reduced && !group.downloading && !group.is_posted_to_peers,
            "rows are left behind in " + group.name());
    require(group.accumulated.empty(), "autograd keeps a gradient of " + group.name());
    Sum held;
    for (const auto& place : {group.packed, group.partial}) {
      if (place) held.insert(place->begin(), place->end());
    }
    for (const int number : held) {
      require(std::find(completed_.begin(), completed_.end(), number) != completed_.end(),
              "a sum holds gradients of a backward that raised: " + group.name());
    }
    if (!gets_gradient(group.number) || has_loss) return;
    for (const int number : completed_) {
      require(held.contains(number) || group.attached.contains(number), "a gradient is silently lost: " + group.name());
    }
  }

  Program program_;
  Effects effects_;
  std::vector<std::shared_ptr<RecordedUnit>> units_;
  Schedule schedule_;
  std::vector<Call> tape_;
  size_t left_out_ = 0;         // a unit that the forward does not reach; 0: none
  std::vector<int> completed_;  // backwards of this step
};

// Makes all trees of `num` units with all their properties. `visit` may change the rest of the program.
template <class Visit>
void for_each_model(int num, const Visit& visit) {
  std::vector<UnitSpec> units(static_cast<size_t>(num));
  const auto choose = [&](const auto& self, size_t at) -> void {
    if (at == units.size()) return visit(units);
    for (int parent = at == 0 ? -1 : 0; parent < static_cast<int>(at); ++parent) {
      for (int bits = 0; bits < (at == 0 ? 4 : 8); ++bits) {  // the root is called once
        units[at] = {parent, (bits & 1) != 0, (bits & 4) != 0, (bits & 2) != 0};
        self(self, at + 1);
      }
    }
  };
  choose(choose, 0);
}

template <class Visit>
void for_each_setting(const Visit& visit) {
  for (int bits = 0; bits < 32; ++bits) {
    for (int mode = 0; mode < 4; ++mode) {  // collectives, with replicas, with downloads, shared memory
      Program program;
      program.reshards_after_forward = (bits & 1) != 0;
      program.ends_reads = !program.reshards_after_forward;
      program.is_synchronous = (bits & 2) != 0;
      program.accumulates = (bits & 4) != 0;
      program.recomputes = (bits & 8) != 0;
      program.connection = {mode != 3, (bits & 16) != 0, mode == 1, mode == 2};
      if (program.connection.peers_are_late && mode != 3) continue;
      visit(program);
    }
  }
}

struct Count {
  size_t programs = 0, exceptions = 0;
};

// Runs the program, and again with an exception at every effect of a step. Throws the violation with the program.
inline void check(const Program& program, bool with_exceptions, Count& count) {
  std::string where;
  try {
    Rank<> rank(program, program.connection);
    rank.step();
    rank.evaluate();
    rank.generate(/*runs=*/false);
    const size_t before = rank.effects().num_effects();
    rank.step();
    const size_t num_effects = rank.effects().num_effects() - before;
    ++count.programs;
    if (program.connection.is_collective) {
      // Another rank where a unit gets no gradient must issue the same collectives in the same order.
      for (size_t i = 0; i < program.units.size(); ++i) {
        Program other = program;
        other.without_gradient = static_cast<int>(i);
        where = ", no gradient in unit " + std::to_string(i);
        Rank<> peer(other, other.connection);
        peer.step();
        peer.evaluate();
        peer.generate(/*runs=*/true);
        peer.step();
        require(peer.effects().collectives() == rank.effects().collectives(), "ranks issue other collectives");
      }
    }
    for (size_t effect = 0; with_exceptions && effect < num_effects; ++effect) {
      where = ", exception at effect " + std::to_string(effect);
      Rank<> failing(program, program.connection);
      failing.step();
      failing.fail_step(effect);
      require(failing.effects().has_thrown(), "the exception did not come");
      failing.step();
      ++count.exceptions;
    }
  } catch (const std::exception& error) {
    throw Violation(std::string(error.what()) + " (" + program.text() + where + ")");
  }
}

}  // namespace fsdp2x::programs
