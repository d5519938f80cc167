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

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.recovery.arriving import Arrival
from evergrad.recovery.buckets import Hook
from evergrad.recovery.course import Course
from evergrad.recovery.crew import Crew
from evergrad.recovery.dealing import BatchMode
from evergrad.recovery.departure import Departure
from evergrad.recovery.engine import Engine
from evergrad.recovery.failures.schedule import Phase
from evergrad.recovery.failures.sites import Sites
from evergrad.recovery.fingerprints import tell_weights
from evergrad.recovery.gradients import Gradients
from evergrad.recovery.guard.guarding import Guarding
from evergrad.recovery.guard.settings import GuardSettings, Healing
from evergrad.recovery.launched import Launched
from evergrad.recovery.loading import Source
from evergrad.recovery.membership import Point
from evergrad.recovery.overlapping import Overlap, refuse_overlap
from evergrad.recovery.own import Own
from evergrad.recovery.passage import Passage
from evergrad.recovery.progress import Progress
from evergrad.recovery.saving import Saves
from evergrad.recovery.snapshots import Snapshot, checked_tracked
from evergrad.recovery.trained import Trained
from evergrad.recovery.transport import GroupBroken
from evergrad.recovery.window import Window
from evergrad.recovery.wrapping import Around, Unwrapped

__all__ = ["Job"]

