"""What one would do without Evergrad: flip bits in an HDF5 file with h5py, as checkpoint injectors do, and otherwise.

None of these keeps a log or makes its changes durable; the caller does the latter.
"""

from __future__ import annotations

import datetime
import importlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np

__all__ = ["corrupter", "loop", "loop_in_file_order", "mapped", "whole_data_sets"]

Site = tuple[int, tuple[int, ...], int]
"""Which data set, which element of it, which bit."""


def loop(path: Path, count: int, seed: int) -> None:
    """A data set at random, an element of it, a bit of that; read it, flip it, write it, `count` times.

    The loop of checkpoint injectors at its best: the file and the data sets are opened once, and nothing is logged.
    """
    with h5py.File(path, "r+") as file:
        data_sets = _data_sets(file)
        _flip(data_sets, _sites(data_sets, count, seed))


def loop_in_file_order(path: Path, count: int, seed: int) -> None:
    """The same sites, drawn first and sorted by data set and element."""
    with h5py.File(path, "r+") as file:
        data_sets = _data_sets(file)
        _flip(data_sets, iter(sorted(_sites(data_sets, count, seed))))


def whole_data_sets(path: Path, count: int, seed: int) -> None:
    """Read every data set whole, flip in memory, write it back: the calls grow with the file, not with the flips."""
    generator = np.random.default_rng(seed)
    with h5py.File(path, "r+") as file:
        data_sets = _data_sets(file)
        chosen = np.sort(generator.integers(sum(data_set.size for data_set in data_sets), size=count))
        patterns = np.uint32(1) << generator.integers(32, size=count, dtype=np.uint32)
        first = 0
        for data_set in data_sets:
            low, high = np.searchsorted(chosen, [first, first + data_set.size])
            if low < high:
                values = data_set[...]
                np.bitwise_xor.at(values.reshape(-1).view(np.uint32), chosen[low:high] - first, patterns[low:high])
                data_set[...] = values
            first += data_set.size


def mapped(path: Path, count: int, seed: int) -> None:
    """The floor: map the file, and XOR at the places that h5py tells; contiguous float32 data sets only."""
    generator = np.random.default_rng(seed)
    with h5py.File(path, "r") as file:
        places = np.array([data_set.id.get_offset() for data_set in _data_sets(file)])
        sizes = np.array([data_set.size for data_set in _data_sets(file)])
    ends = np.cumsum(sizes)
    chosen = np.sort(generator.integers(int(ends[-1]), size=count))
    owners = np.searchsorted(ends, chosen, side="right")
    cells = places[owners] // 4 + (chosen - (ends - sizes)[owners])
    patterns = np.uint32(1) << generator.integers(32, size=count, dtype=np.uint32)
    words = np.memmap(path, np.uint32, "r+", shape=(path.stat().st_size // 4,))
    np.bitwise_xor.at(words, cells, patterns)


def corrupter(checkout: Path) -> Callable[[Path, int, int], None]:
    """The injection loop of the tool hdf5_corrupter, from a checkout of it; its log is left out, which helps it."""
    sys.path.insert(0, str(checkout))
    # It reads its settings with yaml, which is not needed here; and it seeds with a time, of which Python took the
    # hash until 3.10 and takes nothing since.
    try:
        importlib.import_module("yaml")
    except ImportError:
        sys.modules["yaml"] = types.ModuleType("yaml")
    modules: list[Any] = [importlib.import_module(name) for name in ("corrupter", "globals", "hdf5_common")]
    tool, settings, common = modules
    settings.FLOAT_PRECISION, settings.FIRST_BIT, settings.LAST_BIT = "32", 0, 31
    settings.ALLOW_NaN_VALUES = True
    settings.set_precision_settings(32)
    seed_with = random.seed

    def seeded(value: object = None, version: int = 2) -> None:
        seed_with(hash(value) if isinstance(value, datetime.datetime) else value, version)  # type: ignore[arg-type]

    def run(path: Path, count: int, seed: int) -> None:
        with patch("random.seed", seeded):
            locations = common.get_hdf5_file_leaf_locations(str(path))
            injected = tool.try_corrupt_hdf5_file(str(path), locations, 1.0, count, 1)
        if injected != count:
            raise RuntimeError(f"hdf5_corrupter: {injected} of {count} faults")

    return run


def _data_sets(file: h5py.File) -> list[h5py.Dataset]:
    found: list[h5py.Dataset] = []
    file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    return found


def _sites(data_sets: list[h5py.Dataset], count: int, seed: int) -> Iterator[Site]:
    generator = random.Random(seed)
    shapes = [data_set.shape for data_set in data_sets]
    for _ in range(count):
        number = generator.randrange(len(shapes))
        yield number, tuple(generator.randrange(size) for size in shapes[number]), generator.randrange(32)


def _flip(data_sets: list[h5py.Dataset], sites: Iterator[Site]) -> None:
    for number, index, bit in sites:
        data_set = data_sets[number]
        value: np.float32 = data_set[index]
        data_set[index] = (value.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)
