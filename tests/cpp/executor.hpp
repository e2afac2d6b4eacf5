// Runs the kernels under test: the reference kernels, or those of a device. Test bodies access memory only through it.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/kernels.hpp"
#include "reference.hpp"

namespace fsdp2x::cuda {

class Executor {
 public:
  virtual ~Executor() = default;
  virtual const Kernels& kernels() const = 0;
  // At a multiple of 256 bytes.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* memory) = 0;
  virtual void upload(void* memory, const void* host, size_t bytes) = 0;
  // Waits for all enqueued work.
  virtual void download(void* host, const void* memory, size_t bytes) = 0;
  // Returns a stream that other streams do not wait for. It lives as long as the executor.
  virtual Stream new_stream() = 0;
};

// Defined once per test program.
Executor& executor();

inline const Kernels& kernels() { return executor().kernels(); }

// Under AddressSanitizer (only for host memory), makes every access to the memory an error, or allows it again.
inline void forbid(const void* memory, size_t bytes, bool is_forbidden) {
  using Function = void (*)(const volatile void*, size_t);
  static const auto poison = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, "__asan_poison_memory_region"));
  static const auto unpoison = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, "__asan_unpoison_memory_region"));
  if (poison != nullptr) (is_forbidden ? poison : unpoison)(memory, bytes);
}

// Memory of the executor between two guards, `shift` bytes off a multiple of 256.
class Region {
 public:
  static constexpr size_t kGuard = 256;
  explicit Region(size_t bytes, size_t shift = 0) : bytes_(bytes), start_(kGuard + shift) {
    memory_ = static_cast<std::byte*>(executor().allocate(start_ + bytes + kGuard));
    const std::vector<std::byte> guards(start_ + bytes + kGuard, kFill);
    executor().upload(memory_, guards.data(), guards.size());
    forbid_guards(true);
  }
  Region(std::span<const std::byte> content, size_t shift) : Region(content.size(), shift) { write(content); }
  Region(Region&& other) noexcept : bytes_(other.bytes_), start_(other.start_), memory_(other.memory_) {
    other.memory_ = nullptr;
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() {
    if (memory_ == nullptr) return;
    forbid_guards(false);
    executor().release(memory_);
  }

  void* data() const { return memory_ + start_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  size_t bytes() const { return bytes_; }
  void write(std::span<const std::byte> content) { executor().upload(data(), content.data(), content.size()); }
  // Returns the content. Fails the test if a guard was written.
  std::vector<std::byte> read() const {
    std::vector<std::byte> all(start_ + bytes_ + kGuard);
    forbid_guards(false);
    executor().download(all.data(), memory_, all.size());
    forbid_guards(true);
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i < start_ || i >= start_ + bytes_) && all[i] != kFill) {
        ADD_FAILURE() << "byte " << static_cast<int64_t>(i) - static_cast<int64_t>(start_) << " of " << bytes_
                      << " was written";
        break;
      }
    }
    return {all.begin() + static_cast<std::ptrdiff_t>(start_),
            all.begin() + static_cast<std::ptrdiff_t>(start_ + bytes_)};
  }
  template <class T>
  std::vector<T> read_as() const {
    const std::vector<std::byte> bytes = read();
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
  static constexpr std::byte kFill{0xa5};

 private:
  void forbid_guards(bool are_forbidden) const {
    forbid(memory_, start_, are_forbidden);
    forbid(memory_ + start_ + bytes_, kGuard, are_forbidden);
  }

  size_t bytes_;
  size_t start_;
  std::byte* memory_;
};

// An uploaded plan.
template <class Segment>
class Uploaded {
 public:
  explicit Uploaded(const Plan<Segment>& plan) : plan_(plan), image_(plan.image_bytes()) {
    std::vector<std::byte> image(plan.image_bytes());
    plan.write_image(image.data());
    image_.write(image);
  }
  List<Segment> list() const { return plan_.list(image_.data()); }
  const Plan<Segment>& plan() const { return plan_; }

 private:
  Plan<Segment> plan_;
  Region image_;
};

// Typed values on the host, and the same bytes in a region.
inline std::vector<std::byte> bytes_of(const reference::Buffer& buffer, int64_t numel) {
  std::vector<std::byte> bytes(static_cast<size_t>(numel) * dtype_bytes(buffer.type()));
  if (!bytes.empty()) std::memcpy(bytes.data(), buffer.data(), bytes.size());
  return bytes;
}

inline reference::Buffer buffer_of(DType type, std::span<const std::byte> bytes) {
  const size_t numel = bytes.size() / dtype_bytes(type);
  reference::Buffer buffer(type, static_cast<int64_t>(numel));
  if (numel > 0) std::memcpy(buffer.data(), bytes.data(), numel * dtype_bytes(type));
  return buffer;
}

inline std::vector<std::byte> random_bytes(DType type, int64_t numel, std::mt19937_64& random) {
  if (type == DType::byte) {
    std::vector<std::byte> bytes(static_cast<size_t>(numel));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 256);
    return bytes;
  }
  reference::Buffer buffer(type, numel);
  buffer.fill_random(random);
  return bytes_of(buffer, numel);
}

// Compares bit for bit. Any NaN equals any other.
inline testing::AssertionResult same(DType type, std::span<const std::byte> got, std::span<const std::byte> expected) {
  if (got.size() != expected.size()) return testing::AssertionFailure() << got.size() << " bytes";
  return buffer_of(type, got).equals(buffer_of(type, expected), /*nan_payload=*/false);
}

}  // namespace fsdp2x::cuda
