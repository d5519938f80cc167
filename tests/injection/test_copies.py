"""A copy with faults in it: all of the source, at a place that is nobody else's, and never without its log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import evergrad as eg
from evergrad import _files
from evergrad.dtypes import DType
from evergrad.errors import EvergradError, FileAccessError, UsageError
from evergrad.injection import Draws, Fault
from evergrad.injection.injector import exclusive


def linked_shards(folder: Path) -> Path:
    """A folder of links, as download caches have it: relative ones, to shards, to a file beside, and to nowhere."""
    (blobs := folder / "blobs").mkdir()
    (snapshot := folder / "snapshot").mkdir()
    weight_map = {}
    for number in range(2):
        name = f"model-{number}.safetensors"
        safetensors.torch.save_file({f"w{number}": torch.randn(20)}, blobs / f"{number}")
        (snapshot / name).symlink_to(f"../blobs/{number}")
        weight_map[f"w{number}"] = name
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (blobs / "config").write_text("{}")
    (snapshot / "config.json").symlink_to("../blobs/config")
    (snapshot / "gone.json").symlink_to("../blobs/gone")
    return snapshot


def test_links_are_copied_as_what_they_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = linked_shards(tmp_path)
    monkeypatch.chdir("/")
    before = {blob.name: blob.read_bytes() for blob in (tmp_path / "blobs").iterdir()}
    log = eg.inject(source, eg.BitFlip(), count=5, out=tmp_path / "bad")
    assert sum(row.changed for row in eg.compare(source, tmp_path / "bad").tensors) == log.changed == 5
    assert (tmp_path / "bad" / "config.json").read_text() == "{}"
    assert not any(path.is_symlink() for path in (tmp_path / "bad").iterdir())
    assert {blob.name: blob.read_bytes() for blob in (tmp_path / "blobs").iterdir()} == before


def test_in_place_what_links_lead_to_is_altered_and_undone(tmp_path: Path) -> None:
    source = linked_shards(tmp_path)
    before = {blob.name: blob.read_bytes() for blob in (tmp_path / "blobs").iterdir()}
    log = eg.inject(source, eg.BitFlip(), count=5, in_place=True)
    assert {blob.name: blob.read_bytes() for blob in (tmp_path / "blobs").iterdir()} != before
    eg.undo(log)
    assert {blob.name: blob.read_bytes() for blob in (tmp_path / "blobs").iterdir()} == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "model.npy", np.arange(50, dtype=np.float32))
    return tmp_path / "model.npy"


def test_what_has_come_to_the_place_meanwhile_is_kept(path: Path) -> None:
    out = path.with_name("out.npy")
    with pytest.raises(FileAccessError, match="exists by now"):
        eg.inject(path, eg.BitFlip(), count=1, out=out, progress=lambda *_: out.write_text("mine") and None)
    assert out.read_text() == "mine"
    assert sorted(file.name for file in path.parent.iterdir()) == ["model.npy", "out.npy"]


def test_a_copy_that_is_in_its_place_keeps_its_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = path.with_name("out.npy")

    def fails(place: Path) -> None:
        if out.exists():
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(_files, "fsync_folder", fails)
    with pytest.raises(FileAccessError, match="input/output error"):
        eg.inject(path, eg.BitFlip(), count=1, out=out)
    assert out.exists()
    assert eg.undo(f"{out}.faults.jsonl").found_state == "injected"
    assert out.read_bytes() == path.read_bytes()


def test_one_writer_at_a_time_by_whatever_name_it_comes(tmp_path: Path) -> None:
    source = linked_shards(tmp_path)
    log = eg.inject(source, eg.BitFlip(), count=5, in_place=True)
    with exclusive([tmp_path / "blobs" / "0"]):
        for act in (
            lambda: eg.inject(source, eg.BitFlip(), count=1, in_place=True),
            lambda: eg.inject(source / "model-0.safetensors", eg.BitFlip(), count=1, in_place=True),
            lambda: eg.undo(log),
        ):
            with pytest.raises(FileAccessError, match="is locked"):
                act()
        eg.inject(source, eg.BitFlip(), count=1, out=tmp_path / "copy")  # reading is free
    assert eg.undo(log).found_state == "injected"


@dataclass(frozen=True)
class Wrong(Fault):
    """Gives what it must not."""

    gives: str

    def fits(self, dtype: DType) -> bool:
        return True

    def draw(self, dtype: DType, count: int, draws: Draws) -> np.ndarray:
        kinds = {"type": np.full(count, 1), "length": np.full(count + 1, 1, dtype.bits), "list": [1] * count}
        return kinds[self.gives]

    def alter(self, old: np.ndarray, aim: np.ndarray, dtype: DType) -> np.ndarray:
        return old ^ aim


@pytest.mark.parametrize("gives", ["type", "length", "list"])
def test_a_fault_of_ones_own_that_draws_nonsense_is_refused_before_anything_changes(gives: str, path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"Wrong\.draw gave .* \(expected uint32 of shape \(3,\)\)"):
        eg.inject(path, Wrong(gives), count=3, in_place=True)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_the_nan_of_nought_times_infinity_is_the_same_everywhere(path: Path) -> None:
    log = eg.inject(path, eg.Scale(float("inf")), fraction=1.0, dry_run=True)
    assert [f"{hit.new:08x}" for hit in log.faults()][:2] == ["7fc00000", "7f800000"]


def test_what_is_no_log_points_to_the_one_beside(path: Path) -> None:
    eg.inject(path, eg.BitFlip(), count=1, in_place=True)
    with pytest.raises(EvergradError, match=r"Did you mean '.*model\.npy\.faults\.jsonl'\?"):
        eg.undo(path)
