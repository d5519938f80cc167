"""Logs that are torn, edited, foreign or made to mislead: one clear line, and nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from kinds import snapshot

import evergrad as eg
from evergrad.errors import DamagedFile, EvergradError, UsageError
from evergrad.injection.log import MARK

Lines = list[Any]

# What a hostile value may be, wherever it stands.
VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**70, -(2**63), -(10**9), 1.5, 1e300, float("nan"), float("inf"),
    "", "x", "00", "f" * 7, "f" * 8, "f" * 4096, "../../etc/passwd", "/etc/passwd", "\0", "\ud800", "a\nb\x1b[31m",
    [], [1], [-1], [2**70], ["x"], [None], [[0, "00", "01"]], [[-(10**9), "00", "01"]], [[2**70, "00", "01"]],
    [[0, "", ""]], {}, {"name": "x"}, {"kind": "bitflip", "elements": 0}, {"kind": "mine", "elements": "many"},
    {"kind": "stuckat", "value": 7}, {"kind": "scale", "factor": []}, {"kind": "bitflip", "bits": [1, 2, 0]},
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure leaves is not at stake here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(params=["patched", "rewritten"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The log of an injection in place into a small file: by its places, or by rewriting it."""
    if request.param == "patched":
        torch.save({"w": torch.randn(6, 5), "v": torch.randn(7)}, path := tmp_path / "model.pt")
    else:
        with h5py.File(path := tmp_path / "model.h5", "w") as file:
            file.create_dataset("w", data=np.arange(40.0), chunks=(9,), compression="gzip")
    (tmp_path / "before").write_bytes(path.read_bytes())
    return eg.inject(path, eg.BitFlip(), count=5, in_place=True).path


def lines_of(log: Path) -> Lines:
    return [json.loads(line) for line in log.read_text().splitlines()[:-1]]


def sealed(lines: Lines) -> bytes:
    """Lines as a log whose digest holds, whatever they say."""
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return body + json.dumps({"end": len(lines), "digest": hashlib.sha256(body).hexdigest()}).encode() + b"\n"


def harmless(log: Path, told: str = "") -> None:
    """Whatever the log is, loading, undoing and replaying it end well or in one line, and no wrong byte is written."""
    folder = log.parent
    (file,) = (path for path in folder.glob("model.*") if path.suffix in (".pt", ".h5"))
    before, injected = (folder / "before").read_bytes(), file.read_bytes()
    text = log.read_bytes()
    others = {name: data for name, data in snapshot(folder, logs=True).items() if name not in (file.name, log.name)}
    messages = []
    for act in (eg.InjectionLog.load, eg.undo, lambda log: eg.replay(log, file, dry_run=True)):
        try:
            act(log)
        except EvergradError as error:
            assert str(error).isprintable(), "one line"
            messages.append(str(error))
        assert file.read_bytes() in (before, injected)
        file.write_bytes(injected)
        assert log.read_bytes() in (text, text + MARK), "at most the mark that it is undone"
        log.write_bytes(text)
    after = {name: data for name, data in snapshot(folder, logs=True).items() if name not in (file.name, log.name)}
    assert after == others
    assert not told or any(told in message for message in messages), messages


