// One parameter of a unit: its sharded and unsharded nn.Parameter, its owners, and the swap between the two.
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
  // `unsharded`: a tensor whose storage this class moves, or a wrapper (DTensor) around `local`, which is such a
  // tensor. Both are null for a parameter with an all-gather extension: Python makes its unsharded tensor and hands it
  // over.
  Param(std::string fqn, PyRef sharded, PyRef unsharded, PyRef local, PyRef gradient_spec, std::vector<Owner> owners);

  const std::string& fqn() const { return fqn_; }
  // Changes the name while the parameter is sharded, since its poison message contains the name.
  void rename(std::string fqn);
  // Return the tensors behind the Python objects. They are looked up at each use, because torch.utils.swap_tensors may
  // change what an object holds.
  const at::Tensor& sharded() const;
  const at::Tensor& unsharded() const;
  const at::Tensor& local() const;  // local tensor of the unsharded one
  PyObject* sharded_object() const { return sharded_.get(); }
  PyObject* unsharded_object() const { return unsharded_.get(); }
  PyObject* gradient_spec() const { return gradient_spec_.get(); }

  // Sets the unsharded tensor of a parameter with an all-gather extension, at every gather.
  void set_unsharded_object(PyRef unsharded);
  // Follows load_state_dict(assign=True), which registers another Parameter object.
  void set_sharded_object(PyRef sharded) { sharded_ = std::move(sharded); }
  void set_gradient_spec(PyRef spec) { gradient_spec_ = std::move(spec); }

  // Points the unsharded storage into the slot (an extension has separate memory). Copies the sharded parameter's
  // requires_grad.
  void fill(void* data);
  // Takes the memory away, so that a later access throws a message with the parameter's name. Also drops memory that
  // the user gave to the unsharded parameter.
  void empty(const Gil& gil);
  // Returns whether it trains now. `place` is its place in the group's layout.
  bool trains(const ParamPlace& place) const { return place.shape.trainable && sharded().requires_grad(); }
  // Returns whether the user has changed `grad_dtype` since the layout was made, which has its place, on the sharded or
  // the gathered parameter.
  bool has_other_grad_dtype(const ParamPlace& place) const;
  // Copies requires_grad to `registered`, which modules register instead of the sharded parameter.
  void give_requires_grad(const at::Tensor& registered);
  // Copies requires_grad back to the sharded parameter if it was changed on `registered` since.
  void take_requires_grad(const at::Tensor& registered);
  // Returns whether the unsharded tensor still has the memory that this class moves.
  bool has_own_memory() const;
  // Returns whether a change of the gathered parameter was lost since the last call.
  bool take_lost() { return std::exchange(is_lost_, false); }
  // Takes the memory away permanently, in a forked child.
  void forbid();

  bool has_storage() const { return storage_ != nullptr; }  // false: an extension keeps its memory
  // Returns the object in the first module that does not register `expected`. The reference is borrowed. None means
  // that the module registers nothing under the name, null that all modules register `expected`.
  PyObject* registered_instead_of(const Gil& gil, PyObject* expected) const;
  void add_owner(Owner owner) { owners_.push_back(std::move(owner)); }
  // Forgets owners whose modules have deleted the name.
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
  at::Tensor memory_;           // views the storage of the local unsharded tensor, to restore it
  bool requires_grad_ = false;  // what registered tensors got while the unit is not sharded
  bool is_lost_ = false;
  PyRef gradient_spec_;
  std::vector<Owner> owners_;
  Poison poison_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;  // storage of the local unsharded tensor, null for an extension
  at::Device device_;
};

}  // namespace fsdp2x
