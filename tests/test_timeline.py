"""A timeline: lines that several processes write, and that survive whoever is killed."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evergrad.errors import DamagedFile, FileAccessError, UnsupportedContent
from evergrad.timeline import Event, Recorder, read

_WRITER = """
import sys
from evergrad.timeline import Recorder
recorder = Recorder(sys.argv[1], sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for index in range(int(sys.argv[3])):
    recorder.record("tick", index=index, filling="x" * (index % 300))
"""


def write(path: Path, *events: str) -> None:
    with Recorder(path, "launcher") as recorder:
        for event in events:
            recorder.record(event)


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    with Recorder(tmp_path / "t.jsonl", "rank 2") as recorder:
        recorder.record("broken", generation=0, dead=(1, 3), reason="connection reset\nby peer")
        recorder.record("plan", verdicts={0: "redo"}, loss=math.nan, where=tmp_path)
    first, second = read(tmp_path / "t.jsonl")
    assert (first.who, first.event) == ("rank 2", "broken")
    assert first.fields == {"generation": 0, "dead": [1, 3], "reason": "connection reset\nby peer"}
    assert second.fields == {"verdicts": {"0": "redo"}, "loss": "nan", "where": str(tmp_path)}
    assert first.mono <= second.mono
    assert Event.from_json(first.to_json()) == first


def test_every_line_is_json_that_says_its_version(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", "begin", "end")
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        assert json.loads(line)["schema_version"] == 1


def test_processes_that_write_at_once_do_not_mix_their_lines(tmp_path: Path) -> None:
    path, lines = tmp_path / "t.jsonl", 2000
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path), f"rank {rank}", str(lines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("go\n", timeout=60)
    events = list(read(path))
    assert len(events) == 3 * lines
    for rank in range(3):
        assert [event.fields["index"] for event in events if event.who == f"rank {rank}"] == list(range(lines))


def test_a_writer_that_is_killed_leaves_a_readable_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path), "rank 0", "100000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while path.stat().st_size < 100_000 if path.exists() else True:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
    indexes = [event.fields["index"] for event in read(path)]
    assert len(indexes) > 100
    assert indexes == list(range(len(indexes)))


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_a_torn_last_line_is_passed_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.jsonl"
    write(path, "begin", "end")
    os.truncate(path, path.stat().st_size - cut)
    whole = ["begin", "end"] if cut == 1 else ["begin"]  # a line that lacks its end alone is whole
    assert [event.event for event in read(path)] == whole


@pytest.mark.parametrize("line", ["", "no json", "[]", '{"event": "x"}', '{"schema_version": 1, "time": "now"}'])
def test_a_damaged_line_within_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    write(path, "begin")
    with open(path, "a") as file:
        file.write(line + "\n")
    write(path, "end")
    with pytest.raises(DamagedFile, match=r"t\.jsonl: line 2 is no event of a timeline: "):
        list(read(path))


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, "begin")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    with pytest.raises(UnsupportedContent, match="expected schema 1, found 2"):
        list(read(path))


def test_a_field_cannot_take_the_place_of_what_every_event_has(tmp_path: Path) -> None:
    with Recorder(tmp_path / "t.jsonl", "launcher") as recorder, pytest.raises(TypeError, match="mono"):
        recorder.record("begin", mono=1.0)
    assert list(read(tmp_path / "t.jsonl")) == []


def test_a_full_disk_is_said_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with Recorder("/dev/full", "rank 1") as recorder, caplog.at_level(logging.WARNING):
        recorder.record("broken")
        recorder.record("plan")
    assert [record.message for record in caplog.records] == [
        "/dev/full: rank 1: event broken is lost: No space left on device"
    ]


def test_after_the_end_nothing_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", "launcher")
    recorder.close()
    recorder.close()
    recorder.record("late")
    assert list(read(tmp_path / "t.jsonl")) == []


def test_a_timeline_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="cannot be read: No such file"):
        list(read(tmp_path / "t.jsonl"))
    with pytest.raises(FileAccessError, match="cannot be written: No such file"):
        Recorder(tmp_path / "no" / "t.jsonl", "launcher")
