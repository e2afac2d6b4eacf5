// The gradient pool of a unit: memory for the sharded gradients, taken when the first reduction of a step arrives and
// given back when nobody holds a gradient any more.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "core/collective_order.hpp"
#include "core/layout.hpp"
#include "engine/params/param.hpp"

namespace fsdp2x {

// Free blocks of all units of one root, by size and kind of memory. Those of the host are kept for the next step,
// unless a transport keeps nothing either; those of a device only until its lanes have met again, at the end of a
// backward: their allocator keeps memory itself, and has it for activations meanwhile.
class BlockPool {
 public:
  at::Tensor take(size_t bytes, const at::TensorOptions& memory);
  // `memory`: as it was taken. `stays`: beyond the next end_loans.
  void give_back(at::Tensor block, const at::TensorOptions& memory, bool stays = true);
  void clear() { free_.clear(); }
  // Frees those that are not kept: everything that was done with them is in the order of the compute lane now. Also
  // frees those that several backwards have left: freezing may have changed the size that their unit takes.
  void end_loans();
  // Keeps memory that nobody may take until the next end_loans: a stream may still write to it.
  void retire(at::Tensor memory) { retired_.push_back(std::move(memory)); }
  void keep_nothing() { keeps_ = false; }
  size_t num_allocations() const { return num_allocations_; }

 private:
  using Kind = std::tuple<c10::DeviceType, bool, size_t>;  // pinned or not, bytes
  static Kind kind_of(size_t bytes, const at::TensorOptions& memory);

  struct Block {
    at::Tensor memory;
    bool stays = true;
    size_t round = 0;  // when it was given back
  };
  // Models that train two halves alternately keep the blocks of both.
  static constexpr size_t kIdleRounds = 3;

  bool keeps_ = true;
  std::multimap<Kind, Block> free_;
  std::vector<at::Tensor> retired_;
  size_t round_ = 0;        // backwards that have taken blocks
  bool was_taken_ = false;  // since the round began
  size_t num_allocations_ = 0;
};

// Counted since the root was made; read by tests and by describe().
struct Counters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t wire_encodings = 0;  // of this rank's weights, in a wire format
  uint64_t parameter_stores = 0;
  uint64_t python_calls = 0;  // entries into the interpreter other than parameter stores; user hooks are not counted
};

// What the groups below one root share; the root's.
struct Commons {
  BlockPool blocks;
  Counters counters;
  Pass pass;                              // that runs now
  std::atomic<bool> has_stepped = false;  // an optimizer, on parameters of the groups, since the last pass began
};

// Where the reduction of one parameter goes.
struct GradientTarget {
  void* data = nullptr;     // this rank's rows, contiguous, dtype of `.grad`
  bool accumulate = false;  // `.grad` is ours and holds a value
  bool is_new = false;      // the memory was just allocated
  at::Tensor foreign;       // memory for a sum that is added to a `.grad` that is not ours
};

// By parameter; null: no rank has a gradient of it.
using GradientTargets = std::vector<std::optional<GradientTarget>>;

class Gradients {
 public:
  // make_gradient(spec, local tensor) -> DTensor and add_to_foreign(parameter, local tensor) are Python callables.
  // `memory`: where gradients lie.
  Gradients(const Layout& layout, std::vector<Param>& params, at::TensorOptions memory, PyRef make_gradient,
            PyRef add_to_foreign);

  // Whose blocks it takes, from now on.
  void use(std::shared_ptr<Commons> commons) { commons_ = std::move(commons); }
  // Whether its blocks are kept between steps.
  void set_blocks_stay(bool stay) { blocks_stay_ = stay; }
  // Whether reductions end in the pool, which then has room for their flags where the dtypes permit it.
  void set_reduces_in_place(bool in_place) { reduces_in_place_ = in_place; }
  // The whole pool, laid out for `reduced`, to write this step's gradients into. None: one of these parameters has a
  // gradient, somebody holds the last one, or the pool is laid out for others.
  std::optional<at::Tensor> take_pool(const Gil& gil, const std::shared_ptr<const Layout>& reduced);
  // Decides how the gradient of `param` is written; takes memory when there is none.
  GradientTarget prepare(const Gil& gil, size_t param);
  // Makes the written gradient visible as `.grad`.
  void attach(const Gil& gil, size_t param, const GradientTarget& target);
  // Gives the block back when every `.grad` is None and nobody else holds one of our gradients.
  // Returns whether it was given back now.
  bool release_if_unused(const Gil& gil);
  // After parameters moved or changed their dtype: forget every gradient tensor.
  void forget();
  uint64_t num_python_calls() const { return num_python_calls_; }
  const at::Tensor& pool() const { return block_; }  // undefined: no gradient is in it
  // Memory that is no gradient, of the same kind.
  at::Tensor take_block(size_t bytes) { return commons_->blocks.take(bytes, memory_); }
  // Blocks that were new, of the whole root.
  size_t num_allocations() const { return commons_->blocks.num_allocations(); }
  void give_back(at::Tensor block) { commons_->blocks.give_back(std::move(block), memory_); }
  size_t pool_bytes() const { return block_.defined() ? block_.nbytes() : 0; }

 private:
  // Reference counts of a gradient that only we hold, taken when it was made.
  struct Counts {
    size_t tensor = 0, local = 0, storage = 0;
    Py_ssize_t tensor_object = 0, local_object = 0;
  };
  struct Entry {
    at::Tensor tensor;  // DTensor
    at::Tensor local;
    Counts alone;
    bool in_block = false;
  };
  Counts count(const Gil& gil, const Entry& entry) const;
  bool held_elsewhere(const Gil& gil, const Entry& entry) const;
  bool has_own_gradient(size_t param) const;
  void make(const Gil& gil, size_t param, const at::Tensor& memory, size_t offset, bool in_block);
  // The layout of what trains now.
  std::shared_ptr<const Layout> current_layout() const;
  // Takes a block for the gradients of `places`. Gradients with memory of their own move in, unless they are `.grad`.
  void open_block(std::shared_ptr<const Layout> places);

  // Callables of Python.
  struct Calls {
    PyRef make_gradient, add_to_foreign;
  };

  const Layout& layout_;
  std::vector<Param>& params_;
  at::TensorOptions memory_;
  std::shared_ptr<const Layout> places_;  // of the last block; null: there was none
  bool reduces_in_place_ = false;
  bool blocks_stay_ = true;
  bool is_lent_ = false;  // somebody held a gradient in the block when a new one was written
  std::shared_ptr<Commons> commons_;
  Calls calls_;
  uint64_t num_python_calls_ = 0;
  at::Tensor block_;
  std::vector<Entry> entries_;
};

}  // namespace fsdp2x
