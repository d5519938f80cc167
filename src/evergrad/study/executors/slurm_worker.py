"""A Slurm job that is a worker: it reports to its runner, does one task after the other, and ends with it.

It finds where to report, and the secret that proves both to each other, in the order: a JSON file in a folder that
nobody else may read. Messages go over a `_wire`; after the nonces:

    ←  {"job": number, "node": name}                      once
    →  {"welcome": true}                                  once
    →  {"id": …, "work": {…}, "limit_s": …}
    ←  {"id": …, "fate": …, "result": …, "reason": …}
    ←  {"leaving": true}                                  its time is nearly over: it finishes what it is at
    →  {"end": true}

The work is done by a child, the same process as on a single machine, which ends with the job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad._wire import SILENCE_S, Garbled, Secret, Wire, read_private, write_private
from evergrad.errors import EvergradError
from evergrad.study.executors.base import Task
from evergrad.study.executors.local import LocalProcesses
from evergrad.study.executors.worker import LONGEST_ANSWER

LEAVE_SIGNAL = signal.SIGUSR2
"""Slurm sends it some time before a job's limit."""

_CONNECT_S = 5.0
_LONGEST_ORDER = 16 << 20
_ANSWER_S = 5 * SILENCE_S
_BUSY_S = 0.2
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class SlurmWorkerSettings:
    """What a job is told."""

    addresses: tuple[str, ...]
    port: int
    secret: str
    folder: str
    perform: str
    path: tuple[str, ...]
    environment: dict[str, str]

    def write(self, path: Path) -> None:
        """Readable for nobody else from its first byte on."""
        told = {name: getattr(self, name) for name in self.__slots__}
        write_private(path, json.dumps(told).encode())

    @classmethod
    def read(cls, path: Path) -> SlurmWorkerSettings:
        """One that is gone: so is its runner."""
        try:
            told: dict[str, Any] = json.loads(read_private(path, _LONGEST_ORDER))
            return cls(**{**told, "addresses": tuple(told["addresses"]), "path": tuple(told["path"])})
        except OSError as error:
            raise EvergradError(f"{path}: no order to read ({error.strerror}): the runner is gone") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise EvergradError(f"{path}: is no order: {error}. Run the study again: it makes another.") from None


def serve(order: str, number: int) -> None:
    """The job; returns when the runner ends it, or is gone."""
    leaving: list[int] = []
    # Over submitit's own handlers, which stay at work through SIGTERM until Slurm kills.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(LEAVE_SIGNAL, lambda number, _: leaving.append(number))
    told = SlurmWorkerSettings.read(Path(order))
    sys.path[:] = told.path
    with ExitStack() as stack:
        wire = _connect(told)
        stack.callback(wire.close)
        child = stack.enter_context(
            LocalProcesses(
                Path(told.folder), told.perform, workers=1, environment=told.environment, name=f"slurm-{number}"
            )
        )
        wire.send({"job": number, "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname()})
        _work(wire, child, leaving)


def _work(wire: Wire, child: LocalProcesses, leaving: list[int]) -> None:
    is_busy = has_said = False
    until = time.monotonic() + _ANSWER_S
    while wire.is_proven or time.monotonic() < until:
        wire.wait(0.0 if is_busy else _IDLE_S)
        try:
            messages = wire.receive()
        except Garbled as error:
            raise EvergradError(f"the runner {error}: somebody else is there now") from error
        if messages is None:
            return
        for told in messages:
            if "end" in told:
                return
            if "id" in told:
                child.submit(Task.from_json(told))
                is_busy = True
        if is_busy:
            for ended in child.collect(_BUSY_S):
                wire.send(ended.to_json())
                is_busy = False
        if leaving and wire.is_proven and not has_said:  # not before it was heard of
            wire.send({"leaving": True})
            has_said = True
    raise EvergradError(f"the runner has said nothing for {_ANSWER_S:g} s")


def _connect(told: SlurmWorkerSettings) -> Wire:
    """At the first address where somebody answers."""
    secret, found = Secret.from_hex(told.secret), []
    for address in told.addresses:
        try:
            link = socket.create_connection((address, told.port), _CONNECT_S)
        except OSError as error:
            found.append(f"{address}:{told.port} ({error})")
        else:
            return Wire(link, secret, is_runner=False, longest=LONGEST_ANSWER)
    raise EvergradError(f"the runner cannot be reached from {socket.gethostname()}: {', '.join(found)}")
