// Gathers and reductions over the memory of peers.
#include "engine/transport/device/peer_collectives.hpp"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <span>
#include <sstream>
#include <string>
#include <tuple>

#include "core/error.hpp"
#include "core/layout.hpp"
#include "engine/memory/storage.hpp"
#include "engine/torch/gil.hpp"

namespace fsdp2x {

namespace {

const std::byte* start_of(const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.const_data_ptr()); }

// The kept plan of `key`, or what `make` makes.
auto list_of(auto& plans, const auto& key, at::Device device, const auto& make) {
  auto found = plans.find(key);
  if (found == plans.end()) {
    found = plans.emplace(std::piecewise_construct, std::forward_as_tuple(key), std::forward_as_tuple(make(), device))
                .first;
  }
  return found->second.list();
}

}  // namespace

PeerCollectives::PeerCollectives(int rank, std::vector<int> ranks, PyRef share, double timeout_seconds, bool with_twins)
    : kernels_(with_twins),
      rank_(rank),
      world_(static_cast<int>(ranks.size())),
      ranks_(std::move(ranks)),
      share_(std::move(share)),
      timeout_seconds_(timeout_seconds) {
  if (!kernels_.exist()) {
    throw Error("fsdp2x: collectives over the memory of peers need CUDA kernels, and fsdp2x was built without nvcc");
  }
  if (world_ < 1 || world_ > cuda::kMaxRanks || rank < 0 || rank >= world_) {
    throw Error("fsdp2x: collectives over the memory of peers serve 1 to " + std::to_string(cuda::kMaxRanks) +
                " ranks of a group; this is rank " + std::to_string(rank) + " of " + std::to_string(world_));
  }
  // Pinned memory has the same address on the device.
  missing_ = at::zeros({world_}, at::TensorOptions().dtype(at::kInt).pinned_memory(!with_twins));
}

// --- memory ---

size_t PeerCollectives::Memory::offset_of(const at::Tensor& tensor) const {
  return static_cast<size_t>(start_of(tensor) - start_of(own));
}

at::Tensor PeerCollectives::allocate(size_t bytes) {
  auto memory = std::make_shared<Memory>();
  memory->pad_offset = align_up(std::max<size_t>(bytes, 1));
  const size_t total = align_up(memory->pad_offset + static_cast<size_t>(world_) * sizeof(uint32_t));
  const PyRef shared = PyRef::steal(PyObject_CallFunction(share_.get(), "n", static_cast<Py_ssize_t>(total)));
  PyObject *tensor = nullptr, *addresses = nullptr, *mapping = nullptr;
  if (!shared || !PyArg_ParseTuple(shared.get(), "OO!O", &tensor, &PyList_Type, &addresses, &mapping)) {
    throw_python_error();
  }
  memory->own = THPVariable_Unpack(tensor);
  memory->mapping = PyRef::borrow(mapping);
  for (Py_ssize_t peer = 0; peer < PyList_GET_SIZE(addresses); ++peer) {
    void* address = PyLong_AsVoidPtr(PyList_GET_ITEM(addresses, peer));
    if (PyErr_Occurred() != nullptr) throw_python_error();
    memory->bases.push_back(static_cast<std::byte*>(address));
  }
  if (memory->bases.size() != static_cast<size_t>(world_) || memory->own.nbytes() < total) {
    throw Error("fsdp2x: shared memory of " + std::to_string(memory->own.nbytes()) + " bytes on " +
                std::to_string(memory->bases.size()) + " ranks, expected " + std::to_string(total) + " on " +
                std::to_string(world_));
  }
  if (!has_given_up_.defined()) has_given_up_ = at::zeros({1}, memory->own.options().dtype(at::kInt));
  std::erase_if(memories_, [](const auto& known) { return known.expired(); });
  memories_.push_back(memory);
  const at::Tensor& own = memory->own;
  return at::from_blob(
      own.data_ptr(), {static_cast<int64_t>(bytes)}, [memory](void*) {}, own.options(), own.device());
}

