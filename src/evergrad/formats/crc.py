"""What a few changed bits do to a CRC, without reading the rest of the data.

A CRC is linear: the CRC of altered data is the CRC of the original XOR the (zero-started) CRC of the
difference. The difference is zero almost everywhere, and appending zeros is itself a linear map on the 32-bit
remainder, whose powers 1, 2, 4, … are kept as tables. So a change costs O(log size), and a million of them
are a few NumPy passes: when the lower bits of their distances are done, those with the same way left to go are one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import xor
from typing import Any

import numpy as np
import numpy.typing as npt

_POWERS = 44  # distances up to 16 TiB
_MANY = 48  # from here on NumPy pays, with larger tables: a digit of the distance each
_CROWD = 4096  # from here on merging pays


@dataclass(frozen=True)
class Crc:
    """A reflected 32-bit CRC, by its polynomial."""

    polynomial: int

    def change(self, positions: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8], length: int) -> int:
        """What to XOR onto the CRC of `length` bytes when `deltas[i]` is XORed onto them at `positions[i]`.

        `deltas` has one row a change: the bytes to XOR from that position on.
        """
        if not len(positions):
            return 0
        zeros = length - positions.astype(np.int64) - deltas.shape[1]
        assert zeros.min() >= 0, "a change beyond the end of the data"
        if len(zeros) < _MANY:
            changes = zip(deltas.tolist(), zeros.tolist(), strict=True)
            return reduce(xor, (self._one(row, distance) for row, distance in changes))
        one_byte = self._byte_table
        remainder = np.zeros(len(positions), np.uint32)
        for column in range(deltas.shape[1]):
            remainder = one_byte[(remainder ^ deltas[:, column]) & 0xFF] ^ (remainder >> np.uint32(8))
        for digit in range(-(-int(zeros.max()).bit_length() // 8)):
            tables = _digit_tables(self.polynomial, digit)
            remainder = _apply_each(tables, zeros & 0xFF, remainder)
            zeros, remainder = _merged(zeros >> 8, remainder)
        return int(np.bitwise_xor.reduce(remainder))

    def _one(self, row: list[int], zeros: int) -> int:
        """The remainder of a few bytes with zeros behind them."""
        table, remainder = _lists(self.polynomial, 0), 0
        for byte in row:
            remainder = table[0][(remainder ^ byte) & 0xFF] ^ remainder >> 8
        power = 0
        while zeros and remainder:
            if zeros & 1:
                a, b, c, d = _lists(self.polynomial, power)
                remainder = a[remainder & 255] ^ b[remainder >> 8 & 255] ^ c[remainder >> 16 & 255] ^ d[remainder >> 24]
            zeros, power = zeros >> 1, power + 1
        return remainder

    @cached_property
    def _byte_table(self) -> npt.NDArray[np.uint32]:
        return _byte_table(self.polynomial)


CRC32 = Crc(0xEDB88320)
"""As zip, gzip and PNG have it."""

CRC32C = Crc(0x82F63B78)
"""Castagnoli's, as TensorFlow and iSCSI have it."""


@lru_cache
def _byte_table(polynomial: int) -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ (np.uint32(polynomial) * (table & np.uint32(1)))
    return table


@lru_cache(maxsize=2 * _POWERS)
def _zero_tables(polynomial: int, power: int) -> npt.NDArray[np.uint32]:
    """The map "append 2**power zero bytes", as four tables, one for each byte of the remainder."""
    if power == 0:
        one_byte = _byte_table(polynomial)
        values = np.arange(256, dtype=np.uint32)
        shifted = [values << np.uint32(8 * byte) for byte in range(4)]
        return np.stack([one_byte[value & np.uint32(0xFF)] ^ (value >> np.uint32(8)) for value in shifted])
    half = _zero_tables(polynomial, power - 1)
    return np.stack([_apply(half, half[byte]) for byte in range(4)])


@lru_cache(maxsize=2 * _POWERS)
def _lists(polynomial: int, power: int) -> list[list[int]]:
    """The same tables as plain integers: for a few changes much faster."""
    found: list[list[int]] = _zero_tables(polynomial, power).tolist()
    return found


@lru_cache(maxsize=12)
def _digit_tables(polynomial: int, digit: int) -> npt.NDArray[np.uint32]:
    """The maps "append d * 256**digit zero bytes" for every d below 256, each as four tables."""
    tables = np.empty((256, 4, 256), np.uint32)
    tables[0] = np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32)[:, None])
    for bit in range(8):
        tables[1 << bit : 2 << bit] = _apply(_zero_tables(polynomial, 8 * digit + bit), tables[: 1 << bit])
    return tables


