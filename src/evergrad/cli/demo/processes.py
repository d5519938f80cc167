"""The demo's processes: forks of the demo itself that wait, with torch imported, until they are given something to do.

Importing torch takes seconds, and a demo that started six processes which need it would show little else. They are
forked before the demo has trained anything: a process that has threads, torch's too, is no good to fork.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from evergrad._forkserver import end_with_parent, preload


@dataclass(frozen=True, slots=True)
class Fork:
    """A process, what it is told to do, and what it prints if that is listened to."""

    process: BaseProcess
    orders: Connection
    output: Connection


_idle: list[Fork] = []


def prepare(count: int) -> None:
    """Have so many processes ready; before the demo has anything that is cleared away when a process ends."""
    # A network this small is no quicker on many threads; and all processes compute the same, to the last bit.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if count == 0:
        return
    preload("evergrad.recovery.join_job")
    is_fresh = len(os.listdir("/proc/self/task")) == 1
    if is_fresh:
        gc.freeze()  # shared with every fork as it is, and not looked through once more when the demo ends
    context = multiprocessing.get_context("fork" if is_fresh else "spawn")
    for _ in range(count):
        (orders, orders_end), (output, output_end) = context.Pipe(), context.Pipe(duplex=False)
        process = context.Process(target=_wait, args=(orders_end, output_end), daemon=True)  # type: ignore[attr-defined]
        process.start()
        orders_end.close()
        output_end.close()
        _idle.append(Fork(process, orders, output))


def start(work: Callable[..., object], *arguments: object, is_heard: bool = False) -> Fork:
    """Have one of them call a function of a module; if it is heard, what it prints goes to `output`."""
    fork = _idle.pop(0)
    fork.orders.send((work, arguments, is_heard))
    return fork


def _wait(orders: Connection, output: Connection) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)
    work, arguments, is_heard = orders.recv()
    if is_heard:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False, errors="backslashreplace") for fd in (1, 2))
    output.close()
    work(*arguments)