PeerCollectives::Memory& PeerCollectives::memory_of(const at::Tensor& tensor, const char* what) {
  for (const auto& known : memories_) {
    const auto memory = known.lock();
    if (!memory) continue;
    const std::byte* const begin = start_of(memory->own);
    if (start_of(tensor) >= begin && start_of(tensor) + tensor.nbytes() <= begin + memory->pad_offset) return *memory;
  }
  throw Error(std::string("fsdp2x: ") + what + " of " + std::to_string(tensor.nbytes()) +
              " bytes does not lie in memory that the peers can read");
}

// --- waiting for each other ---

void PeerCollectives::check() const {
  // The device writes them at any time.
  const auto* words = static_cast<const volatile int32_t*>(missing_.const_data_ptr());
  std::string names;
  for (int peer = 0; peer < world_; ++peer) {
    if (words[peer] != 0) names += (names.empty() ? "" : ", ") + std::to_string(ranks_[static_cast<size_t>(peer)]);
  }
  if (names.empty()) return;
  std::ostringstream message;
  message << "fsdp2x: rank " << ranks_[static_cast<size_t>(rank_)] << " waited " << timeout_seconds_ << " s for "
          << (names.find(',') == std::string::npos ? "rank " : "ranks ") << names
          << " in a collective over the peers' memory, so what it read is not valid, nor are gradients and outputs of "
             "this step: a rank has failed, or the ranks run their units in different orders. Look for the first error "
             "among the ranks, and begin again in new processes";
  throw Error(message.str());
}

void PeerCollectives::barrier(Memory& memory, cuda::Stream stream) {
  if (kernels_->is_capturing(stream)) {
    throw Error(
        "fsdp2x: collectives over the peers' memory cannot be captured into a CUDA graph, because a replay would not "
        "wait for the peers; capture with set_symm_mem_for_comm(\"NCCL\"), or without");
  }
  cuda::SignalTable signals;
  signals.num_ranks = world_;
  signals.rank = rank_;
  for (int peer = 0; peer < world_; ++peer) {
    signals.pad[peer] = reinterpret_cast<uint32_t*>(memory.bases[static_cast<size_t>(peer)] + memory.pad_offset);
  }
  if (++memory.epoch == 0) ++memory.epoch;
  const cuda::Patience patience = {static_cast<uint64_t>(timeout_seconds_ * 1e9),
                                   static_cast<uint32_t*>(has_given_up_.data_ptr()),
                                   static_cast<uint32_t*>(missing_.data_ptr())};
  kernels_->peer_barrier(signals, memory.epoch, patience, stream);
}

cuda::PeerTable PeerCollectives::table_of(const Memory& memory, size_t offset) const {
  cuda::PeerTable table;
  table.num_ranks = world_;
  for (int peer = 0; peer < world_; ++peer) table.base[peer] = memory.bases[static_cast<size_t>(peer)] + offset;
  return table;
}

// --- gathers ---

cuda::CopyList PeerCollectives::gather_list(const std::vector<Piece>& pieces, at::Device device) {
  return list_of(gather_plans_, pieces, device, [&] {
    std::vector<Copy> parts;  // of rank 0
    for (const auto& [offset, bytes] : pieces) {
      const DType unit = (offset | bytes) % dtype_bytes(DType::f32) == 0 ? DType::f32 : DType::byte;
      const auto numel = static_cast<int64_t>(bytes / dtype_bytes(unit));
      parts.push_back({offset, offset, 1, numel, numel, numel, unit, unit});
    }
    return cuda::plan_copies(parts);
  });
}

