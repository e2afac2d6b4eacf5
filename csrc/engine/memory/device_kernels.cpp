// Finds which devices run the kernels, and their current streams as launches want them.
#include "engine/memory/device_kernels.hpp"

#include <Python.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>

#include "engine/torch/py_ref.hpp"
#include "kernels/cuda/probe.hpp"

namespace fsdp2x {

namespace {

enum class Known : uint8_t { nothing, runs, fails };

bool can_run(at::Device device) {
  static std::array<std::atomic<Known>, 128> known;  // as many as a c10::DeviceIndex can name
  const int index = device.has_index() ? device.index() : 0;
  std::atomic<Known>& entry = known[static_cast<size_t>(index)];
  if (const Known before = entry; before != Known::nothing) return before == Known::runs;
  const std::string why = cuda::why_no_kernels_on(index);
  if (entry.exchange(why.empty() ? Known::runs : Known::fails) != Known::nothing || why.empty()) return why.empty();
  const std::string text = "fsdp2x: its kernels cannot run on cuda:" + std::to_string(index) + ": " + why +
                           ". Torch's operations run in their place, one launch each. Update the driver, or build "
                           "fsdp2x with an nvcc of the driver's version and for this device (CUDAARCHS).";
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw_python_error();
  return false;
}

}  // namespace

const cuda::Kernels* kernels_on(at::Device device) {
  const cuda::Kernels* const kernels = cuda::device_kernels();
  return kernels != nullptr && device.is_cuda() && can_run(device) ? kernels : nullptr;
}

DeviceScope::DeviceScope(at::Device device) : guard_(device.is_cpu() ? std::nullopt : std::optional(device)) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl impl(device.type());
  stream_ = static_cast<cuda::Stream>(impl.getStream(device).native_handle());
}

}  // namespace fsdp2x
