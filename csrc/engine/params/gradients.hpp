// The gradient pool of a unit: memory for the sharded gradients. It is taken when the first reduction of a step arrives
// and given back when no gradient in it is referenced any more.
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

// Free blocks of all units of one root, by size and kind of memory. CPU blocks are kept for the next step, unless a
// transport keeps nothing. Device blocks are kept only until the streams join at the end of a backward: the device
// allocator caches memory itself and can use it for activations meanwhile.
class BlockPool {
 public:
  at::Tensor take(size_t bytes, const at::TensorOptions& memory);
  // `memory`: the options that the block was taken with. `stays`: keep it beyond the next end_loans.
  void give_back(at::Tensor block, const at::TensorOptions& memory, bool stays = true);
  void clear() { free_.clear(); }
  // Frees the blocks that are not kept: all their uses are ordered before the compute stream's next work. Also frees
  // blocks that several backwards did not use, since freezing may have changed the size that their unit takes.
  void end_loans();
  // Holds memory until the next end_loans, because a stream may still write to it.
  void retire(at::Tensor memory) { retired_.push_back(std::move(memory)); }
  void keep_nothing() { keeps_ = false; }
  size_t num_allocations() const { return num_allocations_; }

 private:
  using Kind = std::tuple<c10::DeviceType, bool, size_t>;  // pinned or not, bytes
  static Kind kind_of(size_t bytes, const at::TensorOptions& memory);

  struct Block {
    at::Tensor memory;
    bool stays = true;
    size_t round = 0;  // the round in which it was given back
  };
  // Models that train two halves alternately keep the blocks of both.
  static constexpr size_t kIdleRounds = 3;

  bool keeps_ = true;
  std::multimap<Kind, Block> free_;
  std::vector<at::Tensor> retired_;
  size_t round_ = 0;        // backwards that have taken blocks
  bool was_taken_ = false;  // whether a block was taken since the round began
  size_t num_allocations_ = 0;
};

// Counters since the root was made, read by tests and by describe().
struct Counters {
  uint64_t gathers = 0;
  uint64_t reductions = 0;
  uint64_t wire_encodings = 0;  // of this rank's weights, in a wire format
  uint64_t parameter_stores = 0;
  uint64_t python_calls = 0;  // entries into the interpreter, without parameter stores and user hooks
};

// State that the groups below one root share. The root owns it.
struct Commons {
  BlockPool blocks;
  Counters counters;
  Pass pass;                              // the pass that runs now
  std::atomic<bool> has_stepped = false;  // whether an optimizer stepped parameters of the groups since the last pass
                                          // began
};

// Destination of one parameter's reduction.
struct GradientTarget {
  void* data = nullptr;     // this rank's rows, contiguous, dtype of `.grad`
  bool accumulate = false;  // `.grad` lies in our memory and holds a value
  bool is_new = false;      // the memory was just allocated
  at::Tensor foreign;       // memory for a sum that is added to a `.grad` in the user's memory
};

// By parameter. Null: no rank has a gradient of it.
using GradientTargets = std::vector<std::optional<GradientTarget>>;

class Gradients {
 public:
  // make_gradient(spec, local tensor) -> DTensor and add_to_foreign(parameter, local tensor) are Python callables.
  // `memory` says where gradients lie.
  Gradients(const Layout& layout, std::vector<Param>& params, at::TensorOptions memory, PyRef make_gradient,
            PyRef add_to_foreign);

  // Sets the shared state whose blocks it takes.
  void use(std::shared_ptr<Commons> commons) { commons_ = std::move(commons); }
  // Sets whether its blocks are kept between steps.
  void set_blocks_stay(bool stay) { blocks_stay_ = stay; }
  // Sets whether reductions end in the pool. The pool then has room for their flags if the dtypes permit it.
  void set_reduces_in_place(bool in_place) { reduces_in_place_ = in_place; }
  // Returns the whole pool, laid out for `reduced`, to write this step's gradients into. Returns none if one of these
  // parameters has a gradient, if the last one is still referenced, if the layout differs, or until end_reduction() if
  // it was taken: with manual finalization, a reduction is written some forwards later.
  std::optional<at::Tensor> take_pool(const Gil& gil, const std::shared_ptr<const Layout>& reduced);
  // Notes that what was written into the taken pool is about to be attached, or was dropped.
  void end_reduction() { is_taken_ = false; }
  // Decides how the gradient of `param` is written. Takes memory if there is none.
  GradientTarget prepare(const Gil& gil, size_t param);
  // Makes the written gradient visible as `.grad`.
  void attach(const Gil& gil, size_t param, const GradientTarget& target);
  // Gives the block back if every `.grad` is None, no reduction writes into it, and no gradient of ours is referenced
  // elsewhere.
  // Returns whether it was given back now.
  bool release_if_unused(const Gil& gil);
  // Forgets every gradient tensor, after parameters moved or changed their dtype.
  void forget();
  uint64_t num_python_calls() const { return num_python_calls_; }
  const at::Tensor& pool() const { return block_; }  // undefined: no gradient is in it
  // Takes memory of the same kind for something other than a gradient.
  at::Tensor take_block(size_t bytes) { return commons_->blocks.take(bytes, memory_); }
  // Returns the number of newly allocated blocks, over the whole root.
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
  // Returns the layout of the parameters that train now.
  std::shared_ptr<const Layout> current_layout() const;
  // Takes a block for the gradients of `places`. Gradients with separate memory move in, unless they are `.grad`.
  void open_block(std::shared_ptr<const Layout> places);

  // Python callables.
  struct Calls {
    PyRef make_gradient, add_to_foreign;
  };

  const Layout& layout_;
  std::vector<Param>& params_;
  at::TensorOptions memory_;
  std::shared_ptr<const Layout> places_;  // layout of the last block, null before the first
  bool reduces_in_place_ = false;
  bool blocks_stay_ = true;
  bool is_taken_ = false;  // a reduction writes into the pool
  bool is_lent_ = false;   // a gradient in the block was still referenced when a new one was written
  std::shared_ptr<Commons> commons_;
  Calls calls_;
  uint64_t num_python_calls_ = 0;
  at::Tensor block_;
  std::vector<Entry> entries_;
};

}  // namespace fsdp2x