def test_a_torn_log_is_known_for_one_wherever_it_ends(log: Path) -> None:
    text = log.read_bytes()
    for end in sorted({*range(0, 60), *range(0, len(text) - 2, max(1, len(text) // 60)), len(text) - 2}):
        log.write_bytes(text[:end])
        harmless(log, str(log))
        with pytest.raises(DamagedFile):
            eg.InjectionLog.load(log)
    log.write_bytes(text[:-1])  # all but the end of the last line
    assert eg.undo(log).found_state == "injected"


def test_a_log_in_which_one_byte_is_another_is_refused(log: Path) -> None:
    text = log.read_bytes()
    for place in range(0, text.rindex(b"\n", 0, -1), max(1, len(text) // 80)):
        log.write_bytes(text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :])
        with pytest.raises(EvergradError):
            eg.InjectionLog.load(log)
        harmless(log, str(log))


@pytest.mark.parametrize("text", [b"", b"\n", b"{}", b"[]", b"null", b"\x89HDF", b"{" * 5000, b"\xff\xfe" * 50])
def test_what_is_no_log_is_said_to_be_none(text: bytes, log: Path) -> None:
    log.write_bytes(text)
    harmless(log, "is no injection log")
    log.write_bytes(b'{"evergrad": "injection log"' + text)
    harmless(log, str(log))


def test_random_bytes_are_no_log(log: Path) -> None:
    dice = random.Random(3)
    for _ in range(60):
        log.write_bytes(dice.choice([b"", b'{"evergrad": "injection log"']) + dice.randbytes(dice.randrange(200)))
        harmless(log, str(log))


def _header(**changes: Any) -> Callable[[Lines], None]:
    return _named(changes, lambda lines: lines[0].update(changes))


def _file(**changes: Any) -> Callable[[Lines], None]:
    return _named(changes, lambda lines: lines[0]["files"][0].update(changes))


def _tensor(**changes: Any) -> Callable[[Lines], None]:
    return _named(changes, lambda lines: lines[1].update(changes))


def _index(number: int) -> Callable[[Lines], None]:
    return _named({"index": number}, lambda lines: lines[1]["index"].__setitem__(-1, number))


def _named(changes: dict[str, Any], alter: Callable[[Lines], None]) -> Callable[[Lines], None]:
    alter.__name__ = f"{changes!s:.50}"
    return alter


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (_header(schema_version=99), "schema version 99"),
        (_header(schema_version="1"), "schema version '1'"),
        (_header(files=[]), ""),
        (_header(out="/nowhere/at/all"), "is not there any more"),
        (_header(out="f" * 4096), ""),
        (_header(fault={"kind": "bitflip", "bits": [0, 2**70, 1]}), ""),
        (_header(fault={"kind": "stuckat", "value": 7}), "stuck at 7"),
        (_header(fault={"kind": "mine", "elements": "many"}), ""),
        (_header(fault={"kind": "mine", "elements": 7}), ""),
        (_header(fault={"kind": "mine", "elements": -3}), ""),
        (_file(name="../model.pt"), "outside the checkpoint"),
        (_file(name="/etc/passwd"), "outside the checkpoint"),
        (_file(name="a/../../b"), "outside the checkpoint"),
        (_file(size=10**15), ""),
        (_file(seals=[[0, "00", "0000"]]), "changes its length"),
        (_index(10**6), "an index beyond"),
        (_index(-1), "an index beyond"),
        (_index(2**70), "is no injection log"),
        (_tensor(old="00"), ""),
        (_tensor(bits="f" * 41), ""),
        (_tensor(new="no hex at all"), ""),
        (_tensor(dtype="float7"), "float7"),
        (_tensor(shape=[-1, -30]), ""),
        (_tensor(tensor="w2"), "has no tensor 'w2'"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.__name__,
)
def test_a_log_that_says_what_cannot_be_is_refused(
    alter: Callable[[Lines], None], told: str, log: Path, request: pytest.FixtureRequest
) -> None:
    rewritten = "rewritten" in request.node.name
    if rewritten and told.startswith("has no tensor"):
        told = ""  # the file's own bytes are compared, and they are what undo brings back
    alter(lines := lines_of(log))
    log.write_bytes(sealed(lines))
    harmless(log, told)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything in a line."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] + [found for key, item in inner for found in _places(item, (*path, key))]


def mutated(lines: Lines, dice: random.Random) -> Lines:
    """The lines with one or two values that are hostile, gone, or taken from elsewhere in the log."""
    lines = json.loads(json.dumps(lines))
    for _ in range(dice.choice([1, 1, 2])):
        number = dice.randrange(len(lines))
        places = [path for path in _places(lines[number]) if path]
        if not places or dice.random() < 0.05:
            lines.insert(dice.randrange(1, len(lines) + 1), dice.choice([*lines, *VALUES]))
            continue
        *way, last = dice.choice(places)
        holder = lines[number]
        for key in way:
            holder = holder[key]
        if dice.random() < 0.15:
            del holder[last]
        else:
            holder[last] = dice.choice(VALUES)
    return lines


@pytest.mark.parametrize("seed", range(4))
def test_whatever_stands_in_a_log_only_our_own_errors_come_out(seed: int, log: Path) -> None:
    lines, dice = lines_of(log), random.Random(seed)
    for _ in range(60):
        log.write_bytes(sealed(bad := mutated(lines, dice)))
        try:
            harmless(log)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} from {json.dumps(bad):.4000}") from error


def test_a_checksum_of_any_length_costs_no_more_than_its_length(log: Path, limited: Callable[..., str]) -> None:
    lines = lines_of(log)
    for change in lines[0]["files"]:
        change["seals"] = [[0, "00" * 60, "ff" * 60]]
    log.write_bytes(sealed(lines))
    code = """
        import sys, evergrad as eg
        try:
            eg.undo(sys.argv[1])
        except eg.EvergradError as error:
            print(error)
    """
    limited(code, log, seconds=20)
    harmless(log)


def test_a_log_of_a_newer_version_says_so(log: Path) -> None:
    lines = lines_of(log)
    lines[0]["schema_version"] = 99
    log.write_bytes(sealed(lines))
    with pytest.raises(UsageError, match=r"schema version 99 .*newer Evergrad"):
        eg.undo(log)
