"""Ranks for tests: real processes, forked from one that has imported torch, with a gloo group if they join it.

`run_ranks(4, function, folder, …)` calls `function(rank, …)` in four processes and returns what each returned. It
raises `RanksFailed` with the traceback of a rank that failed. When it returns, all these processes have ended, and so
have their children: those that do not leave the process group (as agents do) are killed.

The function is looked up by its name in the ranks: it is a function of a module, or a `functools.partial` of one.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import programs

_LIMIT_S = 90.0  # less than pytest's for a test
_DETACHING_S = 5.0  # how long a child may take to leave the process group
_SIGNAL_AT_END_OF_PARENT = 1  # PR_SET_PDEATHSIG


class RanksFailed(AssertionError):
    """A rank has raised, has ended with another exit code than expected, or has not ended in time."""


@dataclass
class Rank:
    """The calling process: one rank of a job."""

    rank: int
    world_size: int
    folder: Path
    """The folder of the test."""
    _stores: Path
    _groups: int = field(default=0, init=False)

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    def join(self, limit_s: float = 1800.0) -> None:
        """Initialize a process group of all ranks; another one, after the last was destroyed."""
        from torch import distributed

        store, limit = f"file://{self._stores}/store-{self._groups}", timedelta(seconds=limit_s)
        distributed.init_process_group("gloo", store, limit, self.world_size, self.rank)
        self._groups += 1


class Ranks:
    """Ranks that run while the test does something else; they are killed at the end of the `with` block.

    Arguments:
        n: number of ranks.
        function: what each rank calls, with its `Rank` and the arguments.
        folder: the `folder` of each rank.
        arguments: further arguments of the function.
        nodes: if given, the ranks are spread over so many nodes, named by EVERGRAD_NODE.
        codes: the expected exit code of every rank, or of each; negative for a signal.
        limit_s: ranks that are still running after so many seconds are killed; each says before where it is.
        finalize: whether ranks finalize the interpreter at their end, as a program does, and leave their process group
            as it is. Without it the group is destroyed, and the process ends at once.
        output: the file to append to what the ranks print. It is part of the error if they fail, in any case.
    """

    def __init__(
        self,
        n: int,
        function: Callable[..., object],
        folder: Path,
        *arguments: object,
        nodes: int | None = None,
        codes: int | Sequence[int] = 0,
        limit_s: float = _LIMIT_S,
        finalize: bool = False,
        output: Path | None = None,
    ) -> None:
        self._codes = [codes] * n if isinstance(codes, int) else list(codes)
        assert len(self._codes) == n, f"{len(self._codes)} exit codes are expected of {n} ranks"
        self._limit_s = limit_s
        self._private = tempfile.TemporaryDirectory(prefix="evergrad-test-")
        self._output = output or Path(self._private.name, "output")
        there = str(self._output)
        self._process = programs.start(
            _lead,
            (n, function, folder, arguments, nodes, limit_s, finalize, Path(self._private.name)),
            env=dict(os.environ),
            cwd=Path.cwd(),
            out=there,
            err=there,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        programs.end_group(self._process)
        self._process.close()
        self._private.cleanup()

    @property
    def are_running(self) -> bool:
        return self._process.is_alive()

    @property
    def said(self) -> str:
        """What the ranks have printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def results(self) -> list[Any]:
        """Wait for all ranks; what each returned, None for one that exited before."""
        self._process.join()
        found = [_Ended.read(Path(self._private.name), rank) for rank in range(len(self._codes))]
        failed = [f"rank {rank}: {ended.error}" for rank, ended in enumerate(found) if ended.error]
        codes = [ended.code for ended in found]
        if failed or codes != self._codes:
            summary = f"exit codes of the ranks: expected {self._codes}, found {codes}"
            if None in codes:
                summary += f" (None: still running after {self._limit_s:g} s)"
            raise RanksFailed("\n".join([summary, *failed, self.said]))
        end = time.monotonic() + _DETACHING_S
        while programs.has_group(self._process) and time.monotonic() < end:
            time.sleep(0.01)
        return [ended.value for ended in found]


def run_ranks(n: int, function: Callable[..., object], folder: Path, *arguments: object, **settings: Any) -> list[Any]:
    """Call a function on n ranks and wait for them; what each returned. For the settings see `Ranks`."""
    with Ranks(n, function, folder, *arguments, **settings) as ranks:
        return ranks.results()


@dataclass
class _Ended:
    """How a rank ended. The exit code is None if it did not end in time."""

    value: Any = None
    error: str = ""
    code: int | None = None

    @classmethod
    def read(cls, folder: Path, rank: int) -> _Ended:
        left, code = folder / f"left-{rank}", folder / f"code-{rank}"
        ended = cls(*pickle.loads(left.read_bytes())) if left.exists() else cls()
        ended.code = int(code.read_text()) if code.exists() else None
        return ended


def _lead(
    n: int,
    function: Callable[..., object],
    folder: Path,
    arguments: Sequence[object],
    nodes: int | None,
    limit_s: float,
    finalize: bool,
    private: Path,
) -> None:
    """Fork the ranks, before there is any other thread, and note how they end."""
    _end_with_parent()
    children = []
    for rank in range(n):
        if (child := os.fork()) == 0:
            _end_with_parent()
            if nodes is not None:
                os.environ["EVERGRAD_NODE"] = f"n{rank * nodes // n}"
            faulthandler.dump_traceback_later(limit_s)
            code = _call(function, Rank(rank, n, folder, private), arguments, finalize)
            if finalize:
                ctypes.pythonapi.Py_Exit(code)
            sys.stdout.flush()
            os._exit(code)
        children.append(child)
    signal.setitimer(signal.ITIMER_REAL, limit_s + 1.0)  # kills this process: a rank that still runs has no exit code
    for _ in range(n):
        child, status = os.wait()
        (private / f"code-{children.index(child)}").write_text(str(os.waitstatus_to_exitcode(status)))


def _call(function: Callable[..., object], me: Rank, arguments: Sequence[object], finalize: bool) -> int:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    value, error, code = None, "", 0
    try:
        value = function(me, *arguments)
        if distributed.is_initialized() and not finalize:
            distributed.destroy_process_group()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        error, code = traceback.format_exc(), 1
    (me._stores / f"left-{me.rank}").write_bytes(pickle.dumps((value, error)))
    return code


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_SIGNAL_AT_END_OF_PARENT, signal.SIGKILL)
