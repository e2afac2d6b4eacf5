// From an optimizer's parameters to the groups whose shards they are.
#include "engine/schedule/writable_shards.hpp"

#include <span>
#include <unordered_map>

#include "engine/memory/local_tensor.hpp"
#include "engine/memory/storage.hpp"
#include "engine/schedule/unit.hpp"
#include "engine/transport/transport.hpp"

namespace fsdp2x {

namespace {

// Borrowed. Somebody's optimizer may keep something else under that name: it steps as ever.
std::span<PyObject* const> items(PyObject* list) {
  if (list == nullptr || !PyList_Check(list)) return {};
  return {reinterpret_cast<PyListObject*>(list)->ob_item, static_cast<size_t>(PyList_GET_SIZE(list))};
}

}  // namespace

WritableShards::WritableShards(PyObject* param_groups) {
  static PyObject* const params_name = interned("params");
  std::unordered_map<const c10::StorageImpl*, std::shared_ptr<ParamGroup>> resting;
  for (auto& group : Unit::live_groups()) {
    if (group->shards().state() != ShardState::resting) continue;
    resting.emplace(group->pool().storage().unsafeGetStorageImpl(), std::move(group));
  }
  for (PyObject* const group : items(param_groups)) {
    for (PyObject* const param : items(PyDict_Check(group) ? PyDict_GetItem(group, params_name) : nullptr)) {
      if (resting.empty()) return;
      const LocalTensor local = local_tensor(param);
      if (!local.tensor.defined() || !local.tensor.has_storage()) continue;
      const auto found = resting.find(pool_of(*local.tensor.storage().unsafeGetStorageImpl()));
      if (found == resting.end()) continue;
      if (found->second->transport().open_shards(*found->second)) opened_.push_back(found->second);
      resting.erase(found);
    }
  }
}

void WritableShards::close() {
  for (const auto& weak : opened_) {
    if (const auto group = weak.lock()) group->shards().close();
  }
  opened_.clear();
}

}  // namespace fsdp2x
