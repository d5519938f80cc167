"""Survivors go on: failures as data, membership, strategies, the training loop, the launcher.

    membership ← strategies ← coordinator ← launcher          the launcher's side, outside of the ranks
    membership ← crew ← engine ← job ← joining                the rank's side
    transport ← gloo; buckets ← gradients; dealing, books, loading ← course

Names are loaded when they are first used: failures and schedules need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.recovery.failures import Failure, Failures
    from evergrad.recovery.job import Job
    from evergrad.recovery.joining import join

_HOMES = {"Failure": "failures", "Failures": "failures", "Job": "job", "join": "joining"}

__all__ = ["Failure", "Failures", "Job", "join"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'evergrad.recovery' has no attribute {name!r}")
    value = getattr(import_module(f"evergrad.recovery.{home}"), name)
    globals()[name] = value
    return value
