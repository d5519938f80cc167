"""What cannot be done is said in one clear line, and nothing has changed: no byte, no log, nothing left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from kinds import snapshot

import evergrad as eg
from evergrad.errors import (
    DamagedFile,
    EvergradError,
    FileAccessError,
    UnknownFormat,
    UnknownTensor,
    UsageError,
)
from evergrad.injection import Fault
from unprivileged import Unprivileged

FLIP = eg.BitFlip()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    torch.save({"conv.weight": torch.randn(8, 5), "fc.weight": torch.randn(30).half()}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@contextmanager
def refused(folder: Path, kind: type[EvergradError], *told: str) -> Iterator[None]:
    """One line of that kind that says all this, and the folder is as it was."""
    before = snapshot(folder, logs=True), sorted(folder.rglob("*"))
    with pytest.raises(kind) as caught:
        yield
    assert str(caught.value).isprintable()
    for text in told:
        assert text in str(caught.value)
    assert (snapshot(folder, logs=True), sorted(folder.rglob("*"))) == before


@pytest.mark.parametrize("where", [{"in_place": True}, {"out": "out.pt"}], ids=["in place", "copy"])
@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"count": 1, "where": "conv.wieght"}, UnknownTensor, ["'conv.wieght'", "Did you mean 'conv.weight'"]),
        ({"count": 1, "where": ["fc.weight", "nothing"]}, UnknownTensor, ["'nothing'"]),
        ({"count": 1, "where": "role:optimizer"}, UsageError, ["optimizer"]),
        ({"count": 71}, UsageError, ["71 faults in 70 elements"]),
        ({"count": 41, "where": "conv.weight"}, UsageError, ["41 faults in 40 elements"]),
        ({"count": -1}, UsageError, ["count -1"]),
        ({"count": 1.5}, UsageError, ["count 1.5"]),
        ({"count": 1, "fraction": 0.1}, UsageError, ["count and fraction"]),
        ({"fraction": 1.1}, UsageError, ["fraction 1.1"]),
        ({"fraction": 1e-9}, UsageError, ["less than half a fault"]),
        ({"probability": float("nan")}, UsageError, ["probability nan"]),
        ({}, UsageError, ["how many faults?"]),
        ({"count": 1, "seed": -1}, UsageError, ["seed -1"]),
        ({"count": 1, "sampling": "layer"}, UsageError, ["sampling: expected element or tensor, found 'layer'"]),
        ({"count": 1, "dtypes": ["float33"]}, UsageError, ["'float33'"]),
        ({"count": 1, "dtypes": ["int8"]}, UsageError, ["is not int8"]),
        ({"count": 1, "digest": "md5"}, UsageError, ["digest: expected blocks or full, found 'md5'"]),
        ({"count": 1, "log": "missing/log.jsonl"}, UsageError, ["there is no folder"]),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else " ".join(f"{k}={v}" for k, v in value.items()),
)
def test_what_was_asked_for_cannot_be(
    options: dict[str, Any],
    kind: type[EvergradError],
    told: list[str],
    where: dict[str, Any],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(path.parent)
    with refused(path.parent, kind, *told):
        eg.inject(path.name, FLIP, **options, **where)


@pytest.mark.parametrize(
    "fault",
    [eg.BitFlip(bits=40), eg.BitFlip(bits=range(16, 40)), eg.BitFlip(bits=31, burst=2), eg.BitMask("1" * 33)],
    ids=str,
)
def test_bits_that_no_tensor_has_are_named_with_the_tensors(fault: Fault, path: Path) -> None:
    with refused(path.parent, UsageError, "fits no tensor", "conv.weight", "fc.weight", "32 bits", "16 bits"):
        eg.inject(path, fault, count=1, in_place=True)


@pytest.mark.parametrize("bits", [-1, 64, "exponant", range(0), range(2**70), 1.5, [1]], ids=str)
def test_bits_that_are_none_are_refused_at_once(bits: Any) -> None:
    for fault in (eg.BitFlip, lambda bits: eg.StuckAt(1, bits)):
        with pytest.raises(UsageError, match="bits"):
            fault(bits)


@pytest.mark.parametrize("fault", ["BitFlip", eg.BitFlip, None, 3], ids=str)
def test_what_is_no_fault_is_refused(fault: Any, path: Path) -> None:
    with refused(path.parent, UsageError, "expected a fault"):
        eg.inject(path, fault, count=1, in_place=True)


def test_the_result_needs_one_place(path: Path, tmp_path: Path) -> None:
    with refused(tmp_path, UsageError, "where to?", "out", "in_place"):
        eg.inject(path, FLIP, count=1)
    with refused(tmp_path, UsageError, "out and in_place", "choose one"):
        eg.inject(path, FLIP, count=1, out=tmp_path / "out.pt", in_place=True)


def test_a_copy_goes_only_where_there_is_room_for_it(path: Path, tmp_path: Path, data: Path) -> None:
    (tmp_path / "taken.pt").write_text("mine")
    (tmp_path / "link.pt").symlink_to(path)
    shutil.copytree(data / "sharded", folder := tmp_path / "gpt")
    index = folder / "model.safetensors.index.json"
    wrong = [
        (path, tmp_path / "taken.pt", "exists already"),
        (path, path, "is the source"),
        (path, tmp_path / "gpt" / ".." / "model.pt", "is the source"),
        (path, tmp_path / "link.pt", "is the source"),
        (path, tmp_path, "exists already"),
        (path, tmp_path / "missing" / "out.pt", "there is no folder"),
        (path, tmp_path / "taken.pt" / "out.pt", "there is no folder"),
        (folder, folder, "is the source"),
        (folder, folder / "inside", "lies within the folder"),
        (folder, tmp_path / "taken.pt", "exists already"),
        (index, index, "is the source"),
        (index, next(folder.glob("*.safetensors")), "is the source"),
        (path, tmp_path / ("n" * 300), "nnn"),
    ]
    for source, out, told in wrong:
        with refused(tmp_path, EvergradError, told):
            eg.inject(source, FLIP, count=1, out=out)
    assert (tmp_path / "taken.pt").read_text() == "mine"
    eg.inject(path, FLIP, count=1, out=tmp_path / "taken.pt", overwrite=True)
    assert torch.load(tmp_path / "taken.pt").keys() == torch.load(path).keys()


def test_the_result_and_its_log_are_two_files(path: Path, tmp_path: Path) -> None:
    with refused(tmp_path, EvergradError, "out.pt"):
        eg.inject(path, FLIP, count=1, out=tmp_path / "out.pt", log=tmp_path / "out.pt")
    with refused(tmp_path, EvergradError, "nnn"):
        eg.inject(path, FLIP, count=1, in_place=True, log=tmp_path / ("n" * 300))


@pytest.mark.parametrize("where", [{"in_place": True}, {"out": "../copy"}], ids=["in place", "copy"])
def test_a_folder_may_be_called_by_a_dot(
    where: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(data / "sharded", folder := tmp_path / "gpt")
    monkeypatch.chdir(folder)
    before = snapshot(folder)
    log = eg.inject(".", FLIP, count=3, **where)
    eg.undo(log)
    assert snapshot(folder) == before == snapshot(Path(log.out))


@pytest.mark.parametrize("where", [{"in_place": True}, {"out": "out.pt"}], ids=["in place", "copy"])
@pytest.mark.parametrize(
    ("kind", "name", "make"),
    [
        (FileAccessError, "missing.pt", lambda path: None),
        (UnknownFormat, "empty.pt", lambda path: path.touch()),
        (UnknownFormat, "text.pt", lambda path: path.write_text("hello")),
        (UnknownFormat, "folder", lambda path: path.mkdir()),
        (FileAccessError, "link.pt", lambda path: path.symlink_to("nowhere")),
    ],
)
def test_what_is_no_checkpoint_is_refused(
    kind: type[EvergradError],
    name: str,
    make: Callable[[Path], None],
    where: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    with refused(tmp_path, kind, name):
        eg.inject(name, FLIP, count=1, **where)


@pytest.mark.parametrize("act", ["inject(path, eg.BitFlip(), count=1, in_place=True)", "undo(log, path)"])
def test_a_pipe_is_refused_and_not_waited_for(
    act: str, path: Path, tmp_path: Path, limited: Callable[..., str]
) -> None:
    log = eg.inject(path, FLIP, count=1, out=tmp_path / "out.pt")
    os.mkfifo(tmp_path / "pipe")
    code = f"""
        import sys, evergrad as eg
        path, log = sys.argv[1:]
        try:
            eg.{act}
        except eg.EvergradError as error:
            print(error)
    """
    assert "is neither a file nor a folder" in limited(code, tmp_path / "pipe", log.path, seconds=10)


@pytest.mark.parametrize("where", [{"in_place": True}, {"out": "out.pt"}], ids=["in place", "copy"])
def test_a_damaged_source_is_refused(where: dict[str, Any], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    path.write_bytes(path.read_bytes()[:-30])
    with refused(path.parent, DamagedFile, "model.pt"):
        eg.inject(path.name, FLIP, count=1, **where)


@pytest.mark.parametrize("where", [{"in_place": True}, {"out": "out.h5"}], ids=["in place", "copy"])
def test_damage_that_only_rewriting_meets_leaves_nothing_behind(
    where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with h5py.File(path := tmp_path / "data.h5", "w") as file:
        data = file.create_dataset("w", data=np.arange(60.0), chunks=(60,), compression="gzip")
        place = data.id.get_chunk_info(0).byte_offset
    raw = bytearray(path.read_bytes())
    raw[place + 20 : place + 40] = bytes(20)
    path.write_bytes(raw)
    with refused(tmp_path, DamagedFile, "data.h5"):
        eg.inject(path.name, FLIP, count=3, **where)


def test_a_file_that_may_not_be_written_is_not_altered_in_place(unprivileged: Unprivileged, path: Path) -> None:
    with h5py.File(unprivileged.folder / "gzip.h5", "w") as file:
        file.create_dataset("w", data=np.arange(60.0), chunks=(6,), compression="gzip")
    shutil.copy(path, unprivileged.folder / "model.pt")
    for name in ("model.pt", "gzip.h5"):
        (file := unprivileged.folder / name).chmod(0o444)
        with refused(unprivileged.folder, FileAccessError, name, "permission denied"), unprivileged:
            eg.inject(file, FLIP, count=1, in_place=True)


def test_a_log_needs_a_folder_that_may_be_written(unprivileged: Unprivileged, path: Path) -> None:
    for name in ("model.pt", "gzip.h5"):
        file = unprivileged.folder / name
        if name == "model.pt":
            shutil.copy(path, file)
        else:
            with h5py.File(file, "w") as opened:
                opened.create_dataset("w", data=np.arange(60.0), chunks=(6,), compression="gzip")
        file.chmod(0o666)  # the file may be written, its folder may not
        with refused(unprivileged.folder, FileAccessError, "permission denied"), unprivileged:
            eg.inject(file, FLIP, count=1, in_place=True)


def test_a_copy_needs_a_folder_that_may_be_written(unprivileged: Unprivileged, path: Path) -> None:
    shutil.copy(path, source := unprivileged.folder / "model.pt")
    source.chmod(0o444)
    (unprivileged.folder / "closed").mkdir(mode=0o555)
    with refused(unprivileged.folder, FileAccessError, "permission denied"), unprivileged:
        eg.inject(source, FLIP, count=1, out=unprivileged.folder / "closed" / "out.pt")


def test_undo_of_a_file_that_may_not_be_written_is_refused(unprivileged: Unprivileged, path: Path) -> None:
    shutil.copy(path, file := unprivileged.folder / "model.pt")
    log = eg.inject(file, FLIP, count=1, in_place=True)
    log.path.chmod(0o444)
    file.chmod(0o444)
    with refused(unprivileged.folder, FileAccessError, "permission denied"), unprivileged:
        eg.undo(log.path)


def test_a_log_of_another_file_is_refused(path: Path, tmp_path: Path) -> None:
    torch.save({"conv.weight": torch.randn(8, 5), "fc.weight": torch.randn(30).half()}, other := tmp_path / "same.pt")
    torch.save(
        {"conv.weight": torch.randn(5, 8), "fc.weight": torch.randn(30).half()}, turned := tmp_path / "turned.pt"
    )
    torch.save({"conv.weight": torch.randn(8, 5).double()}, double := tmp_path / "double.pt")
    torch.save({"first": torch.randn(8, 5)}, named := tmp_path / "named.pt")
    np.save(tmp_path / "one.npy", np.zeros(9))
    log = eg.inject(path, FLIP, fraction=0.5, in_place=True)
    for file in (other, turned, double, named, tmp_path / "one.npy"):
        with refused(tmp_path, UsageError, file.name, "Nothing was changed"):
            eg.undo(log, file)
    for file in (turned, double):
        with refused(tmp_path, UsageError, file.name):
            eg.replay(log, file, in_place=True)
