"""Launchers of several machines, as real processes of this one: forked from one that has imported torch.

`python machines.py` reads requests from stdin, a JSON line each: start a launcher (in a network of its own, if asked
to) and answer with its number; or wait for one, and answer with its exit code.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evergrad._forkserver import fork, preload

FOLDER = Path(__file__).parent
_LIMIT_S = 60
_CLONE_NEWNET = 0x40000000


@dataclass
class Machine:
    """One launcher."""

    pid: int
    log: Path
    _code_of: Callable[[int], int]
    _code: int | None = None

    def wait(self) -> int:
        """Its exit code; what still runs after a minute is killed."""
        if self._code is None:
            self._code = self._code_of(self.pid)
        return self._code

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Power off: the launcher and, by the kernel, all that it has started."""
        os.killpg(self.pid, signal.SIGKILL)


class Machines:
    """All of them, in one folder that they share."""

    def __init__(self) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._started: list[Machine] = []
        self.folder = Path()

    def start(
        self, rank: int, *options: object, name: str = "run", arguments: Any = (), net: int = 0, nodes: int = 2
    ) -> Machine:
        """`evergrad run --multinode --node-rank RANK OPTIONS node_trainer.py out ARGUMENTS`; `net` is whose network."""
        log = self.folder / f"{name}-{rank}-{len(self._started)}.txt"
        command = [
            "run",
            "--preload",
            "--multinode",
            "--nnodes",
            nodes,
            "--node-rank",
            rank,
            "--out",
            self.folder / name,
            "--heartbeat-timeout",
            2.5,  # on a crowded machine a node that lives may not be heard for two seconds
            *options,
        ]
        command += [FOLDER / "node_trainer.py", self.folder / "out", *arguments]
        request = {"command": [str(word) for word in command], "log": str(log), "folder": str(self.folder), "net": net}
        self._started.append(Machine(self._ask(request), log, self._wait))
        return self._started[-1]

    def close_all(self) -> None:
        """End what a test has left behind."""
        for machine in self._started:
            with suppress(ProcessLookupError):
                machine.kill()
            machine.wait()
        self._started.clear()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def results(self) -> dict[int, dict[str, Any]]:
        """What each process that finished has left, by uid."""
        return {int(path.stem): json.loads(path.read_text()) for path in (self.folder / "out").glob("*.json")}

    def at_gate(self, step: int, *uids: int) -> None:
        """Wait until these wait before a step."""
        self.until(lambda: all((self.folder / "out" / f"at-{step}-{uid}").exists() for uid in uids))

    def open_gate(self, step: int) -> None:
        (self.folder / "out").mkdir(exist_ok=True)
        (self.folder / "out" / f"go-{step}").touch()

    def events(self, kind: str, name: str = "run") -> list[dict[str, Any]]:
        path = self.folder / name / "timeline.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # the last one may be half there
                found.append(json.loads(line))
        return [event for event in found if event["event"] == kind]

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait; what launchers said so far is in the failure."""
        end = time.monotonic() + _LIMIT_S
        while not is_so():
            if time.monotonic() > end:
                raise AssertionError("waited in vain\n" + "\n".join(one.said for one in self._started))
            time.sleep(0.01)

    def _wait(self, pid: int) -> int:
        return self._ask({"wait": pid})

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    preload("evergrad.recovery.join_job")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
            continue
        print(fork(partial(_launch, request)).pid, flush=True)


def _launch(request: dict[str, Any]) -> int:
    from evergrad.cli import main as evergrad

    os.setsid()
    signal.alarm(_LIMIT_S)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, 1 << 10)
    if request["net"]:
        with open(f"/proc/{request['net']}/ns/net", "rb") as network:
            assert ctypes.CDLL(None).setns(network.fileno(), _CLONE_NEWNET) == 0, "no such network"
    os.chdir(request["folder"])
    return evergrad(request["command"])


if __name__ == "__main__":
    main()
