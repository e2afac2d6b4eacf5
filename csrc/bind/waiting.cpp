// Binds the effect of torch's zero_grad on gradients that wait for a reduction, and on the memory of the others.
#include "bind/parts.hpp"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "engine/schedule/root.hpp"

namespace fsdp2x {

namespace py = pybind11;

namespace {

// Calls `visit(unit, group, which)` for the groups of all units with gradients that wait for a reduction. `which`
// marks, by parameter, whether it is in `params`, sharded or gathered.
template <class Visit>
void visit_waiting(const std::vector<py::object>& params, const Visit& visit) {
  std::unordered_set<PyObject*> given;
  for (const auto& unit : Unit::live(Gil::of_caller())) {
    for (const auto& group : unit->groups) {
      if (!group->has_joined() || !group->holds_unreduced()) continue;
      if (given.empty()) {
        for (const py::object& param : params) given.insert(param.ptr());
      }
      std::vector<bool> which;
      for (const Param& param : group->params()) {
        which.push_back(given.contains(param.sharded_object()) || given.contains(param.unsharded_object()));
      }
      if (std::find(which.begin(), which.end(), true) != which.end()) visit(*unit, *group, which);
    }
  }
}

// Gives memory of gradients that are None now back to the allocator of the device.
void release_gradients() {
  const Gil gil = Gil::of_caller();
  std::unordered_set<Root*> roots;
  for (const auto& unit : Unit::live(gil)) {
    if (unit->root && roots.insert(unit->root.get()).second) unit->root->release_gradients(gil);
  }
}

}  // namespace

void bind_waiting(py::module_& m) {
  m.def(
      "clear_waiting_gradients",
      [](const std::vector<py::object>& params, bool drops) {
        visit_waiting(params, [drops](Unit& unit, ParamGroup& group, const std::vector<bool>& which) {
          unit.root->waiting();
          WaitingGradients::clear(unit.root->schedule().reductions(), group, which, drops);
        });
        release_gradients();
      },
      py::arg("params"), py::arg("drops"));
  m.def(
      "note_zeroed_gradients",
      [](const std::vector<py::object>& params) {
        visit_waiting(params, [](Unit& unit, ParamGroup& group, const std::vector<bool>&) {
          unit.root->waiting().note_zeroed(group);
        });
        release_gradients();
      },
      py::arg("params"));
}

}  // namespace fsdp2x
