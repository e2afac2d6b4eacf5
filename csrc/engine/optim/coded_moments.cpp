// The kernels of 8-bit moments over whole tensors.
#include "engine/optim/coded_moments.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "engine/memory/local_tensor.hpp"
#include "engine/torch/gil.hpp"
#include "engine/torch/parallel.hpp"
#include "kernels/cpu/optimizers.hpp"
#include "kernels/rules/moment_codes.hpp"

namespace fsdp2x {

namespace {

void require_plain(const at::Tensor& tensor, at::ScalarType type, const char* what) {
  if (is_plain_memory(tensor) && tensor.scalar_type() == type) return;
  throw Error(std::string("8-bit moments: ") + what + " must be dense, on the CPU, and of dtype " +
              c10::toString(type));
}

// Calls run(begin, end) with complete blocks.
template <class Run>
void for_each_blocks(int64_t numel, const Run& run) {
  const ReleaseGil released;
  run_parallel(num_moment_blocks(numel), kGrainNumel / kMomentBlock,
               [&](int64_t begin, int64_t end) { run(begin * kMomentBlock, std::min(end * kMomentBlock, numel)); });
}

}  // namespace

int64_t num_moment_blocks(int64_t numel) { return (numel + kMomentBlock - 1) / kMomentBlock; }

at::Tensor decode_moments(const at::Tensor& codes, const at::Tensor& scales, bool is_signed) {
  require_plain(codes, at::kByte, "codes");
  require_plain(scales, at::kFloat, "scales");
  if (scales.numel() != num_moment_blocks(codes.numel())) {
    throw Error("8-bit moments: expected " + std::to_string(num_moment_blocks(codes.numel())) + " scales for " +
                std::to_string(codes.numel()) + " codes, got " + std::to_string(scales.numel()));
  }
  at::Tensor values = at::empty_like(codes, codes.options().dtype(at::kFloat));
  auto* to = values.mutable_data_ptr<float>();
  for_each_blocks(codes.numel(), [&](int64_t begin, int64_t end) {
    cpu::decode_moments(to + begin, codes.const_data_ptr<uint8_t>() + begin,
                        scales.const_data_ptr<float>() + begin / kMomentBlock, end - begin, is_signed);
  });
  return values;
}

std::pair<at::Tensor, at::Tensor> encode_moments(const at::Tensor& values, bool is_signed) {
  require_plain(values, at::kFloat, "values");
  at::Tensor codes = at::empty_like(values, values.options().dtype(at::kByte));
  at::Tensor scales = at::empty({num_moment_blocks(values.numel())}, values.options());
  auto* to = codes.mutable_data_ptr<uint8_t>();
  auto* to_scales = scales.mutable_data_ptr<float>();
  for_each_blocks(values.numel(), [&](int64_t begin, int64_t end) {
    cpu::encode_moments(to + begin, to_scales + begin / kMomentBlock, values.const_data_ptr<float>() + begin,
                        end - begin, is_signed);
  });
  return {std::move(codes), std::move(scales)};
}

}  // namespace fsdp2x