_REFUSED = ("process_group", "static_graph", "gradient_as_bucket_view", "delay_all_reduce_named_params", "device_mesh")


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
        can_grow: bool = False,
    ) -> None:
        self._crew, self._strategy, self._after_loss, self._num_ranks = crew, strategy, after_loss, num_ranks
        self._saves, self._sites, self._tell, self._can_grow = saves, sites, tell, can_grow
        self._course = Course(num_ranks, after_loss)
        self._engine = Engine(crew, tell, keeps=keeps and crew.survives, course=self._course, site=self._site)
        if isinstance(crew, Launched):
            crew.reported = lambda: self._site(Phase.AGREEMENT)
        self._trained, self._window, self._progress = Trained(), Window(), Progress()
        self._departure = Departure(self._asked_to_leave)
        self._arrival = Arrival(
            self._engine, self._trained, self._window, saves, self._departure, tell, is_spare, seed, self._let_go
        )
        self._passage = Passage(
            self._engine, self._arrival, self._trained, self._window, saves, self._progress, self._site, tell,
            joining=is_spare or saves is not None,
        )  # fmt: skip
        self._calls = 0
        self._sources: dict[int, Source] = {}

    @property
    def rank(self) -> int:
        """This process's number in the present generation; -1 for a spare that has not been called."""
        return -1 if self._arrival.waits else self._crew.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are in the present generation."""
        return self._num_ranks if self._arrival.waits else self._crew.world_size

    @property
    def generation(self) -> int:
        """How often the membership has changed; -1 for a spare that has not been called."""
        return -1 if self._arrival.waits else self._crew.plan.generation

    @property
    def applied(self) -> int:
        """How many steps the job has applied."""
        return self._course.step

    @property
    def joining(self) -> bool:
        """True until the epoch that the job is in: what comes between epochs (validation) can be left out meanwhile."""
        return self._passage.joining

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
        optimizer: Optimizer | None = None,
        overlap: bool = False,
        **options: Any,
    ) -> Any:
        """The model as DistributedDataParallel would give it, but for what happens when a rank is lost.

        Rank 0's parameters and buffers are given to all. `hooks` are wrappers around our all-reduce, the innermost
        first, as torch's `fp16_compress_wrapper`. Other options are DDP's.

        With `overlap` the optimizer updates parameters while `backward()` still runs, each as soon as its gradient is
        reduced, with the same result; `job.step(optimizer)` ends the step. Gradients cannot be clipped then, nor the
        learning rate be changed, between the two. It takes as much memory again as parameters and optimizer state.
        """
        if self._trained.model is not None:
            raise UsageError("job.wrap: a model is wrapped already. Put several into one module, such as a ModuleDict")
        if wrong := [name for name in _REFUSED if options.get(name)]:
            raise UsageError(f"job.wrap({wrong[0]}=…): that is not DDP's to choose here; leave it out")
        if overlap:
            refuse_overlap(optimizer, after_loss=self._after_loss, find_unused_parameters=find_unused_parameters,
                           tracked=self._trained.tracked)  # fmt: skip
        elif optimizer is not None:
            raise UsageError("job.wrap(optimizer=…): that is for overlap=True; else job.step alone is given it")
        trained = self._trained
        trained.model = model
        buffers = list(model.buffers())
        self._engine.own = Own(buffers)
        trained.snapshot = Snapshot(buffers) if self._crew.survives else None
        if self._num_ranks == 1 and not self._can_grow:
            return Unwrapped(model)
        return self._reduced(model, optimizer if overlap else None, hooks, find_unused_parameters, options)

    def guard(
        self,
        every: int = 50,
        *,
        norm_factor: float = 10.0,
        range_factor: float = 10.0,
        heal: Healing = "majority",
        stop: bool = False,
    ) -> None:
        """Look out for silent corruption; called on all ranks alike, after `wrap` and before the first batch.

        - `every` so many steps, and before every save, all ranks compare digests of parameters, optimizer state and
          buffers. Who differs is named and gets the majority's; without one, or with `heal="verified"`, all go back to
          the newest version that was saved when they did not differ.
        - A step whose gradients are not finite, or whose norm is beyond `norm_factor` times the usual, is done again
          after such a check. If it is so again it is applied all the same, or stops the job (`stop`, not finite).
        - A parameter beyond `range_factor` times the largest that its tensor ever had is reported.
        """
        settings = GuardSettings(every=every, norm_factor=norm_factor, range_factor=range_factor, heal=heal, stop=stop)
        trained, passage = self._trained, self._passage
        if trained.model is None or passage.guarding is not None or self._arrival.has_yielded:
            raise UsageError("job.guard: expected once, after job.wrap and before the first batch")
        if self._engine.gradients is None:
            self._tell("unguarded", why="one rank: there is nobody to compare with")
            return
        if trained.snapshot is None:  # whatever is suspicious is done again, also where a lost rank ends the job
            trained.snapshot = Snapshot(list(trained.model.buffers()))
        if trained.optimizers.overlap is not None:
            trained.optimizers.overlap.make_undoable()
        passage.guarding = self._arrival.guarding = Guarding(settings, self._engine, trained.model, self._tell)
        self._tell("guard", **settings.to_json())

    def track(self, **things: Any) -> None:
        """What else a joiner and a rollback must bring along: schedulers, scalers, averages, counters.

        A gradient scaler that is tracked is used by `step`. What is tracked is copied at the beginning of every step.
        """
        if again := [name for name in things if name in self._trained.tracked]:
            raise UsageError(f"job.track({again[0]}=…): this name is taken")
        self._trained.tracked |= checked_tracked(things)

    def batches(self, loader: Any) -> Iterator[Any]:
        """This rank's batches of one epoch; the same ones again after a rollback, dealt anew after a loss.

        The loader's batch size is that of one rank. Each call is one epoch: on a joiner those that are over yield
        nothing.
        """
        call, self._calls = self._calls, self._calls + 1
        if id(loader) not in self._sources:  # one for each, so that persistent workers persist
            self._sources[id(loader)] = Source.of(loader)
        return self._passage.epoch(self._sources[id(loader)], call)

    def step(self, *optimizers: Optimizer) -> bool:
        """Apply the step, if all ranks have its gradients; False if it has to be done again, or a scaler skipped it."""
        if not optimizers:
            raise UsageError("job.step: expected the optimizer, or all of them")
        if not self._window:
            raise UsageError(
                "job.step: no batch since the last step. It is called once a step, inside of 'for … in "
                "job.batches(loader)'; give it all optimizers at once"
            )
        engine, passage, course = self._engine, self._passage, self._course
        self._trained.optimizers.meet(optimizers)
        if self._window.is_doomed:
            passage.roll_back()
            return False
        if engine.gradients is not None and self._window.reduced < len(self._window):
            passage.stop(UsageError(
                "job.step: the last backward has reduced no gradients. Either it ran under no_sync(), or the loss does "
                "not reach all parameters: job.wrap(model, find_unused_parameters=True)"
            ))  # fmt: skip
        if engine.gradients is None:  # alone: no backward pass ends in a point
            engine.pass_point(Point.STEP)
        self._site(Phase.OPTIMIZER)
        # By those whose gradients are in this step: the same for all, whenever each of them learnt of a loss.
        factor = len(engine.contributors()) / self._num_ranks if self._after_loss == "scale_lr" else 1.0
        was_applied = self._trained.optimizers.apply(self._trained.tracked, factor)
        engine.tries = 0
        if passage.guarding is not None:
            passage.guarding.applied()
        course.applied(len(self._window), sorted(engine.missing))
        passage.end_step()
        passage.is_save_due = self._saves is not None and self._saves.is_due(course.step)
        if engine.gradients is not None:
            engine.gradients.finish()
        self._progress.show(course, self._crew)
        if engine.broke_at is not None:
            self._tell("going on", step=course.step, generation=self.generation,
                       seconds=time.monotonic() - engine.broke_at)  # fmt: skip
            engine.broke_at = None
        return was_applied

    def close(self) -> None:
        """Leave the job. Done at exit by itself; twice is fine."""
        self._departure.close()
        try:
            self._let_go()
            is_member = not self._arrival.waits and self._crew.plan.rank_of(self._crew.uid) is not None
            if is_member:
                about = {"rank": self.rank, "uid": self._crew.uid, "generation": self.generation, "steps": self.applied}
                tell_weights(self._trained.model, self._tell, **about)
            if is_member and self._course.step:
                with suppress(RuntimeError):  # the store may be gone
                    self._progress.show(self._course, self._crew, at_once=True)
        finally:
            self._crew.close()

    def _reduced(
        self,
        model: nn.Module,
        overlapped: Optimizer | None,
        hooks: Sequence[Callable[[Hook], Hook]],
        find_unused_parameters: bool,
        options: dict[str, Any],
    ) -> Any:
        """The model among others: under a DDP whose gradients this job reduces, and the same on all ranks."""
        trained, window = self._trained, self._window
        around = Around(self._engine, lambda: (window.reduced, len(window)), self._site, self._passage.ended_backward)
        gradients = Gradients(
            model,
            around,
            keep=self._strategy == "forward",
            hooks=hooks,
            find_unused_parameters=find_unused_parameters,
            **options,
        )
        self._engine.gradients = gradients
        if overlapped is not None:
            gradients.overlap = Overlap(overlapped, gradients.parameters, undoable=self._crew.survives)
            trained.optimizers.meet((overlapped,))
            trained.optimizers.overlap = gradients.overlap
        self._sites.watch(gradients.module, self._site)
        self._sites.expose(trained.live)
        if not self._arrival.waits and self._crew.plan.generation == 0:
            try:
                gradients.broadcast(self._crew.group(), 0)
            except GroupBroken as error:
                self._passage.stop(UsageError(f"a rank was lost before training began ({error}): start the job again"))
        return gradients.module

    def _let_go(self) -> None:
        """Of loaders and their workers."""
        self._course.leave()
        for source in self._sources.values():
            source.close()

    def _asked_to_leave(self, number: int) -> None:
        """By a signal: leave before the next step, or at once where there is none to come, or if asked again."""
        if self._engine.leaving or not self._passage.is_iterating:
            sys.exit(128 + number)
        self._engine.leaving = True
        self._tell("asked to leave", rank=self.rank, step=self._course.step)

    def _site(self, phase: Phase, bucket: int | None = None, at: Any = None) -> None:
        if self._sites.is_armed(self._course.step):
            self._sites.reach(phase, self._course.step, self._crew, bucket, at)
