// One parameter of a unit: its sharded and unsharded nn.Parameter, who owns it, and the swap between the two.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/py_ref.hpp"
#include "engine/torch/torch_compat.hpp"

namespace fsdp2x {

// A place in the module tree where the parameter is registered. Tied parameters have several.
struct Owner {
  PyRef parameters;   // the module's `_parameters` dict
  PyRef name;         // str
  PyRef weak_module;  // weakref of a module whose class overrides __setattr__ (an LSTM), else null
};

// Created by Python once per parameter; lives as long as the unit.
class Param {
 public:
  // `unsharded`: a tensor whose storage this moves, or a wrapper (DTensor) around `local`, which is such a tensor. Both
  // null for a parameter with an all-gather extension: Python makes its unsharded tensor and hands it over.
  Param(std::string fqn, PyRef sharded, PyRef unsharded, PyRef local, PyRef gradient_spec, std::vector<Owner> owners);

  const std::string& fqn() const { return fqn_; }
  // While it is sharded: its poison holds the name.
  void rename(std::string fqn);
  // The tensors behind the Python objects. Looked up at each use: torch.utils.swap_tensors may change what an object
  // holds.
  const at::Tensor& sharded() const;
  const at::Tensor& unsharded() const;
  const at::Tensor& local() const;  // of the unsharded one
  PyObject* sharded_object() const { return sharded_.get(); }
  PyObject* unsharded_object() const { return unsharded_.get(); }
  PyObject* gradient_spec() const { return gradient_spec_.get(); }

  // Of a parameter with an all-gather extension, at every gather.
  void set_unsharded_object(PyRef unsharded);
  // load_state_dict(assign=True) registers another Parameter object.
  void set_sharded_object(PyRef sharded) { sharded_ = std::move(sharded); }
  void set_gradient_spec(PyRef spec) { gradient_spec_ = std::move(spec); }

  // Points the unsharded storage into the slot (an extension has its own memory) and follows the sharded parameter's
  // requires_grad.
  void fill(void* data);
  // Takes the memory away; a later access throws a message that names the parameter. Other memory that somebody gave to
  // the unsharded parameter goes.
  void empty(const Gil& gil);
  // Whether it trains now; `place`: its own in the group's layout.
  bool trains(const ParamPlace& place) const { return place.shape.trainable && sharded().requires_grad(); }
  // `registered`, which modules register instead of the sharded parameter, trains as that does.
  void give_requires_grad(const at::Tensor& registered);
  // Whether it trains has been changed on `registered` since: the sharded parameter follows.
  void take_requires_grad(const at::Tensor& registered);
  // Whether the unsharded tensor still has the memory that this moves.
  bool has_own_memory() const;
  // Whether a change of the gathered parameter was lost since the last call.
  bool take_lost() { return std::exchange(is_lost_, false); }
  // The same in a forked child, for good.
  void forbid();

  bool has_storage() const { return storage_ != nullptr; }  // false: an extension keeps its memory
  // What the first module registers that does not register `expected`: a borrowed reference, None if it registers
  // nothing under the name; null: all of them do.
  PyObject* registered_instead_of(const Gil& gil, PyObject* expected) const;
  void add_owner(Owner owner) { owners_.push_back(std::move(owner)); }
  // Forgets the places whose modules have deleted the name.
  void forget_missing_owners(const Gil& gil);
  void register_sharded(const Gil& gil) const { store(gil, sharded_.get()); }
  void register_unsharded(const Gil& gil) const { store(gil, unsharded_.get()); }
  void register_object(const Gil& gil, PyObject* parameter) const { store(gil, parameter); }

  compat::NodePtr<compat::Node> accumulator;  // holds our post hook, so it must not die between steps

 private:
  void store(const Gil& gil, PyObject* parameter) const;
  bool is_replaced(const Gil& gil) const;

  std::string fqn_;
  PyRef sharded_;
  PyRef unsharded_;
  PyRef local_;                 // null: `unsharded_` itself
  at::Tensor memory_;           // over the storage of the local unsharded tensor, to restore it
  bool requires_grad_ = false;  // given to what modules register while the unit is not sharded
  bool is_lost_ = false;
  PyRef gradient_spec_;
  std::vector<Owner> owners_;
  Poison poison_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;  // of the local unsharded tensor; null for an extension
  at::Device device_;
};

}  // namespace fsdp2x
