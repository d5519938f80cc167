"""The guard in a job: what is looked at in which step, and what becomes of it.

    end of backward  gradients' norm ──suspicious on any rank──▶ nobody passes the point ──▶ check, do the step again
    before a step    every so many steps, before every save, and on a suspicion: compare replicas and buffers
                       ok, degraded (healed)  ──▶ go on; a version that is saved now counts as guarded
                       failed                 ──▶ all go back to the newest guarded version

Whether a check is due depends on nothing but what all members of a generation share, so that all come to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.records import Check
from evergrad.recovery.guard.local_state_guard import LocalStateGuard
from evergrad.recovery.guard.norms import GradientNorms, NormReading
from evergrad.recovery.guard.replicas import GuardResult, GuardSettings, ReplicaCheck, replica_of
from evergrad.recovery.step_barrier import StepBarrier

_log = logging.getLogger(__name__)
_SAID = 4


@dataclass(slots=True)
class JobGuard:
    """One rank's guard."""

    settings: GuardSettings
    barrier: StepBarrier
    model: nn.Module | None
    record_event: Callable[..., None]
    is_sound: bool = False
    """Whether the last check found the state, as it is now, alike on all ranks."""
    _replica_check: ReplicaCheck = field(init=False)
    _local_guard: LocalStateGuard = field(init=False)
    _norms: GradientNorms = field(init=False)
    _reading: NormReading | None = field(default=None, init=False)
    _checked: tuple[int, int] = field(default=(-1, -1), init=False)
    """The step and the generation of the last check."""
    _suspected_in: int = field(default=-1, init=False)
    """The generation in which a step was found suspicious, and its state has yet to be checked."""

    def __post_init__(self) -> None:
        self._replica_check = ReplicaCheck(self.settings, self.record_event)
        buffers = dict(self.model.named_buffers()) if self.model is not None else {}
        self._local_guard = LocalStateGuard(
            {f"model/{name}": buffer for name, buffer in buffers.items()}, self.record_event
        )
        self._norms = GradientNorms(self.settings.norm_factor)
        self.barrier.guards = True
        self.barrier.on_exchange = self._note
        self.barrier.exchanges_at = self._replica_check.is_due
        for module in self.model.modules() if self.model is not None else ():
            if next(module.buffers(recurse=False), None) is not None:
                module.register_forward_pre_hook(self._runs)

    def read(self, buckets: Iterable[torch.Tensor], scale: float | None) -> None:
        """The gradients of a step are reduced: tell the engine what this rank thinks of them, before the point."""
        barrier, self._reading = self.barrier, self._norms.read(buckets, scale)
        is_odd = self._reading.is_suspicious
        barrier.suspicious = is_odd and barrier.tries == 0
        if barrier.suspicious or (is_odd and barrier.worker.rank == 0):
            again = "" if barrier.suspicious else "; it is so the second time too, and goes on"
            _log.warning("rank %d, step %d: %s%s", barrier.worker.rank, barrier.position.step, self._reading.why, again)
            self.record_event(
                "step_suspicious", step=barrier.position.step, tries=barrier.tries, reason=self._reading.why + again
            )

    @property
    def must_stop(self) -> str:
        """Why the job shall not go on with these gradients; empty if it may."""
        reading = self._reading
        is_bad = self.settings.stop and reading is not None and reading.is_suspicious and not reading.is_finite
        return reading.why if is_bad and reading is not None and self.barrier.tries else ""

    def mark_suspected(self) -> None:
        """Some rank was suspicious: the state is checked before the step is done again."""
        self._suspected_in = self.barrier.worker.plan.generation
        self.barrier.tries += 1

    def applied(self) -> None:
        """The step was applied."""
        if self._reading is not None:
            self._norms.applied(self._reading)
        self._reading, self.is_sound = None, False

    def forget(self) -> None:
        """The job has gone back, or this process has just got its state."""
        self._norms.forget()
        self._local_guard.forget()
        self.is_sound = self.barrier.suspicious = False
        self.barrier.tries = 0

    def is_due(self, *, checkpoints: bool) -> bool:
        """Whether all ranks are to compare what they have, before the next step."""
        barrier, step = self.barrier, self.barrier.position.step
        now = step, barrier.worker.plan.generation
        if self._suspected_in == now[1]:
            return True
        if barrier.stepped_in != now[1]:
            return False  # somebody may have joined, and knows its optimizers only when it has stepped once
        # Where others repair this step they do not come by here.
        return not barrier.is_repairing and now != self._checked and (checkpoints or self._replica_check.is_due(step))

    def check(self, optimizers: Sequence[Optimizer]) -> GuardResult:
        """Compare, and heal; `GroupBroken` if the group breaks."""
        barrier, group = self.barrier, self.barrier.worker.group()
        step, members = barrier.position.step, barrier.worker.plan.members
        checked = self._replica_check.check(group, replica_of(self.model, optimizers), step=step)
        if self._suspected_in != barrier.worker.plan.generation and checked.status is not Check.FAILED:
            local_state = self._local_guard.check(group, barrier.neighbour_state, members[group.before], step=step)
            if local_state.status in (Check.DEGRADED, Check.FAILED):
                checked = local_state
                if group.rank == 0:
                    self.record_event(
                        "guard_check", step=step, status=str(local_state.status), reason=local_state.why, what="buffers"
                    )
        for each in [each for each in checked.differences if each.rank == group.rank][:_SAID]:
            done = "healed" if each.healed else "not healed"
            _log.warning("rank %d, step %d: %s: %s; %s", each.rank, step, each.path, each.what, done)
        if group.rank == 0 and checked.status is Check.DEGRADED:
            # Until it was healed, what differed was part of every step's gradients.
            barrier.note_inexact(f"step {step}: the guard {checked.why}")
            barrier.note_diverged("")
        self._suspected_in = -1
        self._checked = step, barrier.worker.plan.generation
        doubts = torch.tensor([float(not checked.is_verified)])
        group.all_reduce(doubts, "max").wait()  # what is out of range is known only to who was there before
        self.is_sound = not doubts.item()
        return checked

    def _runs(self, module: nn.Module, _: object) -> None:
        """A forward pass after the point changes buffers by right, and torch does not count all such changes."""
        if module.training:
            self._local_guard.forget()

    def _note(self, point: int, taken: torch.Tensor) -> None:
        """What only this rank has is on its way to the next one."""
        self._local_guard.note(point, taken)
