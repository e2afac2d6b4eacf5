"""CRC-32 of a concatenation from the CRC-32s of its parts, so that no byte is read twice for two checksums.

A CRC is the remainder of a polynomial over GF(2): appending n zero bytes multiplies it by x^(8n). Polynomials are kept
bit-reversed in 32 bits, as zlib does: bit 31 is x^0.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320


def combine(first: int, second: int, second_bytes: int) -> int:
    """CRC-32 of A + B, where `first` is that of A, `second` that of B, and B has `second_bytes` bytes."""
    return _multiply(_shift(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    bit = 1 << 31
    while bit and a & (2 * bit - 1):
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _shift(num_bytes: int) -> int:
    """x^(8 * num_bytes) modulo the polynomial."""
    result = 1 << 31
    power = _multiply(1 << 30, 1 << 30)  # x^2
    power = _multiply(power, power)
    power = _multiply(power, power)  # x^8
    while num_bytes:
        if num_bytes & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        num_bytes >>= 1
    return result
