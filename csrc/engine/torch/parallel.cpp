// Runs work on torch's threads.
#include "engine/torch/parallel.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

namespace fsdp2x {

void run_parallel(int64_t total, int64_t grain, const std::function<void(int64_t, int64_t)>& run) {
  if (total <= 0) return;
  if (total <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) return run(0, total);
  // at::parallel_for is a template that starts threads only if it is compiled and linked with the same OpenMP that
  // torch ships. A TensorIterator's loop is inside torch. Its addresses stand for element numbers and are never read.
  char* const zero = reinterpret_cast<char*>(uintptr_t{64});
  at::Tensor numbers = at::from_blob(zero, {total}, at::TensorOptions().dtype(at::kByte));
  at::TensorIterator iterator = at::TensorIterator::nullary_op(numbers);
  iterator.for_each(
      [&](char** data, const int64_t* /*strides*/, int64_t numel, int64_t /*rows: one*/) {
        const int64_t begin = data[0] - zero;
        run(begin, begin + numel);
      },
      grain);
}

}  // namespace fsdp2x
