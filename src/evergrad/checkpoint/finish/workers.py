"""Threads that do a rank's work one thing after the other, and other ranks' at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Workers:
    """One thread a rank, made when it is first needed. What they are given must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._closing = False
        self.owed = 0
        """What was submitted and has not ended."""

    def submit(self, rank: int, act: Callable[..., None], *arguments: Any) -> bool:
        """Have something done; False if no more is taken."""
        with self._lock:
            if self._closing:
                return False
            worker = self._threads.get(rank)
            if worker is None:
                worker = self._threads[rank] = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-{rank}")
            self.owed += 1
            worker.submit(self._do, act, *arguments)
            return True

    def drain(self, *, closing: bool = False) -> None:
        """Wait until everything is done. What that itself submits is done, too."""
        while True:
            with self._lock:
                workers = list(self._threads.values())
                if not self.owed:
                    self._closing = closing
                    return
            for worker in workers:
                worker.submit(_nothing).result()

    def close(self) -> None:
        """The same, and take no more."""
        self.drain(closing=True)
        for worker in self._threads.values():
            worker.shutdown(wait=True)

    def _do(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        finally:
            with self._lock:
                self.owed -= 1


def _nothing() -> None:
    """Comes after what was submitted before it."""
