// PTX operations on values that have no C++ operator, for translated kernels.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

namespace fsdp2x::ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using u128 = unsigned __int128;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using s128 = __int128;
using pred = bool;
using f16 = _Float16;
using f32 = float;
using f64 = double;

// Rounded to nearest even. Every NaN becomes the device's NaN.
struct bf16 {
  u16 code;
  bf16() = default;
  explicit bf16(f32 value) {
    const auto bits = std::bit_cast<u32>(value);
    code = value != value ? u16{0x7fff} : static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
  explicit operator f32() const { return std::bit_cast<f32>(static_cast<u32>(code) << 16); }
};

// --- registers ---

// Returns a register's low bits as a T.
template <class T, class Register>
inline T as(Register bits) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(bits);
  } else {
    T value;
    const auto whole = static_cast<u64>(bits);
    std::memcpy(&value, &whole, sizeof(T));
    return value;
  }
}

// Converts a float to an integer: towards zero, clamped to the range of T, NaN to zero.
template <class T, class F>
inline T cut_off(F value) {
  if (value != value) return 0;
  if (value <= static_cast<F>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (value >= static_cast<F>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(value);
}

// Returns a number rather than NaN. The negative zero is smaller than the positive.
template <class F>
inline F smaller(F x, F y) {
  if (x == y) return std::signbit(x) ? x : y;
  return y != y || x < y ? x : y;
}

template <class F>
inline F larger(F x, F y) {
  if (x == y) return std::signbit(x) ? y : x;
  return y != y || x > y ? x : y;
}

// Returns the magnitude of a signed integer's bits.
template <class Bits>
inline Bits magnitude(Bits bits) {
  return static_cast<std::make_signed_t<Bits>>(bits) < 0 ? static_cast<Bits>(Bits{0} - bits) : bits;
}

// Returns a value in a register, extended by its sign.
template <class Register, class T>
inline Register to(T value) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<Register>(value);
  } else {
    u64 whole = 0;
    std::memcpy(&whole, &value, sizeof(T));
    return static_cast<Register>(whole);
  }
}

// --- memory ---

inline char* pointer_to(u64 address) { return reinterpret_cast<char*>(address); }
inline u64 address_of(const char* pointer) { return reinterpret_cast<u64>(pointer); }

[[noreturn]] inline void fail_misaligned(const void* address, size_t bytes) {
  std::fprintf(stderr, "misaligned address %p of an access of %zu bytes\n", address, bytes);
  std::abort();
}

// The device faults if an access is not aligned.
template <size_t kBytes, class Char>
inline Char* aligned(Char* address) {
  if (reinterpret_cast<uintptr_t>(address) % kBytes != 0) fail_misaligned(address, kBytes);
  return address;
}

template <class T>
inline T load(const char* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

template <class T>
inline void store(char* address, T value) {
  std::memcpy(address, &value, sizeof(T));
}

template <class T>
inline T load_acquire(char* address) {
  return __atomic_load_n(reinterpret_cast<T*>(aligned<sizeof(T)>(address)), __ATOMIC_ACQUIRE);
}

template <class T>
inline void store_release(char* address, T value) {
  __atomic_store_n(reinterpret_cast<T*>(aligned<sizeof(T)>(address)), value, __ATOMIC_RELEASE);
}

// --- arithmetic ---

// Shifts by at least the width leave only the sign.
template <class T>
inline T shift_left(T value, u32 places) {
  return places >= 8 * sizeof(T) ? T{0} : static_cast<T>(value << places);
}

template <class T>
inline T shift_right(T value, u32 places) {
  if (places < 8 * sizeof(T)) return static_cast<T>(value >> places);
  return static_cast<T>(std::is_signed_v<T> && value < 0 ? -1 : 0);
}

// Shift the 64 bits of `high` and `low` by up to 31 places, and return the upper or the lower half.
inline u32 funnel_left(u32 low, u32 high, u32 places) {
  return static_cast<u32>((static_cast<u64>(high) << 32 | low) << (places & 31) >> 32);
}

inline u32 funnel_right(u32 low, u32 high, u32 places) {
  return static_cast<u32>((static_cast<u64>(high) << 32 | low) >> (places & 31));
}

// Picks four bytes out of eight. A place with its highest bit set only takes the byte's sign.
inline u32 prmt(u32 low, u32 high, u32 selector) {
  const u64 bytes = static_cast<u64>(high) << 32 | low;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 place = selector >> (4 * i) & 15;
    u32 byte = static_cast<u32>(bytes >> (8 * (place & 7))) & 255;
    if ((place & 8) != 0) byte = (byte & 128) != 0 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// Returns `length` bits from `start` on.
inline u32 bfe(u32 value, u32 start, u32 length) {
  const u32 rest = shift_right(value, start & 255);
  return (length & 255) >= 32 ? rest : rest & (shift_left(1u, length & 255) - 1);
}

// Returns `value` with the low `length` bits of `field` from `start` on.
inline u32 bfi(u32 field, u32 value, u32 start, u32 length) {
  const u32 low = (length & 255) >= 32 ? ~0u : shift_left(1u, length & 255) - 1;
  const u32 mask = shift_left(low, start & 255);
  return (value & ~mask) | (shift_left(field, start & 255) & mask);
}

template <class T>
inline bool unordered(T a, T b) {
  return a != a || b != b;
}

inline u64 nanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace fsdp2x::ptx
