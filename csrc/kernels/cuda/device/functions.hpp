// The entries of the device's table, each defined in one .cu file.
#pragma once

#include "kernels/cuda/kernels.hpp"

namespace fsdp2x::cuda::device {

void copy(const CopyList& list, const void* src, void* dst, Stream stream);
void pack_gradients(const PackList& list, const PackTable& grads, void* dst, Stream stream);
void reduce(const ReduceList& list, const void* source, const TargetTable& targets, const ReduceArgs& args,
            Stream stream);
void sum_squares(const ReduceList& list, const TargetTable& targets, double* tile_sums, Stream stream);
void add_up(const double* values, int64_t num, double* sums, Stream stream);
void clip_factor(const double* square_sum, double max_norm, bool in_f64, double* norm, double* factor, Stream stream);
void scale_gradients(const ReduceList& list, const TargetTable& targets, const double* factor, Stream stream);
void adamw(const AdamWList& list, const AdamWArgs& args, Stream stream);
bool is_capturing(Stream stream);
void mark_changes(const ChangesArgs& args, Stream stream);
void list_changes(const ChangesArgs& args, Stream stream);
void encode_wire(const WireList& list, const EncodeWireArgs& args, Stream stream);
void decode_wire(const WireList& list, const void* segments, void* values, Stream stream);
void sum_wire(const WireList& list, const SumWireArgs& args, Stream stream);

}  // namespace fsdp2x::cuda::device
