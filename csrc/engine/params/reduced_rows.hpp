// What a reduction has come to: this rank's rows, on their way to `.grad`.
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

// A transport returns it, the root writes it once or drops it. What it holds of the transport goes back with it.
class ReducedRows {
 public:
  ReducedRows() = default;
  virtual ~ReducedRows() = default;
  ReducedRows(const ReducedRows&) = delete;
  ReducedRows& operator=(const ReducedRows&) = delete;

  // By parameter: whether any rank has a gradient of it.
  virtual std::vector<uint8_t> has_gradient() = 0;
  // The user's, on what was summed.
  virtual void run_hook(const Gil& gil, const PyRef& hook) = 0;
  // Of a group whose gradients are the host's: begins to bring the rows there.
  virtual std::unique_ptr<ReducedRows> to_host(const Gil& /*gil*/) { return nullptr; }
  // Once. Until the rows are gone, the current stream is the one on which the gradients are complete.
  virtual void write(const GradientTargets& targets) = 0;
  // The block of the gradients was given back right behind that.
  virtual void note_block_given_back() {}
  // Rows that may be all-reduced before they are written; null: these are not.
  virtual SegmentRows* segment() { return nullptr; }
};

// In memory of the CPU: a segment, the flags of its parameters behind the rows.
class SegmentRows final : public ReducedRows {
 public:
  // `layout`: of the segment, see Layout::flagged_segment_bytes. `divisor`: what the sum is still to be divided by.
  SegmentRows(at::Tensor segment, std::shared_ptr<const Layout> layout, DType type, double divisor);
  // No gradient.
  static std::unique_ptr<SegmentRows> zeros(std::shared_ptr<const Layout> layout, DType type, double divisor);

  // Rows and flags.
  at::Tensor values() const;
  // Those of one parameter, flat.
  at::Tensor rows(size_t param) const;
  // They become zeros. `drops`: and no gradient.
  void clear(size_t param, bool drops);
  // False: the segments are of different parameters.
  bool add(const SegmentRows& other);

  std::vector<uint8_t> has_gradient() override;
  void run_hook(const Gil& gil, const PyRef& hook) override;
  void write(const GradientTargets& targets) override;
  SegmentRows* segment() override { return this; }

 private:
  at::Tensor flags() const;

  at::Tensor memory_;
  std::shared_ptr<const Layout> layout_;
  DType type_;
  double divisor_;
};

// The rows as the segment that they are. Throws where they are not: transports without streams reduce replicated groups
// into segments.
std::unique_ptr<SegmentRows> to_segment(std::unique_ptr<ReducedRows> rows);

// Calls `hook` with `rows`; throws what it raises.
void call_hook(const Gil& gil, const PyRef& hook, const at::Tensor& rows);

}  // namespace fsdp2x
