"""The training loop's side: `join`, `wrap`, `track`, `batches`, `step`.

job = eg.join()
model = job.wrap(model)
for x, y in job.batches(loader):
    optimizer.zero_grad()
    loss_fn(model(x), y).backward()
    if job.step(optimizer):
        scheduler.step()
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.recovery.buckets import Hook
from evergrad.recovery.course import Course
from evergrad.recovery.crew import Crew, Launched
from evergrad.recovery.dealing import BatchMode
from evergrad.recovery.engine import Engine
from evergrad.recovery.failures import Phase
from evergrad.recovery.gradients import Gradients
from evergrad.recovery.loading import Source
from evergrad.recovery.membership import Point, Report, Verdict
from evergrad.recovery.optimizers import Optimizers
from evergrad.recovery.own import Own, Randomness
from evergrad.recovery.progress import Progress
from evergrad.recovery.saving import Saves
from evergrad.recovery.sites import Sites
from evergrad.recovery.snapshots import Snapshot, checked_tracked
from evergrad.recovery.transport import GroupBroken
from evergrad.recovery.wrapping import Around, Unwrapped

__all__ = ["Job"]

_REFUSED = ("process_group", "static_graph", "gradient_as_bucket_view", "delay_all_reduce_named_params", "device_mesh")


@dataclass(slots=True)
class _Yielded:
    """A batch of the step under way, and the generators as they were when it was given."""

    batch: Any
    randomness: Randomness | None


class Job:
    """One process's part in a job that goes on when others are lost. `eg.join()` makes it.

    All ranks make the same calls in the same order. Not for several threads at once.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        strategy: str,
        after_loss: BatchMode,
        num_ranks: int,
        is_spare: bool,
        keeps: bool,
        saves: Saves | None,
        sites: Sites,
        tell: Callable[..., None],
        seed: int = 0,
    ) -> None:
        self._crew, self._strategy, self._after_loss = crew, strategy, after_loss
        self._num_ranks, self._seed = num_ranks, seed
        self._is_spare, self._saves, self._sites, self._tell = is_spare, saves, sites, tell
        self._course = Course(num_ranks, after_loss)
        self._engine = Engine(crew, tell, keeps and crew.survives, self._course)
        self._progress = Progress()
        self._model: nn.Module | None = None
        self._tracked: dict[str, Any] = {}
        self._optimizers = Optimizers()
        self._snapshot: Snapshot | None = None
        self._window: list[_Yielded] = []
        self._replay: deque[_Yielded] = deque()
        self._reduced = 0
        """How many batches of the window have been reduced."""
        self._is_doomed = False
        """Whether the step under way has to be done again."""
        self._has_arrived = self._is_iterating = self._is_save_due = self._has_yielded = False
        self._must_follow = False
        self._unattended = -1
        """The epoch that was saved at its end: what the script does after it has yet to be done."""
        self._calls = 0
        self._sources: dict[int, Source] = {}
        self.joining = is_spare or saves is not None
        """True until the epoch that the job is in: what comes between epochs (validation) can be left out meanwhile."""

    @property
    def rank(self) -> int:
        """This process's number in the present generation; -1 for a spare that has not been called."""
        return -1 if self._waits else self._crew.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are in the present generation."""
        return self._num_ranks if self._waits else self._crew.world_size

    @property
    def generation(self) -> int:
        """How often the membership has changed; -1 for a spare that has not been called."""
        return -1 if self._waits else self._crew.plan.generation

    @property
    def applied(self) -> int:
        """How many steps the job has applied."""
        return self._course.step

    @property
    def idle(self) -> bool:
        """Whether the present batch counts for nothing: in a ragged step there were too few samples for all ranks.

        The rank runs somebody else's samples so as to take part; leave them out of metrics.
        """
        return self._course.is_idle(self._course.index + len(self._window) - 1)

    @property
    def is_last_batch(self) -> bool:
        """Whether the present batch is the last of its epoch, as it is dealt now: time to step, accumulated or not."""
        deal = self._course.deal
        return deal is not None and self._course.index + len(self._window) >= deal.num_batches

    def wrap(
        self,
        model: nn.Module,
        *,
        hooks: Sequence[Callable[[Hook], Hook]] = (),
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> Any:
        """The model as DistributedDataParallel would give it, but for what happens when a rank is lost.

        Rank 0's parameters and buffers are given to all. `hooks` are wrappers around our all-reduce, the innermost
        first, as torch's `fp16_compress_wrapper`. Other options are DDP's.
        """
        if self._model is not None:
            raise UsageError("job.wrap: a model is wrapped already. Put several into one module, such as a ModuleDict")
        if wrong := [name for name in _REFUSED if options.get(name)]:
            raise UsageError(f"job.wrap({wrong[0]}=…): that is not DDP's to choose here; leave it out")
        self._model = model
        buffers = list(model.buffers())
        self._engine.own = Own(buffers)
        self._snapshot = Snapshot(buffers) if self._crew.survives else None
        if self._num_ranks == 1:
            return Unwrapped(model)
        around = Around(self._engine, lambda: (self._reduced, len(self._window)), self._site, self._after_backward)
        gradients = Gradients(
            model,
            around,
            keep=self._strategy == "forward",
            hooks=hooks,
            find_unused_parameters=find_unused_parameters,
            **options,
        )
        self._engine.gradients = gradients
        self._sites.watch(gradients.module, self._site)
        if not self._waits and self._crew.plan.generation == 0:
            try:
                gradients.broadcast(self._crew.group(), 0)
            except GroupBroken as error:
                self._stop(UsageError(f"a rank was lost before training began ({error}): start the job again"))
        return gradients.module

    def track(self, **things: Any) -> None:
        """What else a joiner and a rollback must bring along: schedulers, scalers, averages, counters.

        A gradient scaler that is tracked is used by `step`. What is tracked is copied at the beginning of every step.
        """
        if again := [name for name in things if name in self._tracked]:
            raise UsageError(f"job.track({again[0]}=…): this name is taken")
        self._tracked |= checked_tracked(things)

    def batches(self, loader: Any) -> Iterator[Any]:
        """This rank's batches of one epoch; the same ones again after a rollback, dealt anew after a loss.

        The loader's batch size is that of one rank. Each call is one epoch: on a joiner those that are over yield
        nothing.
        """
        call, self._calls = self._calls, self._calls + 1
        if id(loader) not in self._sources:  # one for each, so that persistent workers persist
            self._sources[id(loader)] = Source.of(loader)
        return self._epoch(self._sources[id(loader)], call)

    def step(self, *optimizers: Optimizer) -> bool:
        """Apply the step, if all ranks have its gradients; False if it has to be done again, or a scaler skipped it."""
        if not optimizers:
            raise UsageError("job.step: expected the optimizer, or all of them")
        if not self._window:
            raise UsageError(
                "job.step: no batch since the last step. It is called once a step, inside of 'for … in "
                "job.batches(loader)'; give it all optimizers at once"
            )
        self._optimizers.meet(optimizers)
        if self._is_doomed:
            self._roll_back()
            return False
        if self._engine.gradients is not None and self._reduced < len(self._window):
            self._stop(UsageError(
                "job.step: the last backward has reduced no gradients. Either it ran under no_sync(), or the loss does "
                "not reach all parameters: job.wrap(model, find_unused_parameters=True)"
            ))  # fmt: skip
        self._site(Phase.OPTIMIZER)
        # By those whose gradients are in this step: the same for all, whenever each of them learnt of a loss.
        factor = len(self._engine.contributors()) / self._num_ranks if self._after_loss == "scale_lr" else 1.0
        was_applied = self._optimizers.apply(self._tracked.values(), factor)
        self._course.applied(len(self._window), sorted(self._engine.missing))
        self._end_window()
        self._is_save_due = self._saves is not None and self._saves.is_due(self._course.step)
        if self._engine.gradients is not None:
            self._engine.gradients.finish()
        self._progress.show(self._course, self._crew)
        if self._engine.broke_at is not None:
            self._tell("going on", step=self._course.step, generation=self.generation,
                       seconds=time.monotonic() - self._engine.broke_at)  # fmt: skip
            self._engine.broke_at = None
        return was_applied

    def close(self) -> None:
        """Leave the job. Done at exit by itself; twice is fine."""
        try:
            self._let_go_of_loaders()
            if not self._waits and self._course.step:
                with suppress(RuntimeError):  # the store may be gone
                    self._progress.show(self._course, self._crew, at_once=True)
        finally:
            self._crew.close()

    def _let_go_of_loaders(self) -> None:
        self._course.leave()
        for source in self._sources.values():
            source.close()

    @property
    def _waits(self) -> bool:
        return self._is_spare and not self._has_arrived

    def _epoch(self, source: Source, call: int) -> Iterator[Any]:
        if self._is_iterating:
            raise UsageError("job.batches: an epoch is under way. One at a time: finish it, or break out of it, first")
        self._is_iterating = True
        course = self._course
        try:
            self._arrive()
            if call < course.epoch:  # over before this process came
                self.joining &= call != self._unattended
                return
            while course.epoch < call:  # the loop before was left early, on all ranks
                course.close()
            self.joining = False
            self._begin(source)
            is_over = False
            while not is_over:
                while (yielded := self._next()) is not None:
                    yield yielded.batch
                self._end_window()
                is_over = self._end()
        finally:
            self._is_iterating = False
            self._replay.clear()
            self._end_window()

    def _begin(self, source: Source) -> None:
        """Pass the first point of an epoch, unless the job is past it."""
        engine, course = self._engine, self._course
        course.open(source, self._seed, self._crew.rank, self._crew.world_size)
        engine.own.loader = course.own_loader
        engine.members = self._crew.plan.members
        if course.is_begun:
            return
        while not course.is_begun:
            engine.first = course.point
            try:
                self._settle_in()
                course.share_order(self._crew.group(), self._engine.root)
                engine.pass_point(Point.BEGIN)
                course.is_begun = True
                continue
            except GroupBroken as error:
                why = str(error)
            if self._recover(Point.BEGIN, why) is Verdict.PROCEED:
                engine.passed(Point.BEGIN)
                course.is_begun = True
            else:
                course.share_again()

    def _end(self) -> bool:
        """Pass the last point of an epoch: nobody leaves before all have applied its last step. Whether it is over."""
        engine, course = self._engine, self._course
        why: str | None = None
        engine.first = course.point
        try:
            if engine.gradients is not None:  # whoever is past this point has them
                engine.gradients.share_buffers(self._crew.group())
            engine.pass_point(Point.END)
        except GroupBroken as error:
            why = str(error)
        if why is not None:
            if self._recover(Point.END, why) is not Verdict.PROCEED:
                return False
            engine.passed(Point.END)
        self._progress.show(course, self._crew, at_once=True)
        books = course.close()
        if self._crew.survives and self.rank == 0 and books is not None:
            row = {name: value for name, value in books.to_json().items() if name != "schema_version"}
            self._tell("epoch", epoch=course.epoch - 1, step=course.step, **row)
        return True

    def _next(self) -> _Yielded | None:
        """The next batch for the script; None at the end of the epoch."""
        course = self._course
        if not self._window:
            self._settle_in_or_recover()
            if not course.is_begun:  # everyone has gone back to the beginning of this epoch
                self._begin(course.source)
            self._save_if_due()
            self._engine.first = course.point
            if self._engine.gradients is not None:
                self._engine.gradients.begin_step()
        if self._replay:
            yielded = self._replay.popleft()
            assert yielded.randomness is not None
            yielded.randomness.put_back()
            self._window.append(yielded)
            return yielded
        index = course.index + len(self._window)
        if course.deal is not None and index >= course.deal.num_batches:
            return None
        self._site(Phase.DATA)
        try:
            batch = course.fetch(index)
        except StopIteration:
            return None
        self._has_yielded = True
        yielded = _Yielded(batch, Randomness() if self._crew.survives else None)
        if not self._window and self._snapshot is not None:
            self._snapshot.take(self._tracked)
        self._window.append(yielded)
        return yielded

    def _settle_in_or_recover(self) -> None:
        """Before a step: be in a generation that has formed, with batches that are dealt to its ranks."""
        course, engine = self._course, self._engine
        while not engine.is_settled or (self._crew.plan.calls and course.point > self._crew.plan.point):
            planned = False
            try:
                if self._crew.plan.calls and course.point > self._crew.plan.point:
                    planned = True
                    raise GroupBroken("spares take the place of lost ranks")
                self._settle_in()
                continue
            except GroupBroken as error:
                why = str(error)
            self._recover(Point.JOIN, why, planned=planned)
        self._follow()

    def _settle_in(self) -> None:
        engine = self._engine
        if not engine.is_settled:
            engine.settle_in(self._state)
            self._must_follow = True
            if engine.must_restore:
                self._restore(in_process=True)
        self._follow()

    def _follow(self) -> None:
        """Have batches dealt to the ranks that there are now; not yet if others are in the middle of this step."""
        engine = self._engine
        if not self._must_follow:
            return
        if engine.is_repairing:
            engine.note_missing()
            return
        self._must_follow = False
        if self._course.follow(self._crew.rank, self._crew.world_size):
            self._replay.clear()
        engine.members = self._crew.plan.members

    def _arrive(self) -> None:
        """Once: a spare waits for its call, and whoever begins takes up the newest checkpoint."""
        if self._has_arrived:
            return
        if self._is_spare:
            assert isinstance(self._crew, Launched)
            _warm_up()
            if self._crew.await_call() is None:
                self._crew.close()
                sys.exit(0)
        plan = self._crew.plan
        engine = self._engine
        while True:
            plan = self._crew.plan
            try:
                if self._crew.uid in plan.joiners and plan.source is not None:
                    self._take_over(*engine.arrive())
                    break
                self._crew.group()
                engine.is_settled = True
                if plan.restart or (self._saves is not None and plan.generation == 0):
                    self._restore(in_process=False)
                break
            except GroupBroken as error:
                why = str(error)
            point = plan.point if plan.joiners else 0
            report = Report(
                self._crew.uid, self._crew.rank, plan.generation, point, plan.kind, 0, reason=why, has_state=False
            )
            if self._crew.next_plan(report).relaunch:
                self._begin_again(why)
        self._has_arrived = True

    def _take_over(self, state: Any, kept: torch.Tensor | None) -> None:
        """Become what the dead rank would be now."""
        if self._model is not None:
            with torch.no_grad():
                for name, tensor in _tensors_of(self._model).items():
                    tensor.copy_(state["model"][name])
        for name, thing in self._tracked.items():
            if name in state["tracked"]:
                thing.load_state_dict(state["tracked"][name])
        self._optimizers.owe(state["optimizers"])
        self._course.load_state_dict(state["course"])
        if kept is not None:
            self._course.set_own_loader(self._engine.own.put(kept))
            return
        rank = self._crew.plan.takes.get(self._crew.uid, self._crew.rank)
        step = self._saves.restore_own(self._model, rank) if self._saves is not None else None
        whence = "is lost with it" if step is None else f"comes from its save of step {step}"
        self._engine.note_inexact(f"what only rank {rank} had (its random numbers, its buffers) {whence}")

    def _state(self) -> dict[str, Any]:
        """What a joiner gets of this rank."""
        return {
            "model": _tensors_of(self._model) if self._model is not None else {},
            "tracked": {name: thing.state_dict() for name, thing in self._tracked.items()},
            "optimizers": self._optimizers.states(),
            "course": self._course.state_dict(),
        }

    def _restore(self, *, in_process: bool) -> None:
        """Everyone back to the newest checkpoint."""
        self._engine.must_restore = False
        assert self._saves is not None, "a restart without a checkpointer is refused when the job begins"
        call = self._course.epoch
        found = self._saves.restore(self._model, self._optimizers.known, self._tracked, self._course)
        if self._course.skip_end():
            self._unattended = self._course.epoch - 1
        if self._crew.plan.restart:  # points only ever go on, whatever was saved
            self._course.point = self._crew.plan.point
        self._tell("restored", step=found[0] if found else None, in_process=in_process)
        if found is None and not self._has_yielded:
            if self._crew.plan.generation and self._engine.gradients is not None:
                self._engine.gradients.broadcast(self._crew.group(), 0)
            return
        if in_process and (found is None or self._course.epoch != call):
            self._begin_anew("the newest checkpoint is of another epoch" if found else "there is no checkpoint yet")
        if found is None:
            return
        self._optimizers.owe(found[1])
        self._replay.clear()
        if in_process:
            self._course.open(self._course.source, self._seed, self._crew.rank, self._crew.world_size)

    def _begin_anew(self, why: str) -> NoReturn:
        """Start the script from its beginning, on all ranks: its loop cannot go back to where the state is."""
        self._engine.recover(Point.JOIN, why, planned=True)
        self._begin_again(why)

    def _recover(self, kind: Point, why: str, *, planned: bool = False) -> Verdict:
        verdict = self._engine.recover(kind, why, planned=planned)
        if self._crew.plan.relaunch:
            self._begin_again("too few ranks were left")
        return verdict

    def _begin_again(self, why: str) -> NoReturn:
        """Be a new process, of the same number, in the present generation."""
        generation = self._crew.plan.generation
        self._tell("begins anew", reason=why, generation=generation)
        self._let_go_of_loaders()
        assert isinstance(self._crew, Launched)
        self._crew.leave_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ["EVERGRAD_GENERATION"] = str(generation)
        # Not closed here: gloo's threads, which end only with this program, would abort it.
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                os.set_inheritable(int(name), int(name) < 3)
        os.execv(sys.executable, sys.orig_argv)

    def _save_if_due(self) -> None:
        """Before the next step, so that what the script did after the last one is saved with it.

        In the generation in which that step was passed, or not at all: ranks of the next one may have saved already,
        or have joined since, and a save begins together.
        """
        is_due, self._is_save_due = self._is_save_due, False
        if not is_due or self._saves is None:
            return
        if self._engine.passed_in != self._crew.plan.generation:
            self._tell("not saved", step=self._course.step, reason="a rank was lost meanwhile")
            return
        self._site(Phase.CHECKPOINT)
        try:
            self._saves.save(self._model, self._optimizers.known, self._tracked, self._course)
        except GroupBroken as error:  # the next point will find the same
            self._tell("not saved", step=self._course.step, reason=str(error))

    def _roll_back(self) -> None:
        """Nothing of this step remains; its batches come again."""
        assert self._snapshot is not None
        self._snapshot.put_back(self._tracked)
        if self._engine.gradients is not None:
            self._engine.gradients.discard()
        for optimizer in self._optimizers.known:
            optimizer.zero_grad(set_to_none=True)
        self._replay = deque([*self._window, *self._replay])
        self._course.point = self._engine.first  # of several points of this step, none counts
        self._end_window()

    def _end_window(self) -> None:
        self._window.clear()
        self._engine.missing.clear()
        self._reduced = 0
        self._is_doomed = False

    def _after_backward(self) -> None:
        """At the end of a backward pass, before it returns: all gradients on all ranks, or a decision."""
        engine, gradients = self._engine, self._engine.gradients
        assert gradients is not None
        while not self._is_doomed:
            try:
                gradients.settle()
                engine.pass_point(Point.STEP)
                break
            except GroupBroken as error:
                why = str(error)
            except UsageError as error:
                engine.stop(error)
                raise
            match self._recover(Point.STEP, why):
                case Verdict.PROCEED:
                    engine.passed(Point.STEP)
                    break
                case Verdict.REPAIR:
                    if self._crew.plan.todo or not gradients.num_buckets:
                        engine.note_missing()
                    gradients.reopen(self._crew.plan.todo)
                case _:
                    self._is_doomed = True
                    gradients.failed = "this step is done again"  # until then nothing more of it is reduced
        self._reduced = len(self._window)

    def _site(self, phase: Phase, bucket: int | None = None, at: Any = None) -> None:
        if self._sites.is_armed(self._course.step):
            self._sites.reach(phase, self._course.step, self._crew, bucket, at)

    def _stop(self, error: UsageError) -> None:
        self._engine.stop(error)
        raise error


def _warm_up() -> None:
    """What a process's first pass has to start (threads, kernels), before anyone waits for it."""
    weight = torch.ones(8, 8, requires_grad=True)
    loss: Any = nn.functional.cross_entropy(
        nn.functional.linear(torch.ones(4, 8), weight).relu(), torch.zeros(4).long()
    )
    loss.backward()


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
