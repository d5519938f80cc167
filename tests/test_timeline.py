"""A timeline: lines that several processes write, and that survive whoever is killed."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from evergrad.errors import DamagedFile, FileAccessError, UnsupportedContent
from evergrad.records import Json
from evergrad.timeline import _RENAMED, _RENAMED_WITH_UIDS, Event, Recorder, read_events

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
        recorder.record("generation_broken", generation=0, dead=(1, 3), reason="connection reset\nby peer")
        recorder.record("plan", verdicts={0: "redo"}, loss=math.nan, where=tmp_path)
    first, second = read_events(tmp_path / "t.jsonl")
    assert (first.source, first.event) == ("rank 2", "generation_broken")
    assert first.fields == {"generation": 0, "dead": [1, 3], "reason": "connection reset\nby peer"}
    assert second.fields == {"verdicts": {"0": "redo"}, "loss": "nan", "where": str(tmp_path)}
    assert first.monotonic <= second.monotonic
    assert Event.from_json(first.to_json()) == first


def test_every_line_is_json_that_says_its_version(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", "launcher_started", "launcher_ended")
    for line in (tmp_path / "t.jsonl").read_text().splitlines():
        assert json.loads(line)["schema_version"] == 2


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
    events = list(read_events(path))
    assert len(events) == 3 * lines
    for rank in range(3):
        assert [event.fields["index"] for event in events if event.source == f"rank {rank}"] == list(range(lines))


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
    indexes = [event.fields["index"] for event in read_events(path)]
    assert len(indexes) > 100
    assert indexes == list(range(len(indexes)))


@pytest.mark.parametrize("cut", [1, 2, 20, 60])
def test_a_torn_last_line_is_passed_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.jsonl"
    write(path, "launcher_started", "launcher_ended")
    os.truncate(path, path.stat().st_size - cut)
    whole = (
        ["launcher_started", "launcher_ended"] if cut == 1 else ["launcher_started"]
    )  # a line that lacks its end alone is whole
    assert [event.event for event in read_events(path)] == whole


@pytest.mark.parametrize("line", ["", "no json", "[]", '{"event": "x"}', '{"schema_version": 1, "time": "now"}'])
def test_a_damaged_line_within_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    write(path, "launcher_started")
    with open(path, "a") as file:
        file.write(line + "\n")
    write(path, "launcher_ended")
    with pytest.raises(DamagedFile, match=r"t\.jsonl: line 2 is no event of a timeline: "):
        list(read_events(path))


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write(path, "launcher_started")
    path.write_text(path.read_text().replace('"schema_version": 2', '"schema_version": 3'))
    with pytest.raises(UnsupportedContent, match="expected schema 1 or 2, found 3"):
        list(read_events(path))


def test_a_field_cannot_take_the_place_of_what_every_event_has(tmp_path: Path) -> None:
    with Recorder(tmp_path / "t.jsonl", "launcher") as recorder, pytest.raises(TypeError, match="monotonic"):
        recorder.record("launcher_started", monotonic=1.0)
    assert list(read_events(tmp_path / "t.jsonl")) == []


def test_a_full_disk_is_said_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with Recorder("/dev/full", "rank 1") as recorder, caplog.at_level(logging.WARNING):
        recorder.record("generation_broken")
        recorder.record("plan")
    assert [record.message for record in caplog.records] == [
        "/dev/full: rank 1: event generation_broken is lost: No space left on device"
    ]


def test_after_the_end_nothing_is_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "t.jsonl", "launcher")
    recorder.close()
    recorder.close()
    recorder.record("rank_late")
    assert list(read_events(tmp_path / "t.jsonl")) == []


def test_a_timeline_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="cannot be read: No such file"):
        list(read_events(tmp_path / "t.jsonl"))
    with pytest.raises(FileAccessError, match="cannot be written: No such file"):
        Recorder(tmp_path / "no" / "t.jsonl", "launcher")


RUN_OF_0_1 = Path(__file__).parent / "data" / "run_kill" / "timeline.jsonl"


def test_a_timeline_of_0_1_reads_as_the_present_names() -> None:
    events = list(read_events(RUN_OF_0_1))
    assert len(events) == len(RUN_OF_0_1.read_bytes().splitlines())
    counts = Counter(event.event for event in events)
    assert counts == {
        "launcher_started": 1, "process_started": 5, "plan": 2, "kill_injected": 1, "report": 3, "generation_broken": 1,
        "process_lost": 1, "verdict": 3, "state_sent": 1, "rank_joined": 1, "recovered": 3, "epoch": 2,
        "process_exited": 5, "job_finished": 1, "launcher_ended": 1,
    }  # fmt: skip
    (kill,) = (event for event in events if event.event == "kill_injected")
    assert (kill.source, kill.monotonic, kill.fields) == ("uid 2", 986.444083284, {"ranks": [2], "uids": [2]})


def old_line(event: str, **fields: Any) -> str:
    return json.dumps({"schema_version": 1, "time": 5, "mono": 1, "who": "uid 1", "event": event, **fields})


@pytest.mark.parametrize(
    ("old", "fields", "new"),
    [
        ("begins anew", {}, "process_restarted"),
        ("goes back", {}, "rollback_to_version"),
        ("not saved", {}, "save_skipped"),
        ("all wait", {}, "deadlock"),
        ("node here", {"uids": [4, 5]}, "node_joined"),
        ("too-few", {}, "job_too_few"),
        ("asked to leave", {"rank": 1}, "leave_requested"),
        ("asked to leave", {"ranks": [1], "uids": [1]}, "leave_injected"),
        ("late", {"uid": 1}, "rank_late"),
        ("late", {"uids": [1, 2]}, "reports_late"),
        ("restored", {"step": 4}, "restored"),
        ("of my own", {"what": 3}, "of my own"),
    ],
)
def test_an_event_of_version_1_gets_its_present_name(old: str, fields: dict[str, Json], new: str) -> None:
    event = Event.from_json(old_line(old, **fields))
    assert (event.event, event.fields) == (new, fields)


def test_the_reason_of_an_event_of_version_1_has_its_present_name() -> None:
    assert Event.from_json(old_line("stuck", why="gloo")).fields == {"reason": "gloo"}


def test_a_line_without_a_version_is_one_of_version_1() -> None:
    values = json.loads(old_line("going on"))
    del values["schema_version"]
    assert Event.from_json(json.dumps(values)).event == "recovered"


def test_events_that_nobody_knows_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Recorder(path, "launcher") as recorder:
        recorder.record("of_a_plugin", why="not renamed")
    (event,) = read_events(path)
    assert (event.event, event.fields) == ("of_a_plugin", {"why": "not renamed"})


def test_lines_of_both_versions_stand_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(old_line("going on", step=3) + "\n")
    write(path, "recovered")
    assert [event.event for event in read_events(path)] == ["recovered", "recovered"]


def test_every_name_is_an_identifier_and_no_new_name_is_an_old_one() -> None:
    new = [*_RENAMED.values(), *_RENAMED_WITH_UIDS.values()]
    assert all(name.isidentifier() for name in new)
    assert len(set(new)) == len(new)
    assert not set(new) & _RENAMED.keys()
