// The result of a reduction: this rank's rows, on their way to `.grad`.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "core/layout.hpp"
#include "engine/params/gradients.hpp"
#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

class SegmentRows;

// A transport returns it, and the root writes or drops it once. Its destructor returns the transport's memory.
class ReducedRows {
 public:
  ReducedRows() = default;
  virtual ~ReducedRows() = default;
  ReducedRows(const ReducedRows&) = delete;
  ReducedRows& operator=(const ReducedRows&) = delete;

  // Returns, by parameter, whether any rank has a gradient.
  virtual std::vector<uint8_t> has_gradient() = 0;
  // Runs the user's hook on the summed rows.
  virtual void run_hook(const Gil& gil, const PyRef& hook) = 0;
  // Begins to copy the rows to the host, for a group whose gradients stay there.
  virtual std::unique_ptr<ReducedRows> to_host(const Gil& /*gil*/) { return nullptr; }
  // Writes the rows, once. Until this object is gone, the current stream is the one on which the gradients are
  // complete.
  virtual void write(const GradientTargets& targets) = 0;
  // Notes that the block of the gradients was given back directly after write().
  virtual void note_block_given_back() {}
  // Returns rows that may be all-reduced before they are written, or null if these cannot.
  virtual SegmentRows* segment() { return nullptr; }
};

// One rank's packed gradients for the rows of this rank.
struct RowSource {
  const std::byte* segment = nullptr;
  const Layout* layout = nullptr;   // offsets and dtypes of the rows in the segment
  const uint8_t* filled = nullptr;  // by parameter, null: flags follow the rows
};

// Rows in a segment, which the flags of its parameters follow, or rows of each rank, which are summed when they are
// written or before anyone reads them.
class SegmentRows final : public ReducedRows {
 public:
  // `layout`: that of a segment, see Layout::flagged_segment_bytes. `divisor`: what remains to divide the sum by.
  SegmentRows(at::Tensor segment, std::shared_ptr<const Layout> layout, DType type, double divisor);
  // `sources`: of the ranks in their order. `memory`: freed when they are summed. `averages`: the sum is also divided
  // by the number of ranks.
  SegmentRows(std::vector<RowSource> sources, std::shared_ptr<void> memory, std::shared_ptr<const Layout> layout,
              DType type, double divisor, bool averages);
  // Sums now, and frees the memory of the ranks.
  void sum();
  // Makes rows without any gradient.
  static std::unique_ptr<SegmentRows> zeros(std::shared_ptr<const Layout> layout, DType type, double divisor);

  // Returns rows and flags.
  at::Tensor values();
  // Returns the rows of one parameter, flat.
  at::Tensor rows(size_t param);
  // Zeros the rows of one parameter. `drops`: also clears its flag, so that it has no gradient.
  void clear(size_t param, bool drops);
  // Returns false if the segments are of different parameters.
  bool add(SegmentRows& other);

  std::vector<uint8_t> has_gradient() override;
  void run_hook(const Gil& gil, const PyRef& hook) override;
  void write(const GradientTargets& targets) override;
  SegmentRows* segment() override { return this; }

 private:
  class Sums;
  // Makes `segment` the rows.
  void keep(at::Tensor segment);
  at::Tensor flags();

  at::Tensor segment_;  // undefined: the rows are in `sources_`
  std::vector<RowSource> sources_;
  std::shared_ptr<void> memory_;
  std::shared_ptr<const Layout> layout_;
  DType type_;
  double divisor_;
  bool averages_ = false;
};

// Returns the rows as their segment. Throws if they are none: transports without streams reduce replicated groups into
// segments.
std::unique_ptr<SegmentRows> to_segment(std::unique_ptr<ReducedRows> rows);

// Calls `hook` with `rows` and throws what it raises.
void call_hook(const Gil& gil, const PyRef& hook, const at::Tensor& rows);

}  // namespace fsdp2x
