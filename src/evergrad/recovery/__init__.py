"""In-step recovery: the remaining ranks continue after a failure.

job.py              the API of a training script: wrap, track, batches, step; join_job.py: `eg.join`
loop.py             one rank's way through its epochs; step_barrier.py: passing a point, recovering at it
bootstrap.py        how a process gets the job's state: from a rank, from a checkpoint, or by restarting
worker.py           this process in the job: its generation, its process group, SIGTERM
rank_state.py       model and optimizers of a rank; local_state.py: RNG, buffers, snapshots; state_transfer.py
data_position.py    epoch, batch, step; elastic_sampler.py: who gets which samples; dataloader_adapter.py: user loaders
gradients.py        the reduction under DDP; optimizer_overlap.py: updates within backward
decide.py           the decision after a failure: a pure function; membership.py: the records it reads and writes
coordinator.py      runs in the launcher: collects reports, calls `decide`, publishes the next generation
process_group.py    collectives over gloo; nccl_group.py; store.py: the signed store; sockets.py
heartbeat.py        how a process shows progress, and the rules that declare it lost
job_checkpoints.py  versions of the job; fingerprints.py: digests of a rank's state
usage_checks.py     missing calls of the API; untracked_state.py: state that nobody tracks; traceback_log.py
failures/ · guard/ · launch/    injected failures, silent data corruption, `evergrad run`

Names are loaded when they are first used: failures and schedules need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.recovery.failures.schedule import Failure, Failures
    from evergrad.recovery.job import Job
    from evergrad.recovery.join_job import join

_HOMES = {"Failure": "failures.schedule", "Failures": "failures.schedule", "Job": "job", "join": "join_job"}

__all__ = ["Failure", "Failures", "Job", "join"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'evergrad.recovery' has no attribute {name!r}")
    value = getattr(import_module(f"evergrad.recovery.{home}"), name)
    globals()[name] = value
    return value