void PeerCollectives::all_gather(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  check();
  std::vector<std::pair<Memory*, std::vector<Piece>>> parts;  // a launch for each allocation
  for (size_t i = 0; i < outputs.size(); ++i) {
    const size_t bytes = inputs.at(i).nbytes();
    if (outputs[i].nbytes() != bytes * static_cast<size_t>(world_) ||
        start_of(inputs[i]) != start_of(outputs[i]) + static_cast<size_t>(rank_) * bytes) {
      throw Error("fsdp2x: a gather over the peers' memory of " + std::to_string(bytes) + " into " +
                  std::to_string(outputs[i].nbytes()) + " bytes: rank " + std::to_string(rank_) +
                  "'s part must lie in its place among " + std::to_string(world_));
    }
    Memory& memory = memory_of(outputs[i], "the output of a gather");
    auto part = std::find_if(parts.begin(), parts.end(), [&](const auto& one) { return one.first == &memory; });
    if (part == parts.end()) part = parts.insert(parts.end(), {&memory, {}});
    part->second.emplace_back(memory.offset_of(outputs[i]), bytes);
  }
  if (parts.empty()) return;
  const at::Device device = outputs[0].device();
  const DeviceScope scope(device);
  std::vector<cuda::CopyList> lists;
  for (const auto& [memory, pieces] : parts) lists.push_back(gather_list(pieces, device));
  const ReleaseGil released;
  for (const auto& [memory, pieces] : parts) barrier(*memory, scope.stream());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Memory& memory = *parts[i].first;
    kernels_->all_gather_peer(lists[i], table_of(memory, 0), rank_, memory.own.data_ptr(), scope.stream());
  }
  for (const auto& [memory, pieces] : parts) barrier(*memory, scope.stream());
}

// --- reductions ---

cuda::ReduceList PeerCollectives::reduce_list(DType type, int64_t numel, at::Device device) {
  return list_of(reduce_plans_, std::pair(type, numel), device, [&] {
    cuda::ReduceSegment segment;
    segment.src_offset = rank_ * numel * static_cast<int64_t>(dtype_bytes(type));
    segment.numel = numel;
    segment.src = segment.dst = type;
    return cuda::make_plan(std::vector{segment});
  });
}

// By torch: the kernels compute in fp32.
void PeerCollectives::reduce_in_f64(const at::Tensor& output, const cuda::PeerTable& peers, bool average) const {
  at::Tensor sum;
  for (const void* base : std::span(peers.base).first(static_cast<size_t>(world_))) {
    void* const part = static_cast<double*>(const_cast<void*>(base)) + rank_ * output.numel();
    const at::Tensor rows = at::from_blob(
        part, {output.numel()}, [](void*) {}, output.options(), output.device());
    sum = sum.defined() ? sum.add_(rows) : rows.clone();
  }
  if (average) sum.div_(world_);
  output.view({-1}).copy_(sum);
}

void PeerCollectives::reduce_scatter(const at::Tensor& output, const at::Tensor& input, bool average) {
  check();
  const DType type = engine_dtype(input.scalar_type());
  if (output.scalar_type() != input.scalar_type() || input.numel() != output.numel() * world_ || type == DType::byte) {
    throw Error("fsdp2x: a reduction over the peers' memory of " + std::to_string(input.numel()) + " elements of " +
                c10::toString(input.scalar_type()) + " into " + std::to_string(output.numel()) + " of " +
                c10::toString(output.scalar_type()) + "; expected one part of " + std::to_string(world_) +
                ", of the same floating-point type");
  }
  Memory& memory = memory_of(input, "the input of a reduction");
  const at::Device device = input.device();
  const DeviceScope scope(device);
  const bool has_kernel = cuda::computes(type);
  const cuda::ReduceList list = has_kernel ? reduce_list(type, output.numel(), device) : cuda::ReduceList();
  const cuda::PeerTable peers = table_of(memory, memory.offset_of(input));
  cuda::TargetTable target;
  target.base[0] = output.data_ptr();
  cuda::ReduceArgs args;
  if (average) args.scale = cuda::divide_by(world_);
  const ReleaseGil released;
  barrier(memory, scope.stream());
  if (has_kernel) {
    kernels_->reduce(list, peers, target, args, scope.stream());
  } else {
    reduce_in_f64(output, peers, average);
  }
  barrier(memory, scope.stream());
}

}  // namespace fsdp2x
