"""Survivors go on: membership, strategies, the training loop, and beside them failures, the guard, the launcher.

    membership ← strategies ← coordinator ← launch/           decides, outside of the ranks; roster, endurance, notices
    crew ← launched ← engine ← arriving ← passage ← job       one rank's way: `eg.join()` makes a job
    transport ← gloo ← nccl · sockets ← stores       how ranks talk, and what they believe; addresses
    pulse ← vigil · departure                                 who lives, who is late, who leaves
    buckets, overlapping ← gradients · optimizers ← trained   what is computed together
    dealing, books, loading ← course · window                 which samples, and what became of each
    own, parcels, snapshots, saving                           what a joiner, a rollback and a restart bring back
    failures/ · guard/ · launch/                              failures on purpose, silent corruption, `evergrad run`

Names are loaded when they are first used: failures and schedules need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.recovery.failures.schedule import Failure, Failures
    from evergrad.recovery.job import Job
    from evergrad.recovery.joining import join

_HOMES = {"Failure": "failures.schedule", "Failures": "failures.schedule", "Job": "job", "join": "joining"}

__all__ = ["Failure", "Failures", "Job", "join"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'evergrad.recovery' has no attribute {name!r}")
    value = getattr(import_module(f"evergrad.recovery.{home}"), name)
    globals()[name] = value
    return value
