// Collectives without a library between the ranks: everybody reads the memory of his peers, mapped into his own address
// space, through the peer kernels of ring cuda. In place of torch.distributed's where a user asks for it; to the device
// transport they look the same.
//
//   allocation, the same on every rank:   | bytes | pad: a word per rank |
//   a collective, on the current stream:  barrier | read the peers | barrier
//
// The first barrier tells that everybody's part is written, the second that nobody reads any more. Each allocation has
// a pad of its own, so ranks that take different allocations for a collective wait for each other in vain, and time
// out, before anything wrong is read. A rank that has timed out tells its peers nothing more, so that those who come
// late time out as well, in the same step.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/memory/device_kernels.hpp"
#include "engine/torch/py_ref.hpp"

namespace fsdp2x {

// Every function needs the GIL, and gives it up while twins wait for each other.
class PeerCollectives {
 public:
  // `share(bytes)`: zeros on every rank, as (this rank's tensor of bytes, the addresses of every rank's in rank order,
  // what keeps them valid); collective, and every rank's are zero when it returns.
  // `ranks`: those of the group, by their global numbers, for messages; `rank` is one's place among them.
  PeerCollectives(int rank, std::vector<int> ranks, PyRef share, double timeout_seconds, bool with_twins);

  // Memory that peers can read, for collectives on one stream. Collective; freed with the tensor.
  at::Tensor allocate(size_t bytes);
  // Of each pair: `inputs[i]` is this rank's part of `outputs[i]`, where it lies, and is there already.
  void all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);
  // output = this rank's part of the sum of every rank's `input`, or of their mean: in rank order, in fp32 (f64: in
  // f64), rounded once. `input` lies in allocated memory, `output` anywhere.
  void reduce_scatter(const at::Tensor& output, const at::Tensor& input, bool average);
  // Throws Error when a rank did not come in time to a collective whose end the host has waited for, and names it.
  void check() const;

 private:
  struct Memory {
    at::Tensor own;
    std::vector<std::byte*> bases;  // by rank
    PyRef mapping;                  // keeps the bases valid
    size_t pad_offset = 0;
    uint32_t epoch = 0;
    size_t offset_of(const at::Tensor& tensor) const;
  };
  using Piece = std::pair<size_t, size_t>;  // offset of an output, bytes of a rank's part
  // Uploaded plans, made at the first launch.
  template <class Key, class Segment>
  using Plans = std::map<Key, UploadedPlan<Segment>>;
  Memory& memory_of(const at::Tensor& tensor, const char* what);
  void barrier(Memory& memory, cuda::Stream stream);
  cuda::PeerTable table_of(const Memory& memory, size_t offset) const;
  cuda::CopyList gather_list(const std::vector<Piece>& pieces, at::Device device);
  cuda::ReduceList reduce_list(DType type, int64_t numel, at::Device device);
  void reduce_in_f64(const at::Tensor& output, const cuda::PeerTable& peers, bool average) const;
  DeviceKernels kernels_;
  int rank_, world_;
  std::vector<int> ranks_;
  PyRef share_;
  double timeout_seconds_;
  at::Tensor missing_;       // a word a rank of host memory that the device writes: see cuda::Patience
  at::Tensor has_given_up_;  // likewise, of the device
  std::vector<std::weak_ptr<Memory>> memories_;
  Plans<std::vector<Piece>, cuda::CopySegment> gather_plans_;
  Plans<std::pair<DType, int64_t>, cuda::ReduceSegment> reduce_plans_;
};

}  // namespace fsdp2x
