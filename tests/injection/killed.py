"""Run as a program: does something to a checkpoint again and again, killed at every point once it writes.

    python killed.py FOLDER WHAT

FOLDER holds `start/`, what is there before, and gets `work/`, where it happens; WHAT is JSON: `path` within the folder,
`verb` (inject or undo), and the arguments. A process is forked for every point, without torch and warmed up, so that a
point costs milliseconds. It ends itself by SIGKILL at the n-th line that it runs in the injector, or in what copies
files for it, once the first file was opened for writing. Prints what was seen, as JSON.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import evergrad as eg
from evergrad import _files

INJECTOR = str(Path(sys.modules[eg.inject.__module__].__file__ or "").parent) + os.sep
COUNTED = (INJECTOR, _files.__file__, shutil.__file__)

Tree = dict[str, tuple[int, bytes]]


def tree(folder: Path) -> Tree:
    """Every file and folder below; what was left half-way under a temporary name is none of them."""
    found: Tree = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if ".partial" not in name:
            found[name] = (file.stat().st_mode, file.read_bytes() if file.is_file() else b"")
    return found


class Killer:
    """Ends this process at the n-th counted line after the first write; 0 never does."""

    def __init__(self, folder: Path, last: int) -> None:
        self.folder, self.left, self.writing, self.mapped = str(folder), last, False, False
        sys.addaudithook(self.heard)

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "mmap.__new__":
            self.mapped = self.mapped or (self.writing and arguments[2] != mmap.ACCESS_READ)
        elif not self.writing and event in ("open", "os.mkdir", "os.rename", "os.link"):
            writes = event != "open" or (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR))
            if writes and str(arguments[0]).startswith(self.folder):
                self.writing = True
                frame = sys._getframe(1)
                while frame is not None:  # functions that are under way count as well
                    frame.f_trace, frame = self.entered(frame, "call", None), frame.f_back
                sys.settrace(self.entered)

    def entered(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        return self.line if frame.f_code.co_filename.startswith(COUNTED) else None

    def line(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def act(work: Path, what: dict[str, Any]) -> None:
    """What is to be killed."""
    if what["verb"] == "undo":
        eg.undo(work / what["log"])
        return
    where = {"out": work / what["out"]} if "out" in what else {"in_place": True}
    eg.inject(work / what["path"], eg.BitFlip(), count=what["count"], seed=5, **where)


def killed(work: Path, what: dict[str, Any], last: int) -> tuple[bool, bool]:
    """Whether the process was killed at this point, and whether it wrote through a map; an error of its own is one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            killer = Killer(work, last)
            act(work, what)
            sys.settrace(None)
            os.write(writer, b"m" if killer.mapped else b"-")
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    told = os.read(reader, 1)
    os.close(reader)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"point {last}: signal {os.WTERMSIG(status)}"
        return True, False
    assert os.WEXITSTATUS(status) == 0, f"point {last}: the process failed by itself"
    return False, told == b"m"


def judged(work: Path, what: dict[str, Any], found: Tree, before: Tree, after: Tree) -> str:
    """What a killed process left, once it is undone: nothing, or exactly what was asked for."""
    log = work / what["log"]
    if what["verb"] == "undo":
        was = eg.undo(log).found_state.value
        assert {name: data for name, data in tree(work).items() if name != what["log"]} == before
        return was
    if "out" in what:
        part = {name: data for name, data in found.items() if name == what["out"] or name.startswith(f"{what['out']}/")}
        rest = {name: data for name, data in found.items() if name not in part and name != what["log"]}
        assert rest == before, "the source"
        assert not part or part == {name: after[name] for name in part} == {
            name: data for name, data in after.items() if name not in (*before, what["log"])
        }, "the copy is not whole"
        assert not part or log.exists(), "a copy without its log"
        return "whole" if part else "absent"
    if not log.exists():
        assert found == before, "changed without a log"
        return "no log"
    was = eg.undo(log).found_state.value
    assert {name: data for name, data in tree(work).items() if name != what["log"]} == before, "undone"
    return was


def sweep(folder: Path, what: dict[str, Any]) -> dict[str, Any]:
    """Every point in turn, until the process ends by itself.

    While there is neither a log nor a copy yet, nothing can have happened: there only some of the points are tried.
    """
    start, work = folder / what.get("start", "start"), folder / "work"

    def fresh() -> None:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(start, work)

    fresh()
    before = tree(work) if what["verb"] == "inject" else tree(folder / "before")
    act(work, what)
    after, seen, point, tried, step = tree(work), Counter[str](), 0, 0, what["step"]
    known: dict[frozenset[Any], str] = {}
    gc.freeze()
    while True:
        point += step
        fresh()
        try:
            going, mapped = killed(work, what, point)
            left = tree(work)
            key = frozenset(left.items())
            if key not in known:  # the same bytes are undone in the same way
                known[key] = judged(work, what, left, before, after)
            found = known[key]
        except Exception as error:
            raise AssertionError(f"point {point} of {what}: {type(error).__name__}: {error}") from error
        if step > 1 and found not in ("no log", "absent"):
            point, step = point - step, 1  # back to where nothing had happened yet, and from there one by one
            continue
        seen[found], tried = seen[found] + 1, tried + 1
        if not going:
            return {"points": tried - 1, "seen": seen, "mapped": mapped}


if __name__ == "__main__":
    os.fsync = lambda fd: None  # a killed process takes nothing with it that it has written
    print(json.dumps(sweep(Path(sys.argv[1]), json.loads(sys.argv[2]))))
