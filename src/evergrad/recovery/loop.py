"""One rank's way through its epochs: from point to point, over whatever breaks between them.

begin ──▶ ( settle in ──▶ check ──▶ save ──▶ batch … backward ──▶ all gradients, or a decision ) … ──▶ end
               ▲                                    │
               └── recover: the next generation ◀───┘ the generation broke, or somebody joins or leaves
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from evergrad.errors import UsageError
from evergrad.records import Check
from evergrad.recovery.bootstrap import Bootstrap
from evergrad.recovery.data_position import DataPosition, StepBatch, StepBatches
from evergrad.recovery.dataloader_adapter import BatchSource
from evergrad.recovery.decide import is_after_others_finished
from evergrad.recovery.failures.schedule import Phase
from evergrad.recovery.fingerprints import compare_ranks, fingerprint_of
from evergrad.recovery.guard.guard import JobGuard
from evergrad.recovery.job_checkpoints import JobCheckpoints
from evergrad.recovery.membership import EXIT_ALL_LEFT, Fingerprint, PointKind, StoreKeys, Verdict
from evergrad.recovery.process_group import GroupBroken
from evergrad.recovery.rank_state import RankState
from evergrad.recovery.step_barrier import StepBarrier
from evergrad.recovery.untracked_state import KeptGradients, UntrackedState
from evergrad.recovery.worker import ElasticWorker, Worker
from evergrad.wording import count_of

# What the launcher's status line knows of the job: a few times a second, by one rank.

_EVERY_S = 0.2


class ProgressReporter:
    """Tells how far the job is, seldom enough to cost nothing."""

    def __init__(self) -> None:
        self._next = 0.0

    def report(self, position: DataPosition, worker: Worker, *, at_once: bool = False) -> None:
        """A step was applied; or an epoch has ended, which is said at once."""
        if not isinstance(worker, ElasticWorker) or worker.rank != 0:
            return
        now = time.monotonic()
        if at_once or now >= self._next:
            self._next = now + _EVERY_S
            known = {"step": position.step, "epoch": position.epoch, "generation": worker.plan.generation}
            worker.client.set(StoreKeys.progress, json.dumps(known | {"world_size": worker.world_size}))


_log = logging.getLogger(__name__)
_ASKED = 128 + signal.SIGTERM


@dataclass(slots=True)
class TrainingLoop:
    """One rank's; what the script sees of it is `Job`."""

    barrier: StepBarrier
    bootstrap: Bootstrap
    rank_state: RankState
    step_batches: StepBatches
    checkpoints: JobCheckpoints | None
    progress: ProgressReporter
    reach_site: Callable[..., None]
    record_event: Callable[..., None]
    untracked: UntrackedState
    kept_gradients: KeptGradients
    joining: bool
    guard: JobGuard | None = None
    is_iterating: bool = False
    is_save_due: bool = False
    _num_passes: int = 0
    """Number of this epoch's backward passes that have reduced gradients on this rank, whether or not they counted."""
    _must_redeal: bool = False
    _is_rest_noted: bool = False
    _compared: tuple[int, int] = (-1, 0)
    """The generation in which ranks were last compared because somebody had joined, and how often."""
    _fingerprint: Fingerprint | None = None
    """The fingerprint of this rank's state at the end of the last epoch, or where the script left it."""

    def epoch(self, source: BatchSource, call: int) -> Iterator[Any]:
        """The batches of one epoch, which is the script's `call`-th."""
        if self.is_iterating:
            self.stop_job(
                UsageError("job.batches: an epoch is under way. One at a time: finish it, or break out of it, first")
            )
        self.is_iterating, has_ended = True, False
        position = self.barrier.position
        try:
            self.bootstrap.run()
            if call < position.epoch:  # over before this process came
                self._skip(call)
                return
            while position.epoch < call:  # the loop before was left early, on all ranks
                position.end_epoch()
            self._end_joining()
            self._num_passes, is_over = 0, False
            self._begin_epoch(source)
            while not is_over:
                while (given := self._next_batch()) is not None:
                    yield given.batch
                if self.step_batches.must_redo:  # the script has not ended the step, and the others begin it again
                    self.roll_back()
                    continue
                self._refuse_without_step()
                self.end_step()
                is_over = self._end_epoch()
            has_ended = True
        except GeneratorExit:  # the script has left the loop
            has_ended = True
            raise
        finally:
            self.is_iterating = False
            self.step_batches.to_repeat.clear()
            self.end_step()
            if has_ended:
                self._take_fingerprint()

    def _refuse_without_step(self) -> None:
        """`UsageError` at the end of an epoch of which gradients were reduced, and none was used by the job."""
        if self._num_passes and not self.barrier.position.index:
            self.stop_job(UsageError(
                f"job.batches: the epoch is over, {count_of(self._num_passes, 'backward pass', 'backward passes')} "
                "reduced gradients in it, and job.step was not called: expected one job.step a step, found none. The "
                "job knows nothing of updates that the script makes itself, and cannot repeat them when a rank is "
                "lost. Call job.step(optimizer) after backward(); for a pass that is no part of the training use "
                "model.module"
            ))  # fmt: skip

    def _skip(self, call: int) -> None:
        """Pass over an epoch that ended before this process came.

        The script may train nothing in it, but can do anything after it: step a scheduler, draw random numbers. None
        of that counts, so the state is put in place again when it begins to count.
        """
        rank_state, arrival = self.rank_state, self.bootstrap
        rank_state.hold_copy()
        if self.joining and call == arrival.unfinished_epoch:
            rank_state.restore_copy()
            self.joining = False
            if not arrival.is_local_state_behind:
                rank_state.drop_copy()

    def _end_joining(self) -> None:
        """This process comes to the epoch that the job is in, with the job's state."""
        # Where it has done what a dead rank had yet to do, its generators are as they should be.
        self.rank_state.restore_copy(local_state=self.joining)
        self.rank_state.drop_copy()
        self.joining = False
        if self.bootstrap.unfinished_epoch >= 0 and not self.bootstrap.has_yielded:
            self.rank_state.hold_copy()  # until a step is applied: a restart from the same version begins here again

    def publish_fingerprint(self) -> None:
        """Let the launcher compare what this rank has trained with the others, at the job's end."""
        if self.is_iterating:  # the script has kept the iterator
            self._take_fingerprint()
        worker = self.barrier.worker
        if self._fingerprint is not None and isinstance(worker, ElasticWorker):
            with suppress(RuntimeError):  # the store may be gone
                worker.client.set(StoreKeys.fingerprint(worker.uid), self._fingerprint.to_json())

    def _take_fingerprint(self) -> None:
        """Now, because whatever the script does to the model after its training is no part of that."""
        rank_state = self.rank_state
        if (
            isinstance(self.barrier.worker, ElasticWorker)
            and not sys.is_finalizing()
            and not rank_state.optimizers.has_pending_states
        ):
            self._fingerprint = fingerprint_of(
                rank_state.model, rank_state.optimizers.known, self.barrier.position.step
            )

    def ended_backward(self) -> None:
        """At the end of a backward pass, before it returns: all gradients on all ranks, or a decision."""
        barrier, gradients, step_batches = self.barrier, self.barrier.gradients, self.step_batches
        assert gradients is not None
        self._num_passes += 1
        while not step_batches.must_redo:
            try:
                gradients.finish_reduction()
                if not self._pass_step():
                    step_batches.must_redo = True
                    gradients.failed = "this step is done again"
                break
            except GroupBroken as error:
                why = str(error)
            except UsageError as error:
                barrier.stop_job(error)
                raise
            match self._recover(PointKind.STEP, why):
                case Verdict.PROCEED:
                    barrier.mark_passed(PointKind.STEP)
                    break
                case Verdict.REPAIR:
                    if barrier.worker.plan.todo or not gradients.num_buckets:
                        barrier.note_missing()
                    gradients.reopen(barrier.worker.plan.todo)
                    self.reach_site(Phase.RECOVERY)
                case _:
                    step_batches.must_redo = True
                    gradients.failed = "this step is done again"  # until then nothing more of it is reduced
        step_batches.reduced = len(step_batches)

    def roll_back(self) -> None:
        """Nothing of this step remains; its batches come again."""
        step = self.barrier.position.step
        self._watch_generators(f"and step {step} was done again")
        if step:
            self.kept_gradients.dropped(f"step {step} was done again")
        self.rank_state.undo_step()
        if self.barrier.gradients is not None:
            self.barrier.gradients.discard()
        self._undo_overlap()
        self.step_batches.redo()
        self.barrier.rewind_step()

    def end_step(self) -> None:
        """The step under way is over, applied or not."""
        self._undo_overlap()
        self.step_batches.clear()
        self.barrier.missing.clear()

    def _undo_overlap(self) -> None:
        if self.rank_state.optimizers.overlap is not None:
            self.rank_state.optimizers.overlap.undo()  # what no step has ended

    def _pass_step(self) -> bool:
        """Pass the point of a backward pass; False if its gradients are suspicious, and it is done again."""
        guarding = self.guard
        if guarding is not None:
            assert self.barrier.gradients is not None
            guarding.read(self.barrier.gradients.reduced, self.rank_state.scale)
            if guarding.must_stop:
                raise UsageError(f"job.guard: {guarding.must_stop}, twice: the job stops, as it was told to")
        is_passed = self.barrier.pass_point(PointKind.STEP, len(self.step_batches))
        if not is_passed:
            assert guarding is not None, "nobody else is suspicious"
            guarding.mark_suspected()
        return is_passed

    def _begin_epoch(self, source: BatchSource) -> None:
        """Pass the first point of an epoch, unless the job is past it."""
        barrier, position, worker = self.barrier, self.barrier.position, self.barrier.worker
        position.begin_epoch(source, self.bootstrap.seed, worker.rank, worker.world_size)
        barrier.local_state.loader = position.opaque_loader
        barrier.members = worker.plan.members
        if not position.is_begun:
            self._note_missing_ranks()
        while not position.is_begun:
            barrier.begin_step()
            try:
                self._form_generation()
                self._await_boundary(PointKind.BEGIN)
                # Rank 0's, also if another process has its place by now: that has rank 0's random numbers.
                position.share_order(worker.group(), 0)
                barrier.pass_point(PointKind.BEGIN)
                position.is_begun = True
                continue
            except GroupBroken as error:
                why = str(error)
            if self._recover(PointKind.BEGIN, why) is Verdict.PROCEED:
                barrier.mark_passed(PointKind.BEGIN)
                position.is_begun = True
            else:
                position.share_again()

    def _await_boundary(self, kind: PointKind) -> None:
        try:
            self.barrier.await_boundary(kind)
        except UsageError as error:
            self.stop_job(error)

    def _note_missing_ranks(self) -> None:
        """Say that some ranks have finished, if the present generation is what they left of the job, and goes on."""
        barrier, plan = self.barrier, self.barrier.worker.plan
        if not is_after_others_finished(plan) or self._is_rest_noted:
            return
        self._is_rest_noted = True
        num_ended = len(plan.previous) - len(plan.members)
        why = (
            f"{count_of(num_ended, 'rank')} had ended the script before the others, which begin epoch "
            f"{barrier.position.epoch}: all processes have to call job.batches equally often, also where a snapshot of "
            "the script's own lets it skip epochs"
        )
        barrier.note_inexact(why)
        if barrier.worker.rank == 0:
            print(f"evergrad: {why}", file=sys.stderr)

    def _end_epoch(self) -> bool:
        """Pass the last point of an epoch: nobody leaves before all have applied its last step. Whether it is over."""
        barrier, position = self.barrier, self.barrier.position
        why: str | None = None
        barrier.begin_step()
        try:
            self._await_boundary(PointKind.END)
            if barrier.gradients is not None:  # whoever is past this point has them
                barrier.gradients.share_buffers(barrier.worker.group())
            barrier.pass_point(PointKind.END)
        except GroupBroken as error:
            why = str(error)
        if why is not None:
            if self._recover(PointKind.END, why) is not Verdict.PROCEED:
                return False
            barrier.mark_passed(PointKind.END)
        self.progress.report(position, barrier.worker, at_once=True)
        books = position.end_epoch()
        if barrier.worker.survives and barrier.worker.rank == 0 and books is not None:
            row = {name: value for name, value in books.to_json().items() if name != "schema_version"}
            self.record_event("epoch", epoch=position.epoch - 1, step=position.step, **row)
        return True

    def _next_batch(self) -> StepBatch | None:
        """The next batch for the script; None at the end of the epoch."""
        position, step_batches, rank_state = self.barrier.position, self.step_batches, self.rank_state
        if not step_batches:
            self._prepare_step()
        if (again := step_batches.next_repeated()) is not None:
            return again
        index = position.index + len(step_batches)
        if position.deal is not None and index >= position.deal.num_batches:
            return None
        self.reach_site(Phase.DATA)
        try:
            batch = position.fetch(index)
        except StopIteration:
            return None
        if not self.bootstrap.has_yielded:
            self._begin_to_watch()
        self.bootstrap.has_yielded = True
        is_first = not step_batches
        given = step_batches.give(batch, redoable=rank_state.snapshot is not None)
        if is_first:
            rank_state.begin_step()
        return given

    def _begin_to_watch(self) -> None:
        """Look out for state of the script that this process does not have from the job, before its first batch."""
        arrival = self.bootstrap
        if arrival.resumed_step < 0:
            return
        how = "went on from a checkpoint" if arrival.has_restored else "joined"
        if arrival.resumed_step:
            self.kept_gradients.dropped(f"rank {self.barrier.worker.rank} {how} at step {arrival.resumed_step}")
        self._watch_generators(
            f"and began anew where rank {self.barrier.worker.rank} {how} at step {arrival.resumed_step}"
        )
        if part := self.barrier.position.differing_data:
            self.barrier.note_unverified(
                f"rank {self.barrier.worker.rank}, which {how} at step {arrival.resumed_step}, "
                "has built another dataset "
                f"({part}) than the process whose state it has: seed before the dataset is built, "
                "torch.manual_seed(…) for torch.utils.data.random_split"
            )
        if arrival.has_restored:
            self.untracked.restored(arrival.resumed_step, self.rank_state.optimizers.groups())

    def _watch_generators(self, where: str) -> None:
        source = self.barrier.position.source
        self.untracked.watch_generators(where, self.rank_state.tracked, [source.loader])

    def _prepare_step(self) -> None:
        """Be where a step can begin: in a generation that has formed, checked and saved as far as that is due."""
        barrier, position = self.barrier, self.barrier.position
        if not self.step_batches.to_repeat:  # else generators are where they were after the first batch was fetched
            barrier.publish_local_state()
        is_prepared = False
        while not is_prepared:
            self._form_or_recover()
            self._check_if_due()
            if not position.is_begun:  # everyone has gone back to the beginning of this epoch
                self._begin_epoch(position.source)
            else:  # never before an epoch's first point, which a joiner passes first
                is_prepared = self._compare_if_due()
        self._save_if_due()
        barrier.begin_step()
        if barrier.gradients is not None:
            barrier.gradients.begin_step()

    @property
    def _is_pause_agreed(self) -> bool:
        """Whether all stop before the next step, to let others in or go."""
        barrier, plan = self.barrier, self.barrier.worker.plan
        return barrier.changes_in == plan.generation or bool(plan.calls and barrier.position.point > plan.point)

    def _form_or_recover(self) -> None:
        """Before a step: be in a generation that has formed, with batches that are dealt to its ranks."""
        barrier = self.barrier
        while not barrier.has_formed or self._is_pause_agreed:
            planned = self._is_pause_agreed
            if planned:
                why = "others join or leave"
                self._check_if_due()
                if not self._is_pause_agreed:
                    continue
                self._save_if_due()
                if barrier.num_leaving == barrier.worker.world_size:
                    self._leave_together()
            else:
                try:
                    self._form_generation()
                    continue
                except GroupBroken as error:
                    why = str(error)
            if self._recover(PointKind.JOIN, why, planned=planned) is Verdict.LEAVE:
                self._leave("the others go on without it")
        self._redeal()

    def _form_generation(self) -> None:
        barrier = self.barrier
        if not barrier.has_formed:
            barrier.form_generation(lambda: {**self.rank_state.state(), "course": barrier.position.state_dict()})
            if barrier.worker.plan.joiners and barrier.position.step:
                self.kept_gradients.dropped(f"others joined at step {barrier.position.step}")
            self._must_redeal = True
            if barrier.must_restore:
                self.bootstrap.restore(in_process=True)
        self._redeal()

    def _redeal(self) -> None:
        """Have batches dealt to the ranks that there are now; not yet if others are in the middle of this step."""
        barrier = self.barrier
        if not self._must_redeal:
            return
        if barrier.is_repairing:
            barrier.note_missing()
            return
        self._must_redeal = False
        if barrier.position.redeal(barrier.worker.rank, barrier.worker.world_size):
            self.step_batches.to_repeat.clear()
        barrier.members = barrier.worker.plan.members

    def _compare_if_due(self) -> bool:
        """Compare the state of all ranks when somebody has joined, and again after the first step with it.

        Whether that is due depends on nothing but what all members of a generation share, so that all come to it. False
        if the generation broke meanwhile.
        """
        barrier, plan = self.barrier, self.barrier.worker.plan
        count = self._compared[1] if self._compared[0] == plan.generation else 0
        is_due = count == 0 or (count == 1 and barrier.stepped_in == plan.generation)
        if not (is_due and plan.joiners and plan.generation and plan.world_size > 1) or barrier.is_repairing:
            return True
        try:
            self._compare("when it had joined" if count == 0 else "after the first step with it")
            self._compared = plan.generation, count + 1
            return True
        except GroupBroken as error:
            why = str(error)
        self._recover(PointKind.JOIN, why)
        return False

    def _compare(self, when: str) -> None:
        """Compare now; `GroupBroken` if the group breaks."""
        barrier, worker, rank_state = self.barrier, self.barrier.worker, self.rank_state
        group, known = worker.group(), rank_state.optimizers.known
        some_lack = torch.tensor([float(not known or rank_state.optimizers.has_pending_states)])
        group.all_reduce(some_lack, "max").wait()
        # Optimizers that a joiner has not shown yet cannot be compared: they are after its first step.
        mine = fingerprint_of(rank_state.model, () if some_lack.item() else known, barrier.position.step)
        path, difference = compare_ranks(group, mine)
        expected, self.bootstrap.expected = self.bootstrap.expected, None
        if (
            expected is not None
            and barrier.local_state.loader is None
            and not torch.equal(barrier.local_state.capture(), expected)
        ):
            barrier.note_inexact(
                f"rank {worker.rank} has joined, and its random numbers or buffers are not as expected"
            )
        joined = ", ".join(f"rank {worker.plan.rank_of(uid)}" for uid in worker.plan.joiners)
        if path and group.rank == 0:
            self.record_event("ranks_differ", step=barrier.position.step, path=path, reason=difference, joined=joined)
            text = f"ranks differ ({joined} joined; compared {when}): {difference}"
            barrier.note_diverged(text)
            _log.warning("step %d: %s", barrier.position.step, text)

    def _check_if_due(self) -> None:
        """Before a step: compare what all ranks have, as often as the guard wants it."""
        barrier, guarding = self.barrier, self.guard
        while guarding is not None and guarding.is_due(checkpoints=self._will_save):
            back_to = ""
            try:
                checked = guarding.check(self.rank_state.optimizers.known)
                why = checked.why
                if checked.status is not Check.FAILED:
                    return
                if self.checkpoints is not None and barrier.worker.survives:
                    back_to = self.checkpoints.newest_guarded()
                if not back_to:
                    self.stop_job(UsageError(
                        f"the guard found ranks that differ ({why}), and there is no version to go back to that it has "
                        "found sound: give eg.join a checkpointer, or start again from a version that is right"
                    ))  # fmt: skip
                self.record_event("rollback_to_version", version=back_to, reason=why)
            except GroupBroken as error:
                why = str(error)
            self._recover(PointKind.JOIN, why, back_to=back_to)
            self._form_or_recover()

    @property
    def _will_save(self) -> bool:
        return self.is_save_due and self.barrier.passed_in == self.barrier.worker.plan.generation

    def _save_if_due(self) -> None:
        """Before the next step, so that what the script did after the last one is saved with it.

        In the generation in which that step was passed, or not at all: ranks of the next one may have saved already,
        or have joined since, and a save begins together.
        """
        is_due, self.is_save_due = self.is_save_due, False
        if not is_due or self.checkpoints is None:
            return
        barrier, rank_state = self.barrier, self.rank_state
        self.reach_site(Phase.CHECKPOINT)
        if barrier.passed_in != barrier.worker.plan.generation or not barrier.worker.is_current():
            self.record_event("save_skipped", step=barrier.position.step, reason="a rank was lost meanwhile")
            return
        try:
            self.checkpoints.save(rank_state.model, rank_state.optimizers.known, rank_state.tracked, barrier.position)
            if self.guard is not None and self.guard.is_sound:
                self.checkpoints.note_guarded()
        except GroupBroken as error:  # the next point will find the same
            self.record_event("save_skipped", step=barrier.position.step, reason=str(error))

    def _recover(self, kind: PointKind, why: str, *, planned: bool = False, back_to: str = "") -> Verdict:
        # What is agreed comes soon. For anything else this process may wait in vain, and must be able to end.
        with nullcontext() if planned else self.bootstrap.sigterm.suspended():
            if self.barrier.leave_requested and not planned:
                self._leave("it was asked to, and its generation has broken", code=_ASKED)
            try:
                verdict = self.barrier.recover(kind, why, planned=planned, back_to=back_to)
            except UsageError as error:
                self.stop_job(error)
        if self.barrier.worker.plan.relaunch and verdict is not Verdict.LEAVE:
            self.bootstrap.restart_process("too few ranks were left")
        return verdict

    def _leave_together(self) -> NoReturn:
        """All ranks were asked to leave: with what they have done, where there is a checkpointer."""
        rank_state, position = self.rank_state, self.barrier.position
        try:
            if self.checkpoints is not None:
                self.checkpoints.save(
                    rank_state.model, rank_state.optimizers.known, rank_state.tracked, position, now=True
                )
        except GroupBroken as error:
            self.record_event("save_skipped", step=position.step, reason=str(error))
        self._leave("all ranks were asked to", code=EXIT_ALL_LEFT)

    def _leave(self, why: str, code: int = 0) -> NoReturn:
        worker = self.barrier.worker
        self.record_event(
            "rank_left", rank=worker.plan.rank_of(worker.uid), step=self.barrier.position.step, reason=why
        )
        sys.exit(code)

    def stop_job(self, error: UsageError) -> NoReturn:
        """A mistake that nobody can survive."""
        self.barrier.stop_job(error)
        raise error
