"""A package can add a format; a broken one takes nothing with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError
from evergrad.formats import AddressedCheckpoint, Checkpoint, DataFile, Format, Probe, Region, describe, registry
from evergrad.records import Role, TensorInfo
from evergrad.state import Placement, Skeleton
from evergrad.testing import FormatContract

MAGIC = b"RAWF32\0\0"


class RawFloats(Format):
    """A magic word, then float32 values: what a user's own format may look like."""

    name = "raw-floats"

    def recognises(self, probe: Probe) -> bool:
        return probe.head.startswith(MAGIC)

    def open(self, path: Path) -> Checkpoint:
        file = DataFile(path)
        count = (file.size - len(MAGIC)) // 4
        regions = {"values": Region(file, len(MAGIC), (count,), DType.FLOAT32)}
        tensors = describe([(Placement("values", 0, len(MAGIC), (count,), (1,), 4), DType.FLOAT32)])
        return AddressedCheckpoint(self.name, path, tensors, regions.__getitem__, file)


class HexFloats(Format):
    """Float32 values as text, one a line, written anew when closed: a format without places, that rehearses nothing."""

    name = "hex-floats"

    def recognises(self, probe: Probe) -> bool:
        return probe.head.startswith(b"hex\n")

    def open(self, path: Path) -> Checkpoint:
        return HexCheckpoint(path)


class HexCheckpoint(Checkpoint):
    """All of it in memory; `rehearses` is left as it is."""

    format = "hex-floats"

    def __init__(self, path: Path) -> None:
        self.path, self.others, self.metadata = path, {}, {}
        try:
            self._bits = np.array([int(line, 16) for line in path.read_text().splitlines()[1:]], np.uint32)
        except ValueError as error:
            raise DamagedFile(path, str(error)) from None
        self.tensors = {"values": TensorInfo("values", self._bits.shape, DType.FLOAT32, Role.MODEL, self._bits.nbytes)}
        self.skeleton = Skeleton.of_names(self.tensors)
        self._altered = self._closed = False

    def _read_bits(self, name: str, start: int, stop: int) -> np.ndarray:
        self._open()
        return self._bits[start:stop].copy()

    def _xor_bits(self, name: str, indices: np.ndarray, patterns: np.ndarray) -> np.ndarray:
        self._open()
        old = self._bits[indices]
        np.bitwise_xor.at(self._bits, indices, patterns)
        self._altered = True
        return old

    def close(self) -> None:
        if self._altered and not self._closed:
            self.path.write_text("hex\n" + "".join(f"{bits:x}\n" for bits in self._bits.tolist()))
        self._closed = True

    def _open(self) -> None:
        if self._closed:
            raise FileAccessError(self.path, "is closed")


class Broken:
    """What an entry point may also lead to."""

    def __init__(self) -> None:
        raise RuntimeError("no such shared object")


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = [
        EntryPoint("raw", f"{__name__}:RawFloats", "evergrad.formats"),
        EntryPoint("hex", f"{__name__}:HexFloats", "evergrad.formats"),
        EntryPoint("broken", f"{__name__}:Broken", "evergrad.formats"),
        EntryPoint("missing", "no_such_package:Format", "evergrad.formats"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "evergrad.formats" else [])
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


class TestRawFloats(FormatContract):
    format = "raw-floats"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        values = np.arange(20, dtype=np.float32)
        (path := folder / "a.raw").write_bytes(MAGIC + values.tobytes())
        return path, {"values": torch.from_numpy(values)}

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return {"values": torch.from_numpy(np.fromfile(path, np.float32, offset=len(MAGIC)))}

    def test_a_truncated_file_is_refused_or_read_right(self, tmp_path: Path) -> None:
        """This format cannot know: it has no length. What is there is read."""
        path, _ = self.make(tmp_path)
        path.write_bytes(path.read_bytes()[:-9])
        with eg.open_checkpoint(path) as ck:
            assert ck.tensors["values"].numel == 17


class TestHexFloats(FormatContract):
    format = "hex-floats"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        values = np.arange(20, dtype=np.float32)
        (path := folder / "a.hex").write_text("hex\n" + "".join(f"{bits:x}\n" for bits in values.view(np.uint32)))
        return path, {"values": torch.from_numpy(values)}

    def test_a_truncated_file_is_refused_or_read_right(self, tmp_path: Path) -> None:
        """This format cannot know either."""
        path, _ = self.make(tmp_path)
        path.write_text(path.read_text()[:-9])
        with eg.open_checkpoint(path) as ck:
            assert ck.tensors["values"].numel == 19

    def test_faults_are_made_in_a_copy_and_only_the_last_step_is_in_place(self, tmp_path: Path) -> None:
        path, _ = self.make(tmp_path)
        log = eg.inject(path, eg.BitFlip(), count=3, in_place=True)
        assert [change.rewritten for change in log.files] == [True]
        assert sorted(child.name for child in tmp_path.iterdir()) == ["a.hex", "a.hex.faults.jsonl"]


def test_broken_plugins_are_reported_and_the_rest_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with caplog.at_level(logging.WARNING, "evergrad"):
        assert [format.name for format in registry.formats()][-2:] == ["raw-floats", "hex-floats"]
    with eg.open_checkpoint(tmp_path / "a.pt") as ck:
        assert ck.format == "torch-zip"
    assert "'broken' could not be loaded: no such shared object" in caplog.text
    assert "'missing' could not be loaded" in caplog.text
