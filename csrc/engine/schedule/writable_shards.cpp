// Finds the groups whose shards are an optimizer's parameters.
#include "engine/schedule/writable_shards.hpp"

#include <span>
#include <unordered_map>

#include "engine/memory/local_tensor.hpp"
#include "engine/memory/storage.hpp"
#include "engine/schedule/unit.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

namespace {

// Returns borrowed items. A user's optimizer may keep something else under that name; it then steps as usual.
std::span<PyObject* const> items(PyObject* list) {
  if (list == nullptr || !PyList_Check(list)) return {};
  return {reinterpret_cast<PyListObject*>(list)->ob_item, static_cast<size_t>(PyList_GET_SIZE(list))};
}

}  // namespace

WritableShards::WritableShards(const Gil& gil, PyObject* param_groups) {
  static PyObject* const params_name = interned("params");
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<ParamGroup>> by_pool;
  std::set<std::shared_ptr<Commons>> roots;
  size_t num_resting = 0;
  for (auto& group : Unit::live_groups(gil)) {
    if (!group->has_joined()) continue;
    roots.insert(group->commons());
    if (group->shards().state() == ShardState::resting) ++num_resting;
    by_pool.emplace(group->pool().storage().unsafeGetStorageImpl(), std::move(group));
  }
  for (PyObject* const group : items(param_groups)) {
    for (PyObject* const param : items(PyDict_Check(group) ? PyDict_GetItem(group, params_name) : nullptr)) {
      if (num_resting == 0 && stepped_.size() == roots.size()) return;
      const LocalTensor local = local_tensor(param);
      if (!local.tensor.defined() || !local.tensor.has_storage()) continue;
      const auto found = by_pool.find(pool_of(*local.tensor.storage().unsafeGetStorageImpl()));
      if (found == by_pool.end()) continue;
      const auto& known = found->second;
      stepped_.insert(known->commons());
      if (known->shards().state() == ShardState::resting) {
        --num_resting;
        if (known->transport().open_shards(*known)) opened_.push_back(known);
      }
      by_pool.erase(found);
    }
  }
}

void WritableShards::close() {
  close_shards();
  for (const auto& commons : stepped_) commons->has_stepped = true;
}

void WritableShards::close_shards() {
  for (const auto& weak : opened_) {
    if (const auto group = weak.lock()) group->shards().close();
  }
  opened_.clear();
}

}  // namespace fsdp2x
