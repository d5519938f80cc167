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
from evergrad.formats import AddressedCheckpoint, Checkpoint, DataFile, Format, Probe, Region, describe, registry
from evergrad.state import Placement
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


class Broken:
    """What an entry point may also lead to."""

    def __init__(self) -> None:
        raise RuntimeError("no such shared object")


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entries = [
        EntryPoint("raw", f"{__name__}:RawFloats", "evergrad.formats"),
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


def test_broken_plugins_are_reported_and_the_rest_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with caplog.at_level(logging.WARNING, "evergrad"):
        assert [format.name for format in registry.formats()][-1] == "raw-floats"
    with eg.open_checkpoint(tmp_path / "a.pt") as ck:
        assert ck.format == "torch-zip"
    assert "'broken' could not be loaded: no such shared object" in caplog.text
    assert "'missing' could not be loaded" in caplog.text