def _apply_each(
    tables: npt.NDArray[np.uint32], digits: npt.NDArray[np.int64], remainder: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """To each remainder the map of its digit."""
    flat, start = tables.reshape(-1), digits * 1024
    out: npt.NDArray[np.uint32] = flat.take(start + (remainder & np.uint32(0xFF)))
    for byte in range(1, 4):
        value = (remainder >> np.uint32(8 * byte)) & np.uint32(0xFF)
        out ^= flat.take(start + (256 * byte + value))
    return out


def _merged(
    zeros: npt.NDArray[np.int64], remainder: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    """Changes that have the same way to go, as one; few of them are left alone."""
    if len(zeros) < _CROWD:
        return zeros, remainder
    order = np.argsort(zeros, kind="stable")
    zeros = zeros[order]
    first = np.flatnonzero(np.diff(zeros, prepend=-1))
    return zeros[first], np.bitwise_xor.reduceat(remainder[order], first)


def _apply(tables: npt.NDArray[np.uint32], remainder: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    out: npt.NDArray[np.uint32] = tables[0][remainder & np.uint32(0xFF)]
    for byte in range(1, 4):
        out = out ^ tables[byte][(remainder >> np.uint32(8 * byte)) & np.uint32(0xFF)]
    return out


# CRC-32C of bytes: by an installed library where there is one, else by folding halves with NumPy.
#
# A CRC is linear, and "append n zero bytes" is a linear map on its 32 bits. So data of 2n words is folded to n words
# with the same remainder by moving its first half over its second, all words at once, again and again.

_WORDS = 1 << 17  # words folded at once: they stay in the second-level cache with their tables
_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78


def crc32c(data: npt.NDArray[np.uint8] | bytes, value: int = 0) -> int:
    """The CRC-32C of the bytes, going on from that of the bytes before them.

    >>> hex(crc32c(b"123456789")), hex(crc32c(b"6789", crc32c(b"12345")))
    ('0xe3069283', '0xe3069283')
    """
    library = _library()
    if library is not None:
        return library(data, value)
    return fold(np.frombuffer(data, np.uint8), value)


def masked(crc: int) -> int:
    """A CRC as LevelDB and TensorFlow store it, so that a CRC over CRCs stays a good one."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def unmasked(stored: int) -> int:
    """The CRC that is stored masked."""
    rotated = (stored - _MASK_DELTA) & 0xFFFFFFFF
    return (rotated >> 17 | rotated << 15) & 0xFFFFFFFF


def fold(data: npt.NDArray[np.uint8], value: int = 0) -> int:
    """`crc32c` without any library."""
    remainder = value ^ 0xFFFFFFFF
    start = 0
    for size in _pieces(len(data)):
        words = data[start : start + 4 * size].view("<u4").astype(np.uint32)
        words[0] ^= np.uint32(remainder)
        while len(words) > 1:
            half = len(words) // 2
            words = _append_zeros(words[:half], half.bit_length() - 1) ^ words[half:]
        remainder = int(_append_zeros(words, 0)[0])
        start += 4 * size
    for byte in data[start:].tolist():
        remainder = _append_zero_bits(remainder ^ byte, 8)
    return remainder ^ 0xFFFFFFFF


def _pieces(length: int) -> list[int]:
    """Powers of two, in words, that add up to the length but for its last bytes."""
    words, rest = divmod(length // 4, _WORDS)
    return [_WORDS] * words + [1 << bit for bit in range(_WORDS.bit_length() - 1, -1, -1) if rest >> bit & 1]


def _append_zeros(words: npt.NDArray[np.uint32], power: int) -> npt.NDArray[np.uint32]:
    """Every word moved over 2**power zero words."""
    low, high = _tables(power)
    out: npt.NDArray[np.uint32] = low.take(words & np.uint32(0xFFFF))
    out ^= high.take(words >> np.uint32(16))
    return out


@lru_cache
def _tables(power: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The map "append 2**power zero words", for the lower and for the upper half of a remainder."""
    if power == 0:
        bits = np.array([_append_zero_bits(1 << bit, 32) for bit in range(32)], np.uint32)
    else:  # twice the map before
        before = np.array([_append_zeros(np.array([1 << bit], np.uint32), power - 1)[0] for bit in range(32)])
        bits = _append_zeros(before, power - 1)
    halves = []
    for half in (bits[:16], bits[16:]):
        table = np.zeros(1, np.uint32)
        for bit in half:
            table = np.concatenate([table, table ^ bit])
        halves.append(table)
    return halves[0], halves[1]


def _append_zero_bits(remainder: int, count: int) -> int:
    for _ in range(count):
        remainder = remainder >> 1 ^ (_POLYNOMIAL if remainder & 1 else 0)
    return remainder


@lru_cache(maxsize=1)
def _library() -> Callable[[Any, int], int] | None:
    """The CRC instruction of the processor, by the package `crc32c`, if it is installed."""
    try:
        found: Callable[[Any, int], int] = importlib.import_module("crc32c").crc32c
    except (ImportError, AttributeError):
        return None
    return found if found(b"123456789", 0) == 0xE3069283 else None  # another package of that name
