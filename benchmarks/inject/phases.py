"""Where the time of an injection goes, found out from outside: its functions are wrapped with timers."""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from unittest.mock import patch

__all__ = ["PHASES", "Stopwatch"]

_WRAPPED = {
    "open, select": ("injector.open_checkpoint", "injector.population"),
    "sample": ("injector.sample",),
    "plan: bits, old and new": ("injector.plan_injection",),
    "addresses, checksums": ("injector.prepare_injection",),
    "blocks: read": ("injector._prepare_patch", "byte_patches.Patch.read"),
    "blocks: digests": ("byte_patches.Patch.digest",),
    "log: format": ("log.InjectionLog._lines",),
    "log: write": ("injector._save_log",),
    "apply": ("byte_patches.Patch.write",),
}
"""What is wrapped, by phase; time in a function that is wrapped itself counts there alone."""

_FSYNC = {"log: write": "log: fsync", "apply": "apply: fsync"}
_REST = "rest"

PHASES = [*(name for phase in _WRAPPED for name in (phase, _FSYNC.get(phase)) if name is not None), _REST]


@dataclass
class Stopwatch:
    """Collects time by phase, each moment in one phase only."""

    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _open: list[str] = field(default_factory=lambda: [_REST])
    _since: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is injected in this block."""
        with ExitStack() as stack:
            for phase, places in _WRAPPED.items():
                for place in places:
                    self._wrap(stack, place, phase)
            stack.enter_context(patch.object(os, "fsync", self._timed(os.fsync, None)))
            self._since = perf_counter()
            yield
            self._turn()

    def _wrap(self, stack: ExitStack, place: str, phase: str) -> None:
        module, *names, last = place.split(".")
        owner: Any = importlib.import_module(f"evergrad.injection.{module}")
        for name in names:
            owner = getattr(owner, name)
        timed = self._timed(getattr(owner, last), phase)
        bound = isinstance(owner, type) and isinstance(owner.__dict__[last], classmethod)
        stack.enter_context(patch.object(owner, last, staticmethod(timed) if bound else timed))

    def _timed(self, function: Callable[..., Any], phase: str | None) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            around = self._open[-1]
            self._turn()
            self._open.append(phase if phase is not None else _FSYNC.get(around, around))
            try:
                return function(*arguments, **options)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def _turn(self) -> None:
        now = perf_counter()
        self.spent[self._open[-1]] += now - self._since
        self._since = now
