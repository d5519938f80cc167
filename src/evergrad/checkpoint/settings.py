"""What a user gives to a `Checkpointer`, checked: each mistake is one line."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evergrad.checkpoint.finish.chain import Module
from evergrad.checkpoint.tiers import Compress, Local, Memory, Tier, join_compression
from evergrad.errors import UsageError, nearest

_SPELLED = {
    "memory": "eg.Memory()",
    "local": "eg.Local(path)",
    "persistent": "eg.Persistent(url)",
    "compress": "eg.Compress()",
}
"""Names of tiers that people write as text, and the objects to pass instead."""


def checked_tiers(tiers: Sequence[Tier | Compress] | Tier | None) -> list[Tier]:
    """The tiers, nearest first, each kind once; by default memory and the run folder's own disk."""
    given: list[Any] = [Memory(), Local()]
    if tiers is not None:
        given = [tiers] if isinstance(tiers, (Tier, str)) else list(tiers)
    for tier in given:
        if not isinstance(tier, (Tier, Compress)):
            close = nearest(tier[:100].lower(), _SPELLED, count=1) if isinstance(tier, str) else []
            hint = f" Did you mean {_SPELLED[close[0]]}?" if close else ""
            raise UsageError(f"tiers: {tier!r:.100} is no tier (expected eg.Memory(), eg.Local(path), …).{hint}")
    chosen = join_compression(given)
    if chosen and not any(tier.is_due(1) for tier in chosen):
        raise UsageError(f"tiers: {chosen[0]!r} alone would leave saves out: put eg.Memory() or eg.Local() before it")
    kinds = [tier.kind for tier in chosen]
    if not kinds or len(set(kinds)) < len(kinds):
        raise UsageError(f"tiers: expected at least one, each kind once, found {', '.join(kinds) or 'none'}")
    return chosen


def checked_run_dir(run_dir: str | os.PathLike[str]) -> str:
    """The path of a run folder; an empty one, which would be the current folder, is a variable that was never set."""
    path = os.fspath(run_dir) if isinstance(run_dir, str | os.PathLike) else None
    if not isinstance(path, str):
        raise UsageError(f"run_dir: expected the path of a folder, found {run_dir!r:.100}")
    if not path:
        raise UsageError("run_dir: an empty path names no folder. For the current one: '.'.")
    return path


def checked_modules(modules: Sequence[Module]) -> tuple[Module, ...]:
    """A user's own links in the agent's chain."""
    expected = "an object with an attribute `name` and a method `run(work)`"
    if not isinstance(modules, Iterable):
        raise UsageError(f"modules: expected a list of modules, each {expected}, found {modules!r:.100}")
    given = tuple(modules)
    for module in given:
        if isinstance(module, type) or not isinstance(module, Module):
            raise UsageError(f"modules: {module!r:.100} is no module: expected {expected}")
    return given


def checked_step(step: int) -> int:
    """A whole number, 0 or more."""
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError(f"step: expected a whole number, found {step!r}") from None
    if isinstance(step, bool) or not 0 <= number < 1 << 63:
        raise UsageError(f"step: expected 0 or more, found {step!r}")
    return number


def checked_meta(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of what JSON can hold."""
    try:
        notes: dict[str, Any] = json.loads(json.dumps(dict(meta or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"meta: expected what JSON can hold: {error}") from None
    return notes
