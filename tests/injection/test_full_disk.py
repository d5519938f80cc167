"""Too little room for the copy, for the log, or for a byte: one clear line, and all is as it was or can be undone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

PROGRAM = Path(__file__).with_name("cramped.py")
SECONDS = 100


def start(folder: Path) -> None:
    """Files of each way to be altered, larger than the log of their faults."""
    (folder / "start").mkdir()
    torch.save({"a": torch.randn(2000), "b": torch.randn(1000)}, folder / "start" / "model.pt")
    np.savez_compressed(folder / "start" / "arrays.npz", w=np.random.default_rng(0).standard_normal(1200))
    with h5py.File(folder / "start" / "data.h5", "w") as file:
        values = np.random.default_rng(0).standard_normal(1200)
        file.create_dataset("w", data=values, chunks=(200,), compression="gzip")
    (folder / "start" / "folder").mkdir()
    for name in "ab":
        np.save(folder / "start" / "folder" / f"{name}.npy", np.random.default_rng(0).standard_normal(700))


def ends(output: str) -> dict[tuple[str, bool], list[str]]:
    """How it ended, from no room to plenty, of each checkpoint in place and as a copy."""
    found: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for row in map(json.loads, output.splitlines()):
        found[row["name"], row["copy"]].append(row["ended"])
    return found


def run(command: list[object]) -> subprocess.CompletedProcess[str]:
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=SECONDS, env={**os.environ, **threads}
    )


def assert_all_or_nothing(output: str, *, in_place: set[str]) -> None:
    found = ends(output)
    assert len(found) == 8
    for (name, copy), rows in found.items():
        assert rows[0] == "refused", name
        assert rows[-1] == "done", name
        assert set(rows) <= ({"refused", "done"} if copy else {"refused", "done", *in_place}), name


def test_where_no_file_may_become_longer_nothing_is_left_half_done(tmp_path: Path) -> None:
    start(tmp_path)
    done = run([sys.executable, PROGRAM, tmp_path, "limit"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert_all_or_nothing(done.stdout, in_place={"undone"})
    # The log was short enough, and a byte behind the limit could not be written: what was done is undone by it.
    assert "undone" in ends(done.stdout)["model.pt", False]


def on_a_small_disk(folder: Path, size: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Run something while the folder is a file system of its own; a skip where that is not permitted."""
    mount = 'mount -t tmpfs -o "size=$1" none "$2" 2>/dev/null || exit 77; shift 2; exec "$@"'
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare, and so no small disk to fill")
    done = run(["unshare", "-Urm", "sh", "-c", mount, "sh", size, folder, *command])
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("user namespaces are not permitted here, and so there is no small disk to fill")
    return done


def test_on_a_full_disk_nothing_is_left_half_done(tmp_path: Path) -> None:
    start(tmp_path)
    (disk := tmp_path / "disk").mkdir()
    script = 'cp -r "$1" "$2/start" && exec "$3" "$4" "$2" disk'
    done = on_a_small_disk(disk, "300k", "sh", "-c", script, "sh", tmp_path / "start", disk, sys.executable, PROGRAM)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_all_or_nothing(done.stdout, in_place=set())
