"""Small files of runs, studies and injections, damaged in many ways: one line says it, and nothing else comes out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import evergrad as eg
from evergrad import timeline
from evergrad._wire import Secret
from evergrad.errors import EvergradError
from evergrad.injection import InjectionLog
from evergrad.injection.log import logs_of
from evergrad.recovery.launch.rendezvous import HeadAddress
from evergrad.report.run_model import read_run
from evergrad.study.executors.slurm_worker import SlurmWorkerSettings
from evergrad.study.folder import StudyFolder
from evergrad.study.golden import GoldenRun, make_empty_folder, read_golden, write_golden
from evergrad.study.plan import Plan
from evergrad.study.plan_files import read_plan_text
from evergrad.study.trials import Observation, TrialEnd
from programs import run_python


def damages(data: bytes, seed: str) -> Iterator[tuple[str, bytes]]:
    """The same bytes with a bit flipped, cut, emptied, and replaced by others."""
    chance = random.Random(seed)
    size = len(data)
    for position in sorted(chance.sample(range(size), min(size, 60))):
        bit = chance.randrange(8)
        flipped = bytes([data[position] ^ 1 << bit])
        yield f"bit {bit} of byte {position}", data[:position] + flipped + data[position + 1 :]
    for length in sorted({0, 1, size // 3, size // 2, max(0, size - 2)}):
        yield f"cut to {length} bytes", data[:length]
    for count in (1, 8, 32):
        begin = chance.randrange(max(1, size - count))
        yield f"{count} random bytes from {begin} on", data[:begin] + chance.randbytes(count) + data[begin + count :]
    yield "random bytes", chance.randbytes(size)
    yield "zeros", bytes(size)
    yield "a list", b"[]\n"
    yield "deeply nested", b"[" * 100_000 + b"\n"
    yield "numbers that are none", b'{"schema_version": 1e999, "port": NaN, "host": {}, "chance": [], "end": 1e999}\n'


def record_events(folder: Path) -> Path:
    with timeline.Recorder(folder / "timeline.jsonl", "launcher") as recorder:
        recorder.record("launcher_started", pid=1)
        for step in range(3):
            recorder.record("step", step=step)
        recorder.record("launcher_ended")
    (folder / "run.json").write_text('{"schema_version": 1, "command": ["python", "train.py"], "host": "n1"}\n')
    return folder / "timeline.jsonl"


def write_head(folder: Path) -> Path:
    HeadAddress("10.0.0.1", 4321, "gpu08", 77, {"num_ranks": 4}).write(folder)
    return folder / "head.json"


def make_secret(folder: Path) -> Path:
    Secret.make(folder / "secret")
    return folder / "secret"


def write_order(folder: Path) -> Path:
    SlurmWorkerSettings(("10.0.0.1",), 4321, "ab" * 16, "/study", "perform", ("/lib",), {"A": "b"}).write(
        folder / "order.json"
    )
    return folder / "order.json"


def keep_plan(folder: Path) -> Path:
    (folder / "study").mkdir()
    plan = Plan.of(read_plan_text("restart"), None, {}, check_files=False)
    StudyFolder(folder / "study").write_plan(plan, "restart", {})
    return folder / "study" / "study.json"


def keep_a_golden(folder: Path) -> Path:
    make_empty_folder(folder, "key")
    seen = Observation(end=TrialEnd.FINISHED, metrics=(0.5, 0.75), digest="ab" * 8)
    made = {"settings": {"epochs": 1}, "checkpoint": "checkpoint.pt", "digest": "cd" * 8, "facts": {"model": "mlp"}}
    write_golden(folder, GoldenRun(key="key", observation=seen, chance=0.1, **made))  # type: ignore[arg-type]
    (path,) = (folder / "golden" / "key").glob("*.json")
    return path


def inject(folder: Path) -> Path:
    np.savez(folder / "model.npz", a=np.arange(64, dtype=np.float32))
    log = eg.inject(folder / "model.npz", eg.BitFlip(), count=5, seed=1, out=folder / "bad.npz")
    assert log.path is not None
    return Path(log.path)


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "timeline": (record_events, lambda path: list(timeline.read_events(path, []))),
    "run of a timeline": (record_events, lambda path: read_run(path.parent)),
    "head": (write_head, lambda path: HeadAddress.read(path.parent)),
    "secret": (make_secret, Secret.read),
    "order": (write_order, SlurmWorkerSettings.read),
    "study": (keep_plan, lambda path: StudyFolder(path.parent).plan()),
    "golden": (keep_a_golden, lambda path: read_golden(path.parents[2], "key")),
    "injection log": (inject, InjectionLog.load),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_record_is_one_line(kind: str, tmp_path: Path) -> None:
    make, read = KINDS[kind]
    path = make(tmp_path)
    before = path.read_bytes()
    read(path)
    for what, data in damages(before, kind):
        path.write_bytes(data)
        try:
            read(path)
        except EvergradError as error:
            assert "\n" not in str(error), what
            assert path.name in str(error) or str(path.parent) in str(error), what


@pytest.mark.parametrize("line", range(5))
def test_one_event_of_another_schema_does_not_hide_the_others(line: int, tmp_path: Path) -> None:
    path = record_events(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b'"schema_version": 2', b'"schema_version": 3')  # one bit
    path.write_bytes(b"".join(lines))
    damaged: list[int] = []
    assert len(list(timeline.read_events(path, damaged))) == 4
    assert damaged == [line + 1]


@pytest.mark.parametrize("line", range(5))
def test_a_line_that_is_no_event_is_left_out_wherever_it_stands(line: int, tmp_path: Path) -> None:
    path = record_events(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = b"{}\n"
    path.write_bytes(b"".join(lines))
    found = read_run(tmp_path)
    assert len(found.events) == 4
    assert f"1 line is damaged, and left out: timeline.jsonl:{line + 1}." in found.notes


def test_a_golden_run_is_not_taken_for_another_by_a_flipped_bit(tmp_path: Path) -> None:
    path = keep_a_golden(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"0.75", b"0.35"))  # one bit
    with pytest.raises(EvergradError, match="is no record of a golden run: it is not as it was written"):
        read_golden(tmp_path, "key")


def test_a_damaged_run_record_is_said(tmp_path: Path) -> None:
    record_events(tmp_path)
    assert not any("run.json" in note for note in read_run(tmp_path).notes)
    (tmp_path / "run.json").write_bytes(b"\xff")
    assert any("run.json is damaged" in note for note in read_run(tmp_path).notes)


@pytest.mark.parametrize("name", ["run.json", "timeline-1.jsonl", "timeline.jsonl"])
def test_a_pipe_in_the_folder_of_a_run_is_not_waited_for(name: str, tmp_path: Path) -> None:
    record_events(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    done = run_python("-m", "evergrad", "timeline", tmp_path, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if name == "timeline.jsonl" else 0), done.stderr
    assert ("run.json is damaged, and left out." in done.stderr + done.stdout) == (name == "run.json")


def test_a_damaged_log_beside_a_file_does_not_keep_another_from_being_undone(tmp_path: Path) -> None:
    log = inject(tmp_path)
    kept = log.read_bytes()
    for what, data in damages(kept, "beside"):
        (tmp_path / "another.faults.jsonl").write_bytes(data)
        assert [known for known in logs_of(tmp_path / "bad.npz", log) if known.path == log], what
