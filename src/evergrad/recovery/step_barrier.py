"""How a rank passes points, and how it gets over a generation that broke.

    pass_point ──GroupBroken──▶ recover: report, next plan, verdict ──▶ … ──▶ settle_in: form the group, hand over

A broken generation is left at once; the new one's group is formed when it is needed. Between the two the rank does
what its verdict says, so that by then its state is the one at which the job goes on.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from evergrad.errors import UsageError
from evergrad.recovery.data_position import DataPosition
from evergrad.recovery.failures.schedule import Phase
from evergrad.recovery.gradients import GradientReducer
from evergrad.recovery.local_state import DrawCounts, LocalState, NeighbourState
from evergrad.recovery.membership import EpochBoundary, MembershipPlan, PointKind, StoreKeys, SurvivorReport, Verdict
from evergrad.recovery.process_group import Group
from evergrad.recovery.state_transfer import receive_state, send_state
from evergrad.recovery.traceback_log import keep_in_log
from evergrad.recovery.worker import ElasticWorker, Worker
from evergrad.wording import count_of

_POSTED_BYTES = 16 << 20
"""The largest state of a single rank that goes through the store."""


@dataclass(slots=True)
class StepBarrier:
    """One rank's part in keeping the job together."""

    worker: Worker
    record_event: Callable[..., None]
    keeps_neighbour_state: bool
    """Whether neighbours hold what only one rank has: needed where spares take dead ranks' places exactly."""
    guards: bool = False
    """Whether ranks agree, before each step, that nothing is suspicious."""
    on_exchange: Callable[[int, torch.Tensor], None] | None = None
    """Told what only this rank has, at points at which that is exchanged."""
    exchanges_at: Callable[[int], bool] = lambda _: False
    """Whether it is exchanged at the end of this step, where neighbours do not keep it anyway."""
    agreed_to_leave: bool = False
    """Whether this process's wish to leave was among those of the last point."""
    position: DataPosition = field(default_factory=DataPosition)
    local_state: LocalState = field(default_factory=LocalState)
    gradients: GradientReducer | None = None
    must_restore: bool = False
    """The plan says that everyone goes back to the newest checkpoint."""
    has_formed: bool = False
    """Whether the present generation has formed, with everyone's state in place."""
    members: tuple[int, ...] = ()
    """The uids that the epoch is dealt to, by their rank in the deal."""
    first: int = 0
    """The first point of the step under way."""
    missing: set[int] = field(default_factory=set)
    """The ranks of the deal whose gradients of the step under way are not in all of its buckets."""
    passed_in: int = 0
    """The generation in which the last step's point was passed by all; -1 if some passed it, and then it broke."""
    is_stopped: bool = False
    """True if this process has made a mistake that ends the job."""
    leave_requested: bool = False
    """Whether this process has been asked to leave."""
    suspicious: bool = False
    """Whether this rank finds the gradients of the step under way suspicious."""
    is_suspected: bool = False
    """Whether any rank found that, at the last point: then nobody has passed it."""
    tries: int = 0
    """How often the step under way was done again for that."""
    num_leaving: int = 0
    """How many ranks want to leave, as of the last point."""
    changes_in: int = -1
    """The generation in which all have agreed to stop before the next step."""
    reach_site: Callable[[Phase], None] = lambda _: None
    stepped_in: int = -1
    """The generation in which all its members last passed the point of a step: each knows its optimizers since."""
    first_passes: int = 0
    """How many passes there had been when the step under way began."""
    broke_at: float | None = None
    neighbour_state: NeighbourState = field(default_factory=NeighbourState)
    """What the rank before this one had."""
    exchanged: torch.Tensor | None = None
    """The state that only this rank has, as its neighbour got it at the last point."""
    draws: DrawCounts = field(default_factory=DrawCounts)

    def await_boundary(self, kind: PointKind) -> None:
        """Wait for all ranks at the beginning or the end of an epoch, before any collective of that point."""
        worker, position = self.worker, self.position
        begun = worker.group().num_begun
        worker.await_boundary(
            EpochBoundary(worker.plan.generation, position.point, kind, position.epoch, worker.rank, begun)
        )

    def pass_point(self, kind: PointKind, num_batches: int = 0) -> bool:
        """Pass the next point together with all others; `GroupBroken` if that cannot be.

        False if any rank finds what was computed suspicious: then nobody passes it. `UsageError` if ranks have taken
        different numbers of batches for the step under way.
        """
        flags = [self.leave_requested or self._lets_in, self.leave_requested, self.suspicious]
        wishes = torch.tensor([*flags, num_batches], dtype=torch.float32)
        self.agreed_to_leave = self.leave_requested
        if (self.worker.survives or self.guards) and self.worker.world_size > 1:
            group = self.worker.group()
            if self.keeps_neighbour_state or (kind is PointKind.STEP and self.exchanges_at(self.position.step + 1)):
                self.exchange(group)
            # Whoever is through this knows that everyone has come this far, and what anyone wishes.
            group.all_reduce(wishes).wait()
            self._check_batches(num_batches, int(wishes[3]))
        changes, leaving, suspicious, _ = wishes.tolist()
        self.num_leaving, self.is_suspected = int(leaving), suspicious > 0
        if changes:
            self.changes_in = self.worker.plan.generation
        if self.is_suspected:
            return False
        self.mark_passed(kind)
        self.passed_in = self.worker.plan.generation
        if kind is PointKind.STEP:
            self.stepped_in = self.passed_in
        return True

    def _check_batches(self, mine: int, total: int) -> None:
        """`UsageError` if the ranks have taken so many batches in all for a step, and not equally many each."""
        worker = self.worker
        if mine * worker.world_size != total:
            taken = count_of(mine, "batch", "batches")
            raise UsageError(
                f"job.step: rank {worker.rank} has taken {taken} since the last step, "
                f"and all {worker.world_size} ranks "
                f"{total} together. Every rank has to take equally many batches for a step: "
                "decide by what all ranks have alike, such as job.batch_index, whether a batch is skipped or gradients "
                "are accumulated"
            )

    def begin_step(self) -> None:
        """The step that comes next begins at this point."""
        self.first, self.first_passes = self.position.point, self.position.passes

    def rewind_step(self) -> None:
        """Of several points of the step under way none counts."""
        self.position.point, self.position.passes = self.first, self.first_passes
        self.missing.clear()

    @property
    def _lets_in(self) -> bool:
        """Whether somebody waits who can be given a share: of a loader that only knows its own place there is none."""
        return self.worker.is_change_requested and self.local_state.loader is None

    def exchange(self, group: Group) -> None:
        """Give the next rank what only this one has, and keep what the one before gives."""
        before = self.worker.plan.members[group.before]
        varies, point, taken = self.local_state.loader is not None, self.position.point, self.local_state.capture()
        self.exchanged = taken
        if self.on_exchange is not None:
            self.on_exchange(point, taken)
        self.neighbour_state.exchange(group, point, taken, before, since=self.first - 1, sizes_vary=varies)

    def publish_local_state(self) -> None:
        """Tell the store that this rank comes to a step, and what only it has, if the script has changed that.

        The neighbour holds it as it was at the last point. Between that and the next step the script may draw random
        numbers (validation), and a joiner that is to take this rank's place has to know.
        """
        if not self.keeps_neighbour_state or self.worker.world_size == 1 or not isinstance(self.worker, ElasticWorker):
            return
        changed = (
            self.local_state.capture() if self.exchanged is None else self.local_state.changed_since(self.exchanged)
        )
        local_state: str | None = ""
        if changed is not None:
            is_small = changed.numel() <= _POSTED_BYTES
            local_state = base64.b64encode(changed.numpy().tobytes()).decode() if is_small else None
        posted = {
            "point": self.position.point,
            "own": local_state,
            **self.draws.note(self.position.epoch, self.local_state.positions()),
        }
        self.worker.client.set(StoreKeys.begun(self.worker.uid), json.dumps(posted))

    def inherit_draws(self, uid: int) -> None:
        """This process has a lost one's place: find out whether the script draws numbers there that others do not."""
        members = [each for each in self.worker.plan.members if each not in self.worker.plan.joiners]
        self.draws.inherit(self._posted(uid), {each: self._posted(each) for each in members})

    def doubt_of_draws(self) -> str:
        """Return the reason why this process may not have drawn the lost rank's numbers; empty if there is no doubt."""
        if not self.keeps_neighbour_state or not isinstance(self.worker, ElasticWorker):
            return ""
        mine, members = self._posted(self.worker.uid), self.worker.plan.members
        if not self.draws.is_like_others(mine, {each: self._posted(each) for each in members}):
            return ""
        return (
            f"before rank {self.worker.rank} was lost, the script drew random numbers there that another rank did not "
            f"draw, and process {self.worker.uid} has drawn none of those in its place. "
            "Ask job.rank in each step where "
            "something is done on one rank: RANK, and whatever a script keeps of it, is that of a spare"
        )

    def _posted(self, uid: int) -> dict[str, Any]:
        """The last that this process has posted when it came to a step."""
        assert isinstance(self.worker, ElasticWorker)
        text = self.worker.client.find(StoreKeys.begun(uid))
        posted: dict[str, Any] = json.loads(text) if text is not None else {"point": -1}
        return posted

    def local_state_of(self, uid: int, kept: torch.Tensor) -> torch.Tensor | None:
        """The state that only this rank had when it came to the step at which the job goes on; None if nobody knows.

        `kept` is what its neighbour got at the point before.
        """
        posted = self._posted(uid)
        if posted["point"] != self.worker.plan.point or posted["own"] is None:
            return None
        return (
            torch.frombuffer(bytearray(base64.b64decode(posted["own"])), dtype=torch.uint8) if posted["own"] else kept
        )

    def mark_passed(self, kind: PointKind) -> None:
        """The point is behind this rank."""
        self.passed_in = -1
        self.position.point += 1
        if kind is PointKind.STEP:
            self.position.passes += 1

    def recover(self, kind: PointKind, why: str, *, planned: bool = False, back_to: str = "") -> Verdict:
        """Leave the broken generation, tell what was seen of it, and hear what to do.

        A generation that is left as `planned` was agreed to end, before a step: who wishes to leaves the job with it.
        `back_to` is the version that all have agreed to go back to, if they have.
        """
        if not planned and self.broke_at is None:
            self.broke_at = time.monotonic()
        plan, gradients = self.worker.plan, self.gradients
        in_flight = gradients if kind is PointKind.STEP else None
        report = SurvivorReport(
            uid=self.worker.uid,
            rank=self.worker.rank,
            generation=plan.generation,
            point=self.position.point,
            kind=kind,
            step=self.position.step,
            first=self.first if kind is PointKind.STEP else -1,
            done=in_flight.reduced_buckets if in_flight is not None else (),
            buckets=in_flight.num_buckets if in_flight is not None else 0,
            reason=why,
            leaves=planned and kind is PointKind.JOIN and self.agreed_to_leave,
            planned=planned,
            tries=self.tries,
            back_to=back_to,
            keeps_place=self.local_state.loader is not None,
        )
        self.record_event("report", generation=plan.generation, point=report.point, kind=str(kind), step=report.step,
                  done=len(report.done), buckets=report.buckets, reason=why)  # fmt: skip
        if gradients is not None:
            gradients.failed = None
        self.suspicious = False
        new = self.worker.next_plan(report)
        self.has_formed = False
        if self.worker.uid in new.left or (self.worker.uid not in new.members and not new.relaunch):
            return Verdict.LEAVE
        self.must_restore |= new.restart
        for uid, keeper in new.keepers.items():
            if keeper == self.worker.uid:  # it is the heir's now, whether or not that one lives to get it
                self.neighbour_state.reassign(new.previous[new.takes[uid]], uid)
        verdict = Verdict.RESTART if new.restart else new.verdicts.get(self.worker.uid, Verdict.RETRY)
        self.record_event("verdict", generation=new.generation, verdict=str(verdict), rank=self.worker.rank,
                  world_size=new.world_size, todo=len(new.todo))  # fmt: skip
        return verdict

    def form_generation(self, state: Callable[[], dict[str, Any]]) -> None:
        """Form the generation's group, and give joiners what they need; `state` is what a joiner gets of this rank."""
        if self.has_formed:
            return
        group, plan = self.worker.group(), self.worker.plan
        if plan.generation:
            self.reach_site(Phase.RECOVERY)
        for uid in plan.joiners:
            if uid == self.worker.uid:
                continue
            rank = plan.rank_of(uid)
            assert rank is not None
            if plan.source == self.worker.uid:
                began = time.monotonic()
                size = send_state(group, state(), rank)
                self.record_event("state_sent", to=uid, bytes=size, seconds=time.monotonic() - began)
            if plan.keepers.get(uid) == self.worker.uid:
                self._send_neighbour_state(group, plan, uid, rank)
        self.has_formed = True

    def receive_job_state(self) -> tuple[Any, torch.Tensor | None]:
        """As a joiner: the job's state from its source, and what only the dead rank had, if someone kept it."""
        group, plan = self.worker.group(), self.worker.plan
        self.position.step = plan.step
        self.reach_site(Phase.RECOVERY)
        assert plan.source is not None
        source = plan.rank_of(plan.source)
        assert source is not None
        began = time.monotonic()
        state = receive_state(group, source)
        kept = self._receive_neighbour_state(group, plan)
        self.record_event("rank_joined", rank=self.worker.rank, generation=plan.generation, exact=kept is not None,
                  seconds=time.monotonic() - began)  # fmt: skip
        self.has_formed = True
        return state, kept

    def contributors(self) -> list[int]:
        """The ranks of the deal whose gradients of this step are still to be had."""
        return [rank for rank in range(len(self.members)) if rank not in self.missing]

    @property
    def root(self) -> int:
        """A rank whose layout of gradients holds: one that has been there from the beginning."""
        source = self.worker.plan.source
        rank = self.worker.plan.rank_of(source) if source is not None else None
        return 0 if rank is None else rank

    @property
    def is_repairing(self) -> bool:
        """Whether the point that comes next is one that others repair: with shares and buffers as they were."""
        plan = self.worker.plan
        return Verdict.REPAIR in plan.verdicts.values() and self.position.point <= plan.point

    def note_missing(self) -> None:
        """What is reduced again is reduced among those who live."""
        living = self.worker.plan.members
        self.missing = {rank for rank, uid in enumerate(self.members) if uid not in living}

    def note_inexact(self, why: str) -> None:
        """The job is no longer exactly what it would have been."""
        self.record_event("inexact", reason=why)
        if isinstance(self.worker, ElasticWorker):
            self.worker.client.set(StoreKeys.inexact, why)

    def note_diverged(self, why: str) -> None:
        """Ranks train different models, and the job must not end well; or, with an empty text, not any more."""
        if why:
            self.note_inexact(why)
        if isinstance(self.worker, ElasticWorker):
            self.worker.client.set(StoreKeys.diverged, why)

    def note_unverified(self, why: str) -> None:
        """Nobody can tell whether the job still is exactly what it would have been."""
        self.record_event("unverified", reason=why)
        if isinstance(self.worker, ElasticWorker):
            self.worker.client.set(StoreKeys.unverified, why)

    def stop_job(self, error: UsageError) -> None:
        """Nobody can survive this mistake: let the launcher end the job and say why."""
        self.is_stopped = True
        if isinstance(self.worker, ElasticWorker):
            rank = self.worker.plan.rank_of(self.worker.uid)
            who = f"spare {self.worker.uid}" if rank is None else f"rank {rank}"
            keep_in_log(error, is_said=True)
            self.worker.client.set(StoreKeys.fatal, f"{who}: {error}")

    def _send_neighbour_state(self, group: Group, plan: MembershipPlan, uid: int, rank: int) -> None:
        kept = self.neighbour_state.find(uid, plan.point - 1)
        group.send(torch.tensor([0 if kept is None else kept.numel()]), rank).wait()
        if kept is not None:
            group.send(kept, rank).wait()

    def _receive_neighbour_state(self, group: Group, plan: MembershipPlan) -> torch.Tensor | None:
        keeper = plan.keepers.get(self.worker.uid)
        sender = plan.rank_of(keeper) if keeper is not None else None
        if sender is None:
            return None
        size = torch.zeros(1, dtype=torch.int64)
        group.receive(size, sender).wait()
        if not int(size):
            return None
        kept = torch.empty(int(size), dtype=torch.uint8)
        group.receive(kept, sender).wait()
        return kept
