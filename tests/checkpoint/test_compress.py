"""Packing is exact, shrinks what training states are made of, and rubbish is refused."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.checkpoint import tiers
from evergrad.checkpoint.capture.capture import ArenaWriter, CapturePlan
from evergrad.checkpoint.tiers import Compress, Local, Memory, Persistent, join_compression
from evergrad.checkpoint.tiers.compress import FRAME_BYTES, pack, unpack
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, UsageError
from evergrad.wording import install_hint


def shard_of(tensors: dict[str, torch.Tensor]) -> memoryview:
    """The bytes of a shard with these tensors."""
    plan = CapturePlan.of(tensors)
    buffer = bytearray(plan.layout.size)
    gathered = plan.gather(tensors)
    assert gathered is not None
    header = plan.header(gathered, {})
    assert header is not None
    ArenaWriter(plan, buffer).copy(gathered)
    buffer[: len(header)] = header
    return memoryview(buffer)


def packed(shard: memoryview, level: int = 1) -> bytes:
    return b"".join(pack([shard], level))


def unpacked(data: bytes, size: int, chunk: int = 1000) -> bytes:
    return b"".join(unpack((data[at : at + chunk] for at in range(0, len(data), chunk)), size, "x.zst"))


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_comes_back_bit_for_bit(dtype: DType) -> None:
    raw = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 1003 * dtype.itemsize, np.uint8))
    raw = raw % 2 if dtype is DType.BOOL else raw
    shard = shard_of({"a": raw.view(dtype.torch), "b": torch.ones(7, dtype=torch.uint8), "empty": torch.empty(0)})
    assert unpacked(packed(shard), len(shard)) == bytes(shard)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 64))
def test_any_bytes_come_back(pieces: list[bytes], chunk: int) -> None:
    whole = b"".join(pieces)
    data = b"".join(pack([memoryview(piece) for piece in pieces], 1))
    assert unpacked(data, len(whole), chunk) == whole


def test_pieces_are_packed_as_the_whole_would_be() -> None:
    shard = shard_of({"a": torch.randn(5000), "b": torch.randn(300).to(torch.bfloat16)})
    pieces = [shard[:5], shard[5:9000], shard[9000:]]
    assert b"".join(pack(pieces, 1)) == packed(shard)


def test_moments_of_adam_shrink_by_a_tenth_at_least_and_more_than_without_shuffling() -> None:
    import zstandard

    generator = np.random.default_rng(0)
    first = second = np.zeros(100_000, np.float32)
    for _ in range(20):
        gradient = np.float32(1e-3) * generator.standard_normal(100_000, np.float32)
        first = np.float32(0.9) * first + np.float32(0.1) * gradient
        second = np.float32(0.999) * second + np.float32(0.001) * gradient**2
    shard = shard_of({"exp_avg": torch.from_numpy(first), "exp_avg_sq": torch.from_numpy(second)})

    plain = len(zstandard.ZstdCompressor(level=1).compress(shard))
    small = len(packed(shard))
    assert small < 0.9 * len(shard)
    assert small < 0.97 * plain


def test_the_same_shard_always_packs_to_the_same_bytes() -> None:
    shard = shard_of({"a": torch.randn(3 * FRAME_BYTES // 4 + 17)})
    assert packed(shard) == packed(shard)


def test_a_large_shard_takes_little_memory() -> None:
    shard = memoryview(bytes(16 * FRAME_BYTES))
    tracemalloc.start()
    size = sum(len(raw) for raw in unpack(pack([shard], 1), len(shard), "x.zst"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == len(shard)
    assert peak < 14 * FRAME_BYTES


def test_the_file_is_ordinary_zstd() -> None:
    import zstandard

    shard = shard_of({"a": torch.ones(100, dtype=torch.uint8)})
    plain = zstandard.ZstdDecompressor().stream_reader(packed(shard), read_across_frames=True).read()
    assert plain == bytes(shard)


def test_every_cut_is_noticed() -> None:
    shard = shard_of({"a": torch.randn(500)})
    data = packed(shard)
    for end in {*range(0, len(data), 37), len(data) - 1}:
        with pytest.raises(DamagedFile, match="cut short"):
            unpacked(data[:end], len(shard))
    with pytest.raises(DamagedFile):
        unpacked(data + b"x", len(shard))


def test_every_flipped_byte_is_noticed_or_harmless() -> None:
    shard = shard_of({"a": torch.randn(200)})
    data = packed(shard)
    for at in range(0, len(data), 11):
        bad = bytearray(data)
        bad[at] ^= 0x55
        try:
            assert len(unpacked(bytes(bad), len(shard))) == len(shard)
        except DamagedFile:
            continue


@pytest.mark.parametrize("item_size", [0, 3, 32])
def test_a_frame_that_asks_for_the_impossible_is_refused(item_size: int) -> None:
    data = bytearray(packed(memoryview(bytes(100))))
    struct.pack_into("<I", data, 12, item_size)
    with pytest.raises(DamagedFile, match="not a frame"):
        unpacked(bytes(data), 100)


def test_a_frame_cannot_ask_for_more_memory_than_a_frame_has() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    for claimed in (64 << 20, FRAME_BYTES, 100):
        head = struct.pack("<II4sIII", 0x184D2A5E, 16, b"EGS1", 1, claimed, len(bomb))
        tracemalloc.start()
        with pytest.raises(DamagedFile):
            unpacked(head + bomb, 64 << 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < FRAME_BYTES


def test_compress_is_folded_into_the_slow_tier_behind_it() -> None:
    memory, local, persistent = Memory(), Local("/scratch"), Persistent("/shared/r50")
    joined = join_compression([memory, local, Compress("zstd", level=3), persistent])
    assert joined[:2] == [memory, local]
    assert joined[2] == Persistent("/shared/r50", compress={"codec": "zstd", "level": 3})
    assert join_compression([memory, persistent]) == [memory, persistent]


@pytest.mark.parametrize(
    "chosen",
    [[Compress()], [Compress(), Memory()], [Compress(), Local()], [Compress(), Compress(), Persistent("/a")]],
    ids=["nothing", "memory", "local", "twice"],
)
def test_compress_anywhere_else_is_refused(chosen: list[tiers.Tier | Compress]) -> None:
    with pytest.raises(UsageError, match="Compress goes before a slow tier, such as Persistent"):
        join_compression(chosen)


@pytest.mark.parametrize("arguments", [("lz4",), ("zstd", 0), ("zstd", 30), ("zstd", "fast")])
def test_a_codec_or_level_that_is_not_there_is_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(UsageError, match="Compress"):
        Compress(*arguments)  # type: ignore[arg-type]


def test_without_the_library_it_is_said_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['zstandard'] = None\n"
        "from evergrad.checkpoint.tiers import Compress\n"
        "try: Compress('zstd')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UsageError")
    assert install_hint("zstd") in done.stdout
