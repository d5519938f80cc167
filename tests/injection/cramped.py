"""Run as a program: injects where there is less and less room, and says what came of it.

    python cramped.py FOLDER limit|disk

FOLDER holds `start/`, what is there before. With `limit` no file may become longer than so many bytes; with `disk`
FOLDER lies on a small file system of its own, of which only so many bytes are free. A process is forked for every
attempt. Prints a line of JSON for each: what, how much room, how it ended.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import evergrad as eg

LIMITS = (0, 400, 1500, 2500, 4000, 6000, 9000, 12_000, 16_000, 40_000, 400_000)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file and folder below, also what is hidden."""
    return {str(file.relative_to(folder)): file.read_bytes() if file.is_file() else b"" for file in folder.rglob("*")}


def filled(folder: Path, room: int) -> None:
    """Leave only so many bytes on the disk."""
    with (folder / "filler").open("wb", buffering=0) as file:
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(bytes(max(0, free - room)))


def attempt(work: Path, source: Path, room: int, kind: str, where: dict[str, Any]) -> str:
    """In a process of its own: how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = "no word"
        try:
            if kind == "limit":
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            eg.inject(source, eg.BitFlip(), count=30, seed=1, **where)
            told = "done"
        except eg.EvergradError as error:
            told = f"refused: {error}"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, told.encode()[:2000])
            os._exit(0)
    os.close(writer)
    told = os.read(reader, 4000).decode()
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    return told if os.WEXITSTATUS(status) == 0 and not os.WIFSIGNALED(status) else f"ended by {status}"


def judged(work: Path, before: dict[str, bytes], told: str, copy: bool) -> str:
    """Refused and as if nothing had happened, or with a log that undoes it; or done."""
    found = tree(work)
    logs = [name for name in found if name.endswith(".faults.jsonl")]
    if told == "done":
        return "done"
    assert told.startswith("refused: "), told
    assert told.isprintable(), told
    assert "too large" in told or "no space left" in told, told
    if not logs:
        assert found == before, sorted(found)
        return "refused"
    assert not copy, "a log of a copy that is not there"
    assert f"evergrad undo {work / logs[0]}" in told, told
    eg.undo(work / logs[0])
    (work / logs[0]).unlink()
    assert tree(work) == before, sorted(tree(work))
    return "undone"


def main(folder: Path, kind: str) -> None:
    """Every checkpoint in `start`, in place and as a copy, with every amount of room."""
    start, work = folder / "start", folder / "work"
    for source in start.iterdir():  # what is loaded once need not be loaded in every process
        eg.inject(source, eg.BitFlip(), count=1, out=folder / "warm", log=folder / "warm.jsonl")
        (shutil.rmtree if source.is_dir() else os.unlink)(folder / "warm")
        (folder / "warm.jsonl").unlink()
    for source in sorted(path for path in start.iterdir() if not path.name.startswith(".")):
        for copy in (False, True):
            for room in LIMITS:
                (folder / "filler").unlink(missing_ok=True)
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir()
                target = work / source.name
                (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
                before = tree(work)
                if kind == "disk":
                    filled(folder, room)
                told = attempt(work, target, room, kind, {"out": work / "out"} if copy else {"in_place": True})
                (folder / "filler").unlink(missing_ok=True)
                what = {"name": source.name, "copy": copy, "room": room}
                try:
                    print(json.dumps({**what, "ended": judged(work, before, told, copy)}))
                except AssertionError as error:
                    raise AssertionError(f"{what}: {error}") from error


if __name__ == "__main__":
    os.fsync = lambda fd: None
    main(Path(sys.argv[1]), sys.argv[2])
