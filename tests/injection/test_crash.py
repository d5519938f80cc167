"""A process that is killed while it injects or undoes: the files come back byte for byte, wherever it was."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from kinds import KINDS, Kind, snapshot

import evergrad as eg

SECONDS = 110


def torch_file(folder: Path) -> str:
    torch.manual_seed(0)
    torch.save({"a": torch.randn(40), "b": torch.randn(5, 5), "c": torch.arange(9)}, folder / "model.pt")
    return "model.pt"


def wide_file(folder: Path) -> str:
    """Large enough for faults in more blocks than are written one by one."""
    np.save(folder / "wide.npy", np.random.default_rng(0).standard_normal(100_000).astype(np.float32))
    return "wide.npy"


def gzip_file(folder: Path) -> str:
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("w", data=np.arange(300.0), chunks=(50,), compression="gzip")
    return "data.h5"


def deflated_file(folder: Path) -> str:
    np.savez_compressed(folder / "arrays.npz", w=np.arange(50.0), v=np.arange(20.0))
    return "arrays.npz"


def shards(folder: Path) -> str:
    (folder / "model").mkdir()
    weight_map = {}
    for number in range(3):
        file = f"model-{number}.safetensors"
        safetensors.torch.save_file({f"w{number}": torch.randn(20)}, folder / "model" / file)
        weight_map[f"w{number}"] = file
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return "model"


def mixed_folder(folder: Path) -> str:
    """A file that has to be rewritten, and one that is so with it."""
    (folder / "mixed").mkdir()
    torch.save({"w": torch.randn(20)}, folder / "mixed" / "a.pt")
    np.savez_compressed(folder / "mixed" / "b.npz", w=np.arange(30.0))
    return "mixed"


MAKERS = {
    "patched": (torch_file, 6),
    "mapped": (wide_file, 8000),
    "gzip": (gzip_file, 6),
    "deflated": (deflated_file, 6),
    "shards": (shards, 6),
    "folder": (mixed_folder, 20),
}


def swept(folder: Path, what: dict[str, Any]) -> dict[str, Any]:
    """What `killed.py` saw; its own failure is the test's."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed.py"), folder, json.dumps(what)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def made(folder: Path, kind: str) -> dict[str, Any]:
    """Write one into `start`; what to do to it."""
    make, count = MAKERS[kind]
    (start := folder / "start").mkdir()
    path = make(start)
    return {"verb": "inject", "path": path, "count": count, "log": f"{path}.faults.jsonl", "step": 25}


LONG_LAST = [pytest.param(kind, marks=pytest.mark.slow) if kind == "folder" else kind for kind in MAKERS]


AS_GZIP = [pytest.param(kind, marks=pytest.mark.slow) if kind == "deflated" else kind for kind in LONG_LAST]
"""A deflated file is written anew as one with gzip is."""


@pytest.mark.parametrize("kind", AS_GZIP)
def test_an_injection_that_was_killed_is_undone_from_every_point(kind: str, tmp_path: Path) -> None:
    found = swept(tmp_path, made(tmp_path, kind))
    assert found["points"] > 40
    assert found["mapped"] or kind != "mapped"
    # The log is there before the first byte changes, and there are points on both sides of both.
    assert {"no log", "clean", "injected"} <= set(found["seen"])
    assert ("partly injected" in found["seen"]) == (kind in ("patched", "shards", "folder"))


@pytest.mark.parametrize("kind", ["patched", "gzip", "shards"])
def test_of_a_copy_that_was_killed_there_is_all_or_nothing(kind: str, tmp_path: Path) -> None:
    found = swept(tmp_path, {**made(tmp_path, kind), "out": "out", "log": "out.faults.jsonl"})
    assert found["points"] > 25
    assert set(found["seen"]) == {"absent", "whole"}


