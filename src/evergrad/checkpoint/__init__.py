"""Checkpoints of a running job: captured in one copy, finished by an agent, restored from the nearest intact tier.

checkpointer.py    the API: save, restore, versions; pending.py: waiting for a save
save_policy.py          when a save is due; preemption.py: signals, and one answer of all ranks
capture/           the trainer's part of a save; arena.py: the shared memory it fills; shard_layout.py: a shard's bytes
agent/             the process that digests, stores, uploads and retires versions
tiers/             where versions are stored, one file a tier
restore/           which version, its shards, verified, loaded in place
catalogue/         the history of versions, pins, lineage, export
run_folder.py      a job's run folder and identity; shard_manifest.py, version.py, tensor_placement.py, ranks.py, rng.py

Names are loaded when they are first used: the agent imports from here, and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad import _files as storage
    from evergrad.checkpoint.checkpointer import Checkpointer, CheckpointWarning
    from evergrad.checkpoint.pending import Pending
    from evergrad.checkpoint.rng import rng_state
    from evergrad.checkpoint.save_policy import EverySeconds, EverySteps, MaxOverhead, Policy, Progress, YoungDaly
    from evergrad.checkpoint.tiers import Compress, Local, Memory, Persistent
    from evergrad.checkpoint.version import Version, VersionRecord

_HOMES = {
    "CheckpointWarning": "checkpointer",
    "Checkpointer": "checkpointer",
    "Compress": "tiers",
    "EverySeconds": "save_policy",
    "EverySteps": "save_policy",
    "Local": "tiers",
    "MaxOverhead": "save_policy",
    "Memory": "tiers",
    "Pending": "pending",
    "Persistent": "tiers",
    "Policy": "save_policy",
    "Progress": "save_policy",
    "Version": "version",
    "VersionRecord": "version",
    "YoungDaly": "save_policy",
    "rng_state": "rng",
}

__all__ = [
    "CheckpointWarning",
    "Checkpointer",
    "Compress",
    "EverySeconds",
    "EverySteps",
    "Local",
    "MaxOverhead",
    "Memory",
    "Pending",
    "Persistent",
    "Policy",
    "Progress",
    "Version",
    "VersionRecord",
    "YoungDaly",
    "rng_state",
    "storage",
]


def __getattr__(name: str) -> object:
    if name == "storage":  # the calls that change a file system, for tiers of users' own
        return import_module("evergrad._files")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'evergrad.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"evergrad.checkpoint.{home}"), name)
    globals()[name] = value
    return value
