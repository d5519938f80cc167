"""Folders with pipes, sockets, devices and links in them, and files that claim far more than they hold.

Every verb answers at once and in one line, leaves nothing behind, and takes memory in proportion to the file.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import evergrad as eg
from evergrad.errors import FileAccessError, LimitExceeded

VERBS = [
    ["inspect", "ck"],
    ["verify", "ck"],
    ["diff", "ck", "ck"],
    ["convert", "ck", "converted.safetensors", "--tensors-only"],
    ["inject", "ck", "--count", "2", "--out", "bad"],
    ["undo", "bad.faults.jsonl"],
    ["inject", "ck", "--count", "2", "--in-place", "--log", "in_place.jsonl"],
    ["replay", "bad.faults.jsonl", "ck", "--out", "again"],
    ["undo", "in_place.jsonl"],
]
ALL_VERBS = """
import json, sys
from evergrad.cli import main
codes = [main(verb) for verb in json.loads(sys.argv[1])]
print("\\n" + json.dumps(codes))
"""


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket may have 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": bind,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to its folder": lambda path: path.symlink_to("."),
    "link to the root": lambda path: path.symlink_to("/"),
}


def verbs(folder: Path) -> tuple[list[int], str]:
    """The exit codes of all verbs in one process, and what they said on stderr; fails if one waits for ever."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_VERBS, json.dumps(VERBS)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes, done.stderr


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_folder_with_a_special_file_is_served_without_it(kind: str, tmp_path: Path) -> None:
    name = "extra.safetensors"
    (tmp_path / "ck").mkdir()
    safetensors.torch.save_file({"a": torch.ones(40)}, tmp_path / "ck" / "one.safetensors")
    torch.save({"b": torch.ones(40)}, tmp_path / "ck" / "two.pt")
    SPECIAL[kind](tmp_path / "ck" / name)
    codes, errors = verbs(tmp_path)
    assert codes == [0] * len(VERBS), errors
    assert not [path.name for path in tmp_path.iterdir() if "partial" in path.name]
    assert {"one.safetensors", "two.pt"} <= set(os.listdir(tmp_path / "bad"))
    assert eg.compare(tmp_path / "ck", tmp_path / "bad").equal, "the injection into the copy is undone"
    kept = [entry.name for entry in os.scandir(tmp_path / "bad") if entry.is_symlink()]
    assert kept == ([name] if kind in ("link to its folder", "link to the root") else [])


@pytest.mark.parametrize("name", [".metadata", "latest", "rank-00000.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_a_special_file_under_a_name_that_formats_look_for_is_not_waited_for(
    kind: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "ck").mkdir()
    safetensors.torch.save_file({"a": torch.ones(40)}, tmp_path / "ck" / "rank-00000.safetensors")
    SPECIAL[kind](tmp_path / "ck" / name)
    codes, errors = verbs(tmp_path)
    assert set(codes) <= {0, 2}
    lines = errors.splitlines()
    assert len(lines) == codes.count(2), errors
    assert all(line.startswith("evergrad: ") for line in lines)
    assert not [path.name for path in tmp_path.iterdir() if "partial" in path.name]


def test_a_copy_follows_a_link_to_a_folder_with_files_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    safetensors.torch.save_file({"a": torch.ones(40)}, tmp_path / "elsewhere" / "model.safetensors")
    (tmp_path / "ck").symlink_to("elsewhere")
    eg.inject(tmp_path / "ck", eg.BitFlip(), count=1, out=tmp_path / "bad")
    assert not (tmp_path / "bad").is_symlink()
    assert not eg.compare(tmp_path / "ck", tmp_path / "bad").equal
    with eg.open_checkpoint(tmp_path / "elsewhere") as ck:
        assert torch.equal(ck.read("a"), torch.ones(40)), "the source stays as it is"


@pytest.mark.parametrize("what", ["log", "settings"])
def test_a_pipe_in_the_place_of_a_log_or_of_settings_is_one_line(what: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(40)}, tmp_path / "a.pt")
    os.mkfifo(tmp_path / "pipe.json")
    verb = ["undo", "pipe.json"] if what == "log" else ["inject", "a.pt", "--config", "pipe.json", "--out", "b.pt"]
    done = subprocess.run(
        [sys.executable, "-m", "evergrad", *verb],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "expected a file, found a named pipe" in done.stderr


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize("make", [os.mkfifo, bind, device], ids=["pipe", "socket", "device"])
def test_no_verb_puts_a_file_in_the_place_of_a_special_one(
    make: Callable[[Path], None], overwrite: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from evergrad.cli import main

    torch.save({"a": torch.ones(40)}, tmp_path / "a.pt")
    source, special = str(tmp_path / "a.pt"), tmp_path / "special.pt"
    log = str(eg.inject(source, eg.BitFlip(), count=1, out=tmp_path / "bad.pt").path)
    make(special)
    before = special.lstat()
    for verb in (
        ["inject", source, "--count", "1", "--out", str(special), *overwrite],
        ["replay", log, source, "--out", str(special), *overwrite],
        ["convert", source, str(special), *overwrite],
    ):
        assert main(verb) == 2, verb
        told = capsys.readouterr().err
        assert told == f"evergrad: {special}: is no file, and is not replaced by one. Choose another name.\n", verb
    with pytest.raises(FileAccessError, match="is no file, and is not replaced by one"):
        eg.save_hdf5({"a": torch.ones(2)}, special)
    assert (special.lstat().st_ino, special.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "bad.pt", "bad.pt.faults.jsonl", "special.pt"]


@pytest.mark.parametrize(
    "verb",
    [
        ["study", "show", "pipe"],
        ["study", "run", "pipe", "--out", "made"],
        ["run", "-n", "1", "--failures", "pipe", "--out", "made", "script.py"],
        ["replay", "bad.pt.faults.jsonl", "a.pt", "--rename", "pipe", "--out", "made"],
    ],
    ids=" ".join,
)
def test_a_pipe_that_a_user_names_is_not_waited_for(verb: list[str], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(40)}, tmp_path / "a.pt")
    eg.inject(tmp_path / "a.pt", eg.BitFlip(), count=1, out=tmp_path / "bad.pt")
    (tmp_path / "script.py").write_text("")
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(
        [sys.executable, "-m", "evergrad", *verb],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "cannot be read: expected a file, found a named pipe" in done.stderr
    assert not (tmp_path / "made").exists()


PEAK = """
import json, re, sys
from evergrad.cli import main
codes = [main(verb) for verb in json.loads(sys.argv[1])]
print(codes, re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def peak(folder: Path, *run: list[str]) -> tuple[list[int], int]:
    """Exit codes, and the largest resident size in KiB of a process that runs these verbs."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, json.dumps(run)], cwd=folder, capture_output=True, text=True, check=True
    )
    codes, _, size = done.stderr.splitlines()[-1].rpartition(" ")
    return json.loads(codes), int(size)


def test_an_expanded_tensor_takes_the_memory_of_its_bytes(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 20)}, tmp_path / "small.pt")
    torch.save({"w": torch.ones(1).expand(1 << 26)}, tmp_path / "large.pt")
    assert (tmp_path / "large.pt").stat().st_size < 2_000

    def run(name: str) -> list[list[str]]:
        return [
            ["inject", name, "--count", "1", "--out", f"bad-{name}"],
            ["replay", f"bad-{name}.faults.jsonl", name, "--out", f"again-{name}"],
            ["undo", f"bad-{name}.faults.jsonl"],
            ["convert", name, f"other-{name}"],
            ["inspect", name],
        ]

    (codes, small), (more, large) = peak(tmp_path, *run("small.pt")), peak(tmp_path, *run("large.pt"))
    assert codes == more == [0] * 5
    assert large < small + 60_000, "256 MiB are claimed"
    assert (tmp_path / "other-large.pt").stat().st_size < 2_000