@pytest.mark.parametrize("kind", [kind for kind in LONG_LAST if kind != "deflated"])
def test_an_undo_that_was_killed_is_done_again_from_every_point(kind: str, tmp_path: Path) -> None:
    what = {**made(tmp_path, kind), "verb": "undo", "step": 1}
    shutil.copytree(tmp_path / "start", tmp_path / "before")
    eg.inject(tmp_path / "start" / what["path"], eg.BitFlip(), count=what["count"], in_place=True)
    # No file is where the log says, so that it means the one beside it, wherever that is.
    (tmp_path / "start").rename(tmp_path / "injected")
    found = swept(tmp_path, {**what, "start": "injected"})
    assert found["points"] > 5
    assert {"clean", "injected"} <= set(found["seen"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.rewritten], ids=str)
def test_any_mixture_of_old_and_new_bytes_is_undone(kind: Kind, tmp_path: Path) -> None:
    """As a power failure leaves it: of the bytes that were to change some have, by pages, by blocks or one by one."""
    (folder := tmp_path / "in").mkdir()
    path = kind.make(folder)
    before = snapshot(folder)
    log = eg.inject(path, eg.BitFlip(), count=24, seed=1, in_place=True, log=tmp_path / "log.jsonl")
    after = snapshot(folder)
    dice = np.random.default_rng(0)
    for grain in (1, 1, 1, 8, 64, 512, 4096):
        for name in before:
            old, new = (np.frombuffer(tree[name][1], np.uint8) for tree in (before, after))
            chosen = np.repeat(dice.random(len(old) // grain + 1) < dice.random(), grain)[: len(old)]
            (folder / name).write_bytes(np.where(chosen, new, old).tobytes())
        mixed = snapshot(folder)
        state = "clean" if mixed == before else "injected" if mixed == after else "partly injected"
        assert eg.undo(log).found_state == state
        assert snapshot(folder) == before
        for name, (_, data) in after.items():
            (folder / name).write_bytes(data)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name == "folder with a deflated npz"], ids=str)
def test_of_files_that_were_replaced_any_may_be_the_old_one(kind: Kind, tmp_path: Path) -> None:
    (folder := tmp_path / "in").mkdir()
    log = eg.inject(kind.make(folder), eg.BitFlip(), count=24, in_place=True, dry_run=True)
    before = snapshot(folder)
    log = eg.inject(log.file, eg.BitFlip(), count=24, in_place=True)
    after = snapshot(folder)
    changed = [name for name in before if before[name] != after[name]]
    assert len(changed) == 3
    for kept in range(1, 7):
        for number, name in enumerate(changed):
            (folder / name).write_bytes((before if kept >> number & 1 else after)[name][1])
        assert eg.undo(log).found_state == "partly injected"
        assert snapshot(folder) == before


# Runs until it is killed; says when it begins to write.
_LARGE = """
import os, sys
import evergrad as eg
path, told = sys.argv[1], False
def heard(event, arguments):
    global told
    if event == "open" and not told and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        told = True
        os.write(1, b"w")
sys.addaudithook(heard)
eg.inject(path, eg.BitFlip(), count=200_000, seed=9, in_place=True)
os.write(1, b"d")
"""


def killed_after(path: Path, seconds: float) -> float | None:
    """Inject in another process and kill it that long after its first write. Return the run time if it ended first."""
    with subprocess.Popen([sys.executable, "-c", _LARGE, path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert os.read(child.stdout.fileno(), 1) == b"w"
            began = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
        finally:
            child.kill()
    # It may also end between the time limit and the signal.
    assert child.returncode in (0, -signal.SIGKILL)
    return time.monotonic() - began if child.returncode == 0 else None


def test_a_large_injection_is_undone_whenever_it_was_killed(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(8 << 20).astype(np.float32)
    np.save(path := tmp_path / "large.npy", values)
    before = path.read_bytes()
    assert len(before) > 32 << 20
    log = tmp_path / "large.npy.faults.jsonl"
    took = killed_after(path, SECONDS)
    assert took is not None
    assert eg.undo(log).found_state == "injected"
    log.unlink()
    dice, seen = random.Random(0), []
    for share in (0.2, 0.5, 0.8, 1.0):
        killed_after(path, took * share * dice.random())
        seen.append(eg.undo(log).found_state.value if log.exists() else "no log")
        assert path.read_bytes() == before, seen
        log.unlink(missing_ok=True)
    left = [child.name for child in tmp_path.iterdir() if child != path and ".partial" not in child.name]
    assert left == []
