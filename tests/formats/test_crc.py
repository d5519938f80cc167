"""A checksum follows a change without reading the data again."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.formats.crc import CRC32, CRC32C


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=2000), st.data())
def test_the_crc_of_changed_data_is_the_old_one_and_the_change(data: bytes, draw: st.DataObject) -> None:
    width = draw.draw(st.sampled_from([w for w in (1, 2, 4, 8, 16) if w <= len(data)]))
    positions = draw.draw(st.lists(st.integers(0, len(data) - width), max_size=20))
    deltas = draw.draw(
        st.lists(st.binary(min_size=width, max_size=width), min_size=len(positions), max_size=len(positions))
    )
    changed = bytearray(data)
    for position, delta in zip(positions, deltas, strict=True):
        for index, byte in enumerate(delta):
            changed[position + index] ^= byte
    rows = np.array([list(delta) for delta in deltas], np.uint8).reshape(-1, width)
    change = CRC32.change(np.array(positions, np.int64), rows, len(data))
    assert zlib.crc32(data) ^ change == zlib.crc32(changed)


@pytest.mark.parametrize("count", [1, 63, 64, 4095, 4096, 20_000])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_many_changes_far_apart_add_up(count: int, width: int) -> None:
    generator = np.random.default_rng(count + width)
    data = generator.integers(0, 256, 3_000_000, np.uint8)
    before = zlib.crc32(data)
    positions = generator.permutation(len(data) // width)[:count] * width
    rows = generator.integers(0, 256, (count, width), np.uint8)
    change = CRC32.change(positions, rows, len(data))
    data[positions[:, None] + np.arange(width)] ^= rows
    assert before ^ change == zlib.crc32(data)


def test_distance_does_not_matter() -> None:
    length = 50_000_000
    data = np.zeros(length, np.uint8)
    before = zlib.crc32(data)
    data[3] = 0x55
    change = CRC32.change(np.array([3]), np.array([[0x55]], np.uint8), length)
    assert before ^ change == zlib.crc32(data)


@pytest.mark.parametrize(("data", "expected"), [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA)])
def test_castagnolis_polynomial_gives_the_published_values(data: bytes, expected: int) -> None:
    # crc32c("") is 0; of n bytes it is the CRC of n zeros changed by the data.
    zeros = _crc32c(bytes(len(data)))
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1)
    assert zeros ^ CRC32C.change(np.arange(len(data)), rows, len(data)) == expected


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