def test_views_that_claim_more_than_memory_has_are_refused(tmp_path: Path) -> None:
    one = torch.ones(2)
    torch.save({f"w{n}": one[n % 2].expand(1 << 25) for n in range(40)}, tmp_path / "views.pt")
    with eg.open_checkpoint(tmp_path / "views.pt") as ck, pytest.raises(LimitExceeded, match="views of 5,368,709,120"):
        ck.state()
    (code,), size = peak(tmp_path, ["convert", "views.pt", "out.pt"])
    assert code == 2
    assert size < 1_000_000
    assert os.listdir(tmp_path) == ["views.pt"]


def npy(axes: int) -> bytes:
    shape = (*[1] * (axes - 1), 16)
    header = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + np.ones(16, "<f4").tobytes()


def with_axes(folder: Path, kind: str, axes: int) -> Path:
    """A file of one array with so many axes."""
    shape = (*[1] * (axes - 1), 16)
    path = folder / kind
    if kind == "a.npy":
        path.write_bytes(npy(axes))
    elif kind == "a.npz":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("w.npy", npy(axes))
    elif kind in ("a.pt", "old.pt"):
        torch.save({"w": torch.ones(shape)}, path, _use_new_zipfile_serialization=kind == "a.pt")
    else:
        noted = {"evergrad.dtypes": json.dumps({"w": ["complex128", [1] * (axes - 1) + [4]]})}
        entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 64]}
        header = (
            {"w": entry}
            if kind == "a.safetensors"
            else {
                "__metadata__": noted,
                "w": {**entry, "dtype": "U8", "shape": [64]},
            }
        )
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    return path


KINDS = ["a.npy", "a.npz", "a.pt", "old.pt", "a.safetensors", "noted.safetensors"]


@pytest.mark.parametrize("kind", KINDS)
def test_more_axes_than_numpy_has_are_one_line(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from evergrad.cli import main

    path = with_axes(tmp_path, kind, 65)
    for verb in (
        ["inspect", str(path)],
        ["verify", str(path)],
        ["diff", str(path), str(path)],
        ["convert", str(path), str(tmp_path / "out.npz"), "--tensors-only"],
        ["inject", str(path), "--count", "1", "--out", str(tmp_path / "bad")],
        ["inject", str(path), "--count", "1", "--in-place"],
    ):
        assert main(verb) == 2, verb
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "65" in told
        assert "at most 64" in told
    assert os.listdir(tmp_path) == [kind]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_axes_as_numpy_has_are_served(kind: str, tmp_path: Path) -> None:
    path = with_axes(tmp_path, kind, 64)
    log = eg.inject(path, eg.BitFlip(), count=1, out=tmp_path / "bad")
    assert eg.verify(tmp_path / "bad").tensors
    assert eg.undo(log).elements == 1
    assert eg.compare(path, tmp_path / "bad").equal


def test_an_array_of_more_axes_than_hdf5_has_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from evergrad.cli import main

    path = with_axes(tmp_path, "a.pt", 33)
    assert main(["convert", str(path), str(tmp_path / "a.h5")]) == 2
    assert "has too many axes for HDF5 (expected at most 32, found w with 33)" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.pt"]
