"""How a process comes to have the job's state: from another rank, from a checkpoint, or by beginning anew.

a spare       waits to be called ──▶ gets the state of a rank that goes on, and what only the dead one had
a rank        the newest checkpoint, if there is a checkpointer; else its script's beginning
a restart     the newest checkpoint, in process; or as a new program where the script's loop cannot go back to it
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from evergrad.recovery.data_position import StepBatches
from evergrad.recovery.guard.guard import JobGuard
from evergrad.recovery.job_checkpoints import JobCheckpoints
from evergrad.recovery.membership import PointKind, SurvivorReport
from evergrad.recovery.process_group import GroupBroken
from evergrad.recovery.rank_state import RankState
from evergrad.recovery.step_barrier import StepBarrier
from evergrad.recovery.worker import ElasticWorker, SigtermHandler

_ANY_ORDER = 2
"""As many ranks have the same sum in whatever order."""


@dataclass(slots=True)
class Bootstrap:
    """One process's."""

    barrier: StepBarrier
    rank_state: RankState
    step_batches: StepBatches
    checkpoints: JobCheckpoints | None
    sigterm: SigtermHandler
    record_event: Callable[..., None]
    is_spare: bool
    seed: int
    close_loaders: Callable[[], None]
    """Called before this process becomes another program."""
    guard: JobGuard | None = None
    is_over: bool = False
    """Whether this process has arrived."""
    has_yielded: bool = False
    """Whether the script has been given a batch."""
    unfinished_epoch: int = -1
    """The epoch whose end is known, and not what the script does after it: this process has yet to do that."""
    resumed_step: int = -1
    """The step whose state this process has from another rank or from a checkpoint; -1 if it began anew."""
    has_restored: bool = False
    """True if it is from a checkpoint."""
    is_local_state_behind: bool = False
    """True if generators and buffers are as of that end, and everything else is of the next epoch's beginning."""
    expected: torch.Tensor | None = None
    """The generators and buffers that a joiner has to begin its first step with, if that is known."""

    @property
    def is_waiting(self) -> bool:
        """Whether this process has no rank yet."""
        return self.is_spare and not self.is_over

    def run(self) -> None:
        """Once: a spare waits for its call, and whoever begins takes up the newest checkpoint."""
        if self.is_over:
            return
        barrier, worker = self.barrier, self.barrier.worker
        if self.is_spare:
            assert isinstance(worker, ElasticWorker)
            _warm_up()
            if worker.await_call(meanwhile=self.rank_state.discover_optimizers) is None:
                worker.close()
                sys.exit(0)
        else:
            self.rank_state.discover_optimizers()
        while True:
            plan = worker.plan
            try:
                if worker.uid in plan.joiners and plan.source is not None:
                    self._replace_dead_rank(*barrier.receive_job_state())
                    break
                if isinstance(worker, ElasticWorker) and plan.generation == 0:
                    worker.await_spares()
                worker.group()
                barrier.has_formed = True
                if plan.restart or (self.checkpoints is not None and plan.generation == 0):
                    self.restore(in_process=False)
                break
            except GroupBroken as error:
                why = str(error)
            point = plan.point if plan.joiners else 0
            report = SurvivorReport(
                worker.uid, worker.rank, plan.generation, point, plan.kind, 0, reason=why, has_state=False
            )
            with self.sigterm.suspended():
                plan = worker.next_plan(report)
            if plan.relaunch:
                self.restart_process(why)
        self.is_over = True
        if worker.survives:
            self.sigterm.install()

    def restore(self, *, in_process: bool) -> None:
        """Everyone back to the newest checkpoint, or to the one that the plan names."""
        barrier, position, plan = self.barrier, self.barrier.position, self.barrier.worker.plan
        barrier.must_restore = False
        assert self.checkpoints is not None, "a restart without a checkpointer is refused when the job begins"
        call, step, version = position.epoch, position.step, plan.version if plan.restart else ""
        rank_state = self.rank_state
        found = self.checkpoints.restore(
            rank_state.model, rank_state.optimizers.known, rank_state.tracked, position, version=version
        )
        if self.guard is not None:
            self.guard.forget()
        is_of_an_end = position.skip_end()
        if is_of_an_end:
            self.unfinished_epoch = position.epoch - 1
        if plan.restart:  # points only ever go on, whatever was saved
            position.point = plan.point
        self.record_event("restored", step=found[0] if found else None, in_process=in_process)
        if found is None and self.is_spare and plan.generation:
            barrier.note_inexact(
                f"there is no version to restart from, and rank {barrier.worker.rank} begins in a process that was "
                "started as a spare: its initial weights and random numbers are its own"
            )
        if found is not None and position.passes == 1 and barrier.worker.world_size > _ANY_ORDER:
            barrier.note_unverified(
                "the version was saved after the first step, before the order is known in which gradients are added "
                "up: their last bits may differ"
            )
        if found is None and not self.has_yielded:
            if plan.restart and barrier.worker.rank == 0:
                print("evergrad: there is no checkpoint yet: the job begins from its beginning", file=sys.stderr)
            if plan.generation and barrier.gradients is not None:
                barrier.gradients.broadcast(barrier.worker.group(), 0)
            return
        # What the script does after an epoch it has done in this process. Unless nothing was trained since, and its
        # result is held, it has to do that again with the state of the epoch's end.
        is_held = is_of_an_end and position.epoch == call and position.step == step and rank_state.has_copy
        if in_process and (found is None or position.epoch != call or (is_of_an_end and not is_held)):
            why = "the newest checkpoint is of another epoch" if found else "there is no checkpoint yet"
            barrier.recover(PointKind.JOIN, why, back_to=version)
            self.restart_process(why)
        if found is None:
            return
        self.resumed_step, self.has_restored = position.step, not in_process
        rank_state.optimizers.load_states(found[1])
        if is_held:
            rank_state.restore_copy()
        self.step_batches.to_repeat.clear()
        if in_process:
            position.begin_epoch(position.source, self.seed, barrier.worker.rank, barrier.worker.world_size)

    def restart_process(self, why: str) -> NoReturn:
        """Be a new program, of the same number, in the present generation: the script from its beginning."""
        worker = self.barrier.worker
        assert isinstance(worker, ElasticWorker)
        generation = worker.plan.generation
        self.record_event("process_restarted", reason=why, generation=generation)
        self.close_loaders()
        worker.leave_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ["EVERGRAD_GENERATION"] = str(generation)
        os.environ["RANK"] = str(worker.rank)  # it may have been started as another one, or as a spare
        # Not closed here: gloo's threads, which end only with this program, would abort it.
        kept = {0, 1, 2, int(os.environ.get("EVERGRAD_HEARTBEAT_FD", "0"))}
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                os.set_inheritable(int(name), int(name) in kept)
        os.execv(sys.executable, sys.orig_argv)

    def _replace_dead_rank(self, state: Any, kept: torch.Tensor | None) -> None:
        """Become what the dead rank would be now."""
        barrier, plan, uid = self.barrier, self.barrier.worker.plan, self.barrier.worker.uid
        self.rank_state.load_state_of(state)
        barrier.position.load_state_dict(state["course"])
        self.resumed_step = barrier.position.step
        if uid in plan.takes:
            barrier.inherit_draws(plan.previous[plan.takes[uid]])
        if kept is not None:
            if (
                not barrier.position.is_begun and barrier.position.epoch
            ):  # it died after an epoch, in the script's own code
                self.unfinished_epoch, self.is_local_state_behind = barrier.position.epoch - 1, True
            elif uid in plan.takes:
                kept = self._at_step(plan.takes[uid], kept)
                self.expected = kept
            barrier.position.set_loader_state(barrier.local_state.restore(kept))
            barrier.exchanged = kept
            return
        barrier.position.set_loader_state(None)  # the giver's is not this rank's
        if uid not in plan.takes:
            barrier.note_inexact(f"in generation {plan.generation} a rank has joined with random numbers of its own")
            return
        rank = plan.takes[uid]
        step = (
            self.checkpoints.restore_local_state(self.rank_state.model, rank) if self.checkpoints is not None else None
        )
        whence = "is lost with it" if step is None else f"comes from its save of step {step}"
        barrier.note_inexact(f"what only rank {rank} had (its random numbers, its buffers) {whence}")

    def _at_step(self, rank: int, kept: torch.Tensor) -> torch.Tensor:
        """The state that only a dead rank had when it came to the step; its neighbour has that of the point before."""
        found = self.barrier.local_state_of(self.barrier.worker.plan.previous[rank], kept)
        if found is None:
            self.barrier.note_unverified(
                f"rank {rank} was lost between two steps, and random numbers that its script would have drawn there "
                "are not known"
            )
        return kept if found is None else found


def _warm_up() -> None:
    """What a process's first pass has to start (threads, kernels), before anyone waits for it."""
    weight = torch.ones(8, 8, requires_grad=True)
    loss: Any = nn.functional.cross_entropy(
        nn.functional.linear(torch.ones(4, 8), weight).relu(), torch.zeros(4).long()
    )
    loss.backward()
