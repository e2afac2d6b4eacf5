// Places a group's parameters in the segment that a rank sends in a wire format: its rows, parameter by parameter.
//
//   | p0: codes | p0: scales | p1 (a vector): as it is | p2: codes | .. | tail |       every piece 64-byte aligned
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/layout.hpp"
#include "core/wire_format.hpp"

namespace fsdp2x {

struct WirePlace {
  bool travels = false;
  bool is_coded = false;     // in the wire format, false: in its own dtype
  size_t offset = 0;         // bytes from the start of a rank's segment
  size_t scales_offset = 0;  // likewise, for formats with scales
};

class WireLayout {
 public:
  // Returns the layout of gathered parameters. `format` applies to parameters of two or more dims with a floating
  // compute dtype of 32 or 16 bits. Norms and biases have few bytes, and their precision matters more.
  static WireLayout of_weights(const Layout& layout, WireFormat format);
  // Returns the layout of gradients that are reduced in fp32, followed by `tail_bytes` in their own dtype.
  static WireLayout of_gradients(const Layout& layout, WireFormat format, size_t tail_bytes);

  WireFormat format() const { return format_; }
  // Returns whether anything is coded. Otherwise everything is sent unchanged.
  bool has_codes() const;
  const std::vector<WirePlace>& places() const { return places_; }
  size_t tail_offset() const { return tail_offset_; }
  size_t segment_bytes() const { return segment_bytes_; }

 private:
  WireLayout(const Layout& layout, WireFormat format, bool of_gradients, size_t tail_bytes);

  WireFormat format_;
  std::vector<WirePlace> places_;
  size_t tail_offset_ = 0;
  size_t segment_bytes_ = 0;
};

// Returns the elements of `rank`'s rows of a parameter.
int64_t rows_numel(const ParamShape& shape, int world, int rank);

// The rows of a gathered parameter on one rank.
struct WireRows {
  size_t param = 0;
  size_t segment_offset = 0;  // of the rank's segment
  Copy copy;                  // from the beginning of its piece to the slot
};

// Returns those with any element, of all ranks.
std::vector<WireRows> wire_rows(const Layout& layout, const WireLayout& wire);

}  // namespace fsdp2x
