"""CRC-32C of bytes: by an installed library where there is one, else by folding halves with NumPy.

A CRC is linear, and "append n zero bytes" is a linear map on its 32 bits. So data of 2n words is folded to n
words with the same remainder by moving its first half over its second, all words at once, again and again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

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
