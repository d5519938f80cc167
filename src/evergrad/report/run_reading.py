"""What the folder of a run holds: its events, its record, and whether its launcher still lives."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from evergrad.errors import DamagedFile, FileAccessError, UsageError
from evergrad.formats.data_file import read_small
from evergrad.records import Json
from evergrad.timeline import Event, read
from evergrad.wording import counted

_NAMED = 5  # damaged lines, at most
_SAME_BOOT_S = 60.0  # how far clocks may have been put since


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What was read."""

    path: Path
    events: tuple[Event, ...]
    record: Mapping[str, Json]
    """`run.json`; empty if there is none that can be read."""
    notes: tuple[str, ...]
    """What a reader has to know of how complete this is."""


def read_run(folder: Path) -> RunFolder:
    """The run in a folder; `UsageError` or `FormatError` if there is none that can be read."""
    if folder.name == "timeline.jsonl" and folder.is_file():
        raise UsageError(
            f"{folder}: is the timeline itself. Name its folder: evergrad timeline {quote(str(folder.parent))}"
        )
    if not folder.is_dir():
        what = "is no folder. Expected that of evergrad run --out" if folder.exists() else "there is no such folder"
        raise FileAccessError(folder, what)
    timeline = folder / "timeline.jsonl"
    if not timeline.is_file():
        raise FileAccessError(folder, f"there is no timeline.jsonl in it. {_hint(folder)}")
    others = sorted(path for path in folder.glob("timeline-*.jsonl") if path.is_file())  # no pipe is waited for
    events: list[Event] = []
    damaged: list[str] = []
    for path in (timeline, *others):
        numbers: list[int] = []
        events += read(path, numbers)
        damaged += [f"{path.name}:{number}" for number in numbers]
    if damaged and not events:
        for path in (timeline, *others):
            list(read(path))  # says what is wrong with the first line that is
    if not events:
        raise DamagedFile(timeline, "no event in it: the run was ended before it began, or has not begun yet")
    record, is_sound = _record(folder / "run.json")
    notes = [] if is_sound else ["run.json is damaged, and left out."]
    if not any(event.event == "end" and event.who == "launcher" for event in events):
        notes.append(_unended(events, record))
    if damaged:
        few = ", ".join(damaged[:_NAMED]) + (f" and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else "")
        notes.append(f"{counted(len(damaged), 'line is', 'lines are')} damaged, and left out: {few}.")
    if others:
        notes.append(f"The timelines of {len(others)} other nodes were not merged: the head did not end in good order.")
    return RunFolder(folder, tuple(events), record, tuple(notes))


def _hint(folder: Path) -> str:
    if (folder / "job.json").is_file():
        return f"It is a job's run folder: evergrad checkpoints report {quote(str(folder))}"
    if (folder / "plan.toml").is_file() or (folder / "journal.jsonl").is_file():
        return f"It is a study's: evergrad study report {quote(str(folder))}"
    found = sorted(path.parent.name for path in folder.glob("*/timeline.jsonl"))[:3] if _is_small(folder) else []
    return f"There is one in {', '.join(found)}." if found else "Expected the folder of evergrad run --out."


def _is_small(folder: Path) -> bool:
    with suppress(OSError):
        return sum(1 for _ in folder.iterdir()) < 1000
    return False


def _record(path: Path) -> tuple[Mapping[str, Json], bool]:
    """Return the content of `run.json` and whether it could be read; empty if there is no such file."""
    try:
        found = json.loads(read_small(path))
        return (found, True) if isinstance(found, dict) else ({}, False)
    except FileNotFoundError:
        return {}, True
    except (OSError, ValueError, RecursionError):
        return {}, False


def _unended(events: list[Event], record: Mapping[str, Json]) -> str:
    begin = next((event for event in events if event.event == "begin"), None)
    pid = begin.fields.get("pid") if begin is not None else None
    if begin is None or not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return "No end is on record, and not which process was the launcher."
    host = record.get("host")
    if host != socket.gethostname():
        where = f"its launcher is on {host}" if isinstance(host, str) else "run.json does not say where it was launched"
        return f"No end is on record. Whether it goes on is not known here: {where}."
    if _lives(pid, begin):
        return f"The run goes on: this is how it stands. Its launcher is process {pid}."
    return f"No end is on record, and the launcher, process {pid}, is gone: the run was cut short."


def _lives(pid: int, begin: Event) -> bool:
    """Whether the launcher is there, and not another process that was given its number since."""
    booted_s = time.time() - time.monotonic()
    if abs(booted_s - (begin.time - begin.mono)) > _SAME_BOOT_S:
        return False
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = stat.rpartition(")")[2].split()
        return state != "Z" and int(rest[18]) / os.sysconf("SC_CLK_TCK") <= begin.mono + 1.0
    return False
