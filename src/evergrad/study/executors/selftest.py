"""Work for trying out an executor: it echoes, counts, fails, dies or stays, as the task says, and needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evergrad.errors import EvergradError

_DONE = 0
_HELD: list[int] = []


def perform(folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """Do what `work["do"]` names.

    - `echo`: gives `value` back, with the process and how many echoes it has given so far.
    - `refuse`, `fail`: raises an error of ours, or another, with `text`.
    - `die`: by the signal `signal`.
    - `stay`: opens the named pipe `pipe` in the folder, writes a line to it and keeps it open, as does a command that
      it starts: the pipe's reader sees when both are gone. It stays for ever in that `command`, or in a `call` that
      holds the interpreter's lock, or not at all, as `inside` says.
    - `parent`: kills the process that has started this one.
    """
    match work["do"]:
        case "echo":
            global _DONE  # noqa: PLW0603 - what a worker keeps between tasks is what is tried out
            _DONE += 1
            return {"value": work["value"], "process": os.getpid(), "count": _DONE, "folder": str(folder)}
        case "refuse":
            raise EvergradError(work["text"])
        case "fail":
            raise ValueError(work["text"])
        case "die":
            os.kill(os.getpid(), signal.Signals[work["signal"]])
        case "parent":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        case "stay":
            pipe = os.open(folder / work["pipe"], os.O_WRONLY)
            _HELD.append(pipe)
            command = subprocess.Popen(["sleep", "1000"], pass_fds=[pipe])
            os.write(pipe, f"{os.getpid()}\n".encode())
            if work["inside"] == "command":
                command.wait()
            elif work["inside"] == "call":
                pow(3, 3**19)
            return {}
    raise EvergradError(f"{work['do']}: nothing that can be rehearsed")
