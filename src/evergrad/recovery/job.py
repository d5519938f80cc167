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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.recovery.bootstrap import Bootstrap
from evergrad.recovery.data_position import DataPosition, StepBatches
from evergrad.recovery.dataloader_adapter import BatchSource, SamplerRanks
from evergrad.recovery.elastic_sampler import BatchMode
from evergrad.recovery.failures.injector import FailureSites
from evergrad.recovery.failures.schedule import Phase
from evergrad.recovery.fingerprints import compare_ranks, record_weights
from evergrad.recovery.gradients import BucketLayout, CommHook, GradientReducer
from evergrad.recovery.guard.guard import JobGuard
from evergrad.recovery.guard.replicas import GuardSettings, Healing
from evergrad.recovery.job_checkpoints import JobCheckpoints
from evergrad.recovery.local_state import LocalState, Snapshot, checked_tracked
from evergrad.recovery.loop import ProgressReporter, TrainingLoop
from evergrad.recovery.membership import Fingerprint, PointKind, StoreKeys
from evergrad.recovery.optimizer_overlap import OptimizerOverlap, refuse_overlap
from evergrad.recovery.process_group import Group, GroupBroken
from evergrad.recovery.rank_state import RankState
from evergrad.recovery.step_barrier import StepBarrier
from evergrad.recovery.traceback_log import keep_in_log
from evergrad.recovery.untracked_state import KeptGradients, UntrackedState
from evergrad.recovery.usage_checks import (
    EpochBatches,
    OptimizerCalls,
    refuse_model,
    refuse_no_optimizers,
    refuse_options,
    refuse_parameters,
    refuse_unrelated_optimizers,
    refuse_untracked_scaler,
    refuse_without_gradients,
    refusing_wrong_arguments,
    unreduced,
    used_scalers,
)
from evergrad.recovery.worker import ElasticWorker, SigtermHandler, Worker
from evergrad.wording import count_of, first_line, short_repr

# What a wrapped model is, alone and among others, and what the reduction of its gradients sees of the job.


class JobReductionContext:
    """The job, as `GradientReducer` sees it."""

    def __init__(
        self,
        barrier: StepBarrier,
        step_batches: StepBatches,
        site: Callable[..., None],
        ended: Callable[[], None],
    ) -> None:
        self._barrier, self._step_batches, self._site, self._ended = barrier, step_batches, site, ended
        self._weight: tuple[object, float] = (None, 1.0)

    def group(self) -> Group:
        """The group of the present generation."""
        return self._barrier.worker.group()

    def weight(self) -> float:
        """By samples, of all batches since the last reduction."""
        position, among = self._barrier.position, self._barrier.contributors()
        reduced, count = self._step_batches.reduced, len(self._step_batches)
        first, stop = position.index + min(reduced, count - 1), position.index + count
        key = (first, stop, position.epoch, position.rank, tuple(among))
        if self._weight[0] != key:
            self._weight = key, position.weight(range(first, stop), among)
        return self._weight[1]

    def passes(self) -> int:
        """How many passes the job has brought to their end."""
        return self._barrier.position.passes

    @property
    def layout(self) -> BucketLayout | None:
        """What all ranks have agreed on."""
        return self._barrier.position.layout

    @layout.setter
    def layout(self, layout: BucketLayout | None) -> None:
        self._barrier.position.layout = layout

    def root(self) -> int:
        """A rank that was there from the beginning."""
        return self._barrier.root

    def misuse(self) -> str:
        """A backward pass belongs to a batch of the job; a step of any other could not be done again."""
        if self._step_batches.forwarded < len(self._step_batches):
            return (
                "a batch was fetched between the forward pass and job.step: the job takes it for one of this step, so "
                "a step that is done again would begin with it. Fetch the next batch after job.step; to fetch ahead, "
                "use the workers of a DataLoader"
            )
        if self._step_batches:
            return ""
        return (
            "backward through the model of job.wrap without a batch of job.batches: the job cannot weigh its "
            "gradients, or do the step again when a rank is lost. Take batches from the job, one job.step for each: "
            "for batch in job.batches(loader). For a pass that is no part of the training use model.module"
        )

    def shares_buffers(self) -> bool:
        """Only in a step that every rank makes alike."""
        return len(self._step_batches) > 0 and not self._barrier.is_repairing

    def reach_site(self, bucket: int, at: str) -> None:
        """A place where a failure may be scheduled."""
        self._site(Phase.BACKWARD, bucket, at)

    def backward_ended(self) -> None:
        """The pass is over."""
        self._ended()


class SingleRankDDP(DistributedDataParallel):
    """A wrapped model without other ranks: a DDP to scripts that ask, which reduces nothing."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # not DDP's, which needs a process group
        self.module = module
        self.device = next(module.parameters()).device
        self.device_ids = self.output_device = self.process_group = None  # type: ignore[assignment]
        self.dim = 0
        self.broadcast_buffers = self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters = self.gradient_as_bucket_view = self.static_graph = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives."""
        return self.module(*inputs, **named)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refused, as among others: `job.wrap` takes hooks."""
        raise UsageError("register_comm_hook: expected hooks in job.wrap(model, hooks=[…]), which wrap its all-reduce")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]


@contextmanager
def _stopping(job: Job, *_: object) -> Iterator[None]:
    with job._stopping():
        yield


class Job:
    """One process's part in a job that goes on when others are lost. `eg.join()` makes it.

    All ranks make the same calls in the same order. Not for several threads at once.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        strategy: str,
        batch_policy: BatchMode,
        num_ranks: int,
        is_spare: bool,
        keeps: bool,
        checkpoints: JobCheckpoints | None,
        sites: FailureSites,
        tell: Callable[..., None],
        seed: int = 0,
        can_grow: bool = False,
    ) -> None:
        self._worker, self._strategy, self._batch_policy, self._num_ranks = worker, strategy, batch_policy, num_ranks
        self._checkpoints, self._sites, self._record_event, self._can_grow = checkpoints, sites, tell, can_grow
        self._position = DataPosition(num_ranks, batch_policy)
        self._barrier = StepBarrier(
            worker,
            tell,
            keeps_neighbour_state=keeps and worker.survives,
            position=self._position,
            reach_site=self._reach_site,
        )
        if isinstance(worker, ElasticWorker):
            worker.reported = lambda: self._reach_site(Phase.AGREEMENT)
            worker.read_position = lambda: (self._position.epoch, self._position.point, self._position.step)
        self._rank_state, self._step_batches, self._progress = RankState(), StepBatches(), ProgressReporter()
        self._sigterm = SigtermHandler(self._on_sigterm)
        self._bootstrap = Bootstrap(
            self._barrier,
            self._rank_state,
            self._step_batches,
            checkpoints,
            self._sigterm,
            tell,
            is_spare,
            seed,
            self._close_loaders,
        )
        self._untracked = UntrackedState(self._barrier.note_unverified)
        self._kept_gradients = KeptGradients(self._barrier.note_unverified)
        self._loop = TrainingLoop(
            self._barrier, self._bootstrap, self._rank_state, self._step_batches, checkpoints, self._progress,
            self._reach_site, tell,
            self._untracked, self._kept_gradients, joining=is_spare or checkpoints is not None,
        )  # fmt: skip
        self._optimizer_calls = OptimizerCalls(self._stepped_directly)
        self._sampler_ranks = SamplerRanks(lambda: (max(self.rank, 0), self.world_size))
        self._has_said_size = False
        self._batch_index = -1
        self._calls = self._begun = 0
        self._sources: dict[int, BatchSource] = {}
        self._earlier_scalers: list[Any] = []

    @property
    def rank(self) -> int:
        """This process's number in the present generation; -1 for a spare that has not been called."""
        return -1 if self._bootstrap.is_waiting else self._worker.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are in the present generation."""
        return self._num_ranks if self._bootstrap.is_waiting else self._worker.world_size

    @property
    def generation(self) -> int:
        """How often the membership has changed; -1 for a spare that has not been called."""
        return -1 if self._bootstrap.is_waiting else self._worker.plan.generation

    @property
    def applied(self) -> int:
        """How many steps the job has applied."""
        self._untracked.has_read_step = True
        return self._position.step

    @property
    def joining(self) -> bool:
        """True until the epoch that the job is in: what comes between epochs (validation) can be left out meanwhile."""
        return self._loop.joining

    @property
    def idle(self) -> bool:
        """Whether the present batch counts for nothing: in a ragged step there were too few samples for all ranks.

        The rank runs somebody else's samples so as to take part; leave them out of metrics.
        """
        return self._position.is_idle(self._position.index + len(self._step_batches) - 1)

    @property
    def batch_index(self) -> int:
        """The number of the present batch in its epoch, from 0; the same again when a step is done again."""
        self._untracked.has_read_step = True
        return self._batch_index

    @property
    def is_last_batch(self) -> bool:
        """Whether the present batch is the last of its epoch, as it is dealt now: time to step, accumulated or not."""
        deal = self._position.deal
        return deal is not None and self._position.index + len(self._step_batches) >= deal.num_batches

    @refusing_wrong_arguments("job.wrap", _stopping)
    def wrap(
        self,
        model: nn.Module,
        *,
        hooks: Sequence[Callable[[CommHook], CommHook]] = (),
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
        rank_state = self._rank_state
        with self._stopping():
            if rank_state.model is not None:
                raise UsageError(
                    "job.wrap: a model is wrapped already. Put several into one module whose forward runs them"
                )
            refuse_model(model)
            refuse_options(hooks, options)
            if overlap:
                refuse_overlap(optimizer, batch_policy=self._batch_policy, tracked=rank_state.tracked,
                               find_unused_parameters=find_unused_parameters)  # fmt: skip
            elif optimizer is not None:
                raise UsageError("job.wrap(optimizer=…): that is for overlap=True; else job.step alone is given it")
        rank_state.model = model
        self._earlier_scalers = used_scalers()
        self._optimizer_calls.know(model, optimizer)
        buffers = list(model.buffers())
        self._barrier.local_state = LocalState(buffers)
        if self._barrier.keeps_neighbour_state:
            self._barrier.local_state.watch(model)
        rank_state.snapshot = Snapshot(buffers) if self._worker.survives else None
        self._kept_gradients.watch([each for each in model.parameters() if each.requires_grad])
        if self._num_ranks == 1 and not self._can_grow:
            return SingleRankDDP(model)
        return self._reduced(model, optimizer if overlap else None, hooks, find_unused_parameters, options)

    @refusing_wrong_arguments("job.guard", _stopping)
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
        rank_state, passage = self._rank_state, self._loop
        with self._stopping():
            settings = GuardSettings(
                every=every, norm_factor=norm_factor, range_factor=range_factor, heal=heal, stop=stop
            )
            if rank_state.model is None or passage.guard is not None or self._bootstrap.has_yielded:
                raise UsageError("job.guard: expected once, after job.wrap and before the first batch")
        if self._barrier.gradients is None:
            self._record_event("guard_unavailable", reason="one rank: there is nobody to compare with")
            return
        if rank_state.snapshot is None:  # whatever is suspicious is done again, also where a lost rank ends the job
            rank_state.snapshot = Snapshot(list(rank_state.model.buffers()))
        if rank_state.optimizers.overlap is not None:
            rank_state.optimizers.overlap.make_undoable()
        passage.guard = self._bootstrap.guard = JobGuard(settings, self._barrier, rank_state.model, self._record_event)
        self._record_event("guard_enabled", **settings.to_json())

    @refusing_wrong_arguments("job.track", _stopping, "job.track(scheduler=scheduler): each thing by a name")
    def track(self, **things: Any) -> None:
        """What else a joiner and a rollback must bring along: schedulers, scalers, averages, counters.

        A gradient scaler that is tracked is used by `step`. What is tracked is copied at the beginning of every step.
        """
        with self._stopping():
            if again := [name for name in things if name in self._rank_state.tracked]:
                raise UsageError(f"job.track({again[0]}=…): this name is taken")
            self._rank_state.tracked |= checked_tracked(things)

    @refusing_wrong_arguments("job.batches", _stopping)
    def batches(self, loader: Any) -> Iterator[Any]:
        """This rank's batches of one epoch; the same ones again after a rollback, dealt anew after a loss.

        The loader's batch size is that of one rank. Each call is one epoch, whose batches can be iterated once: on a
        joiner those that are over yield nothing.
        """
        call, self._calls = self._calls, self._calls + 1
        with self._stopping():
            if id(loader) not in self._sources:  # one for each, so that persistent workers persist
                self._sources[id(loader)] = BatchSource.of(loader)
            self._optimizer_calls.refuse_direct("outside of job.batches")
        return EpochBatches(self._epoch(self._loop.epoch(self._sources[id(loader)], call)), self._stopping)

    @refusing_wrong_arguments("job.step", _stopping, "job.step(optimizer)")
    def step(self, *optimizers: Optimizer) -> bool:
        """Apply the step, if all ranks have its gradients; False if it has to be done again, or a scaler skipped it."""
        barrier, passage, position = self._barrier, self._loop, self._position
        with self._stopping():
            self._check_step(optimizers)
            self._rank_state.optimizers.adopt(optimizers)
        if self._step_batches.must_redo:
            passage.roll_back()
            return False
        if barrier.gradients is not None and self._step_batches.reduced < len(self._step_batches):
            passage.stop_job(unreduced(barrier.gradients.module))
        if barrier.gradients is None:  # alone: no backward pass ends in a point
            with self._stopping():
                refuse_without_gradients(optimizers)
            barrier.pass_point(PointKind.STEP)
        known = self._rank_state.optimizers.known
        self._untracked.before_step(position.step, position.epoch, position.opening, known, self._rank_state.tracked)
        self._reach_site(Phase.OPTIMIZER)
        # By those whose gradients are in this step: the same for all, whenever each of them learnt of a loss.
        factor = len(barrier.contributors()) / self._num_ranks if self._batch_policy == "scale_lr" else 1.0
        self._optimizer_calls.by_job = True
        try:
            was_applied = self._rank_state.optimizers.apply(self._rank_state.tracked, factor)
        finally:
            self._optimizer_calls.by_job = False
        barrier.tries = 0
        if passage.guard is not None:
            passage.guard.applied()
        position.applied(len(self._step_batches), sorted(barrier.missing))
        self._untracked.after_step(known)
        assert self._rank_state.model is not None
        self._kept_gradients.applied(self._rank_state.model.parameters())
        self._rank_state.drop_copy()
        passage.end_step()
        passage.is_save_due = self._is_save_due()
        if barrier.gradients is not None:
            barrier.gradients.finish()
        self._progress.report(position, self._worker)
        self._say_if_it_cannot_grow()
        if barrier.broke_at is not None:
            self._record_event("recovered", step=position.step, generation=self.generation,
                       seconds=time.monotonic() - barrier.broke_at)  # fmt: skip
            barrier.broke_at = None
        return was_applied

    @refusing_wrong_arguments("job.close", _stopping)
    def close(self) -> None:
        """Leave the job. Done at exit by itself; twice is fine."""
        self._sigterm.close()
        self._optimizer_calls.close()
        self._sampler_ranks.close()
        try:
            self._close_loaders()
            is_member = not self._bootstrap.is_waiting and self._worker.plan.rank_of(self._worker.uid) is not None
            if is_member:
                about = {
                    "rank": self.rank,
                    "uid": self._worker.uid,
                    "generation": self.generation,
                    "steps": self.applied,
                }
                record_weights(self._rank_state.model, self._record_event, **about)
                self._loop.publish_fingerprint()
                with suppress(RuntimeError):
                    self._untracked.end()
                    if doubt := self._barrier.doubt_of_draws():
                        self._barrier.note_unverified(doubt)
            if is_member and self._position.step:
                with suppress(RuntimeError):  # the store may be gone
                    self._progress.report(self._position, self._worker, at_once=True)
            elif is_member and self._is_among_others and not self._barrier.is_stopped:
                self._tell_misuse()
        finally:
            self._worker.close()

    @property
    def _is_among_others(self) -> bool:
        """True if there are, or may be, other ranks."""
        return self._num_ranks > 1 or self._can_grow

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """A mistake of the script in here ends the whole job: every rank makes it, also after a restart."""
        try:
            yield
        except UsageError as error:
            if not self._bootstrap.is_waiting:
                self._barrier.stop_job(error)
            elif isinstance(self._worker, ElasticWorker):  # the ranks may not make it
                keep_in_log(error, is_said=False)
            raise

    def _check_step(self, optimizers: tuple[Optimizer, ...]) -> None:
        """`UsageError` if a step that is made now would not be one of the job."""
        refuse_no_optimizers(optimizers)
        if self._rank_state.model is None:
            raise UsageError(
                "job.step: no model was given to job.wrap, so no gradients are reduced, and each rank would train a "
                "model of its own. Call model = job.wrap(model) before the loop, and compute the loss by that model"
            )
        if not self._calls:
            raise UsageError(
                "job.step: no batch since the last step, and job.batches was never called. Take batches from the job: "
                "for batch in job.batches(loader)"
            )
        if not self._step_batches:
            raise UsageError(
                "job.step: no batch since the last step. It is called once a step, inside of 'for … in "
                "job.batches(loader)'; give it all optimizers at once"
            )
        if not self._position.step:
            refuse_untracked_scaler(optimizers, self._rank_state.tracked, self._earlier_scalers)
        if not self._position.index:  # once an epoch: some may be unfrozen there
            refuse_unrelated_optimizers(optimizers, self._rank_state.model)
            if self._barrier.gradients is not None:
                refuse_parameters(optimizers, self._barrier.gradients.parameters)

    def _is_save_due(self) -> bool:
        """Decide to save before the next step: after `every` steps, or when the checkpointer's policy wants it."""
        if self._checkpoints is None:
            return False
        # Ranks that had to recover after this step's point are in another generation: nobody can be asked, or saves.
        agrees = self._barrier.passed_in == self._worker.plan.generation
        try:
            return self._checkpoints.is_due(self._position.step, self._largest if agrees else None)
        except GroupBroken:  # the next point will find the same
            return False

    def _largest(self, numbers: list[float]) -> list[float]:
        """The largest over all ranks, number by number."""
        told = torch.tensor(numbers, dtype=torch.float64)
        self._worker.group().all_reduce(told, "max").wait()
        return [float(number) for number in told]

    def _say_if_it_cannot_grow(self) -> None:
        """Once: a spare waits, and only the loader of each rank knows which data it has not read."""
        loader = self._barrier.local_state.loader
        if self._has_said_size or loader is None or not self._worker.is_change_requested:
            return
        self._has_said_size = True
        if self.rank == 0:
            kind, ranks = type(loader).__qualname__, count_of(self.world_size, "rank")
            why = (
                f"a spare waits to join, and cannot: {kind} keeps its own place in the data, so the job cannot give a "
                f"new rank a share of it. It stays at {ranks}; a spare still takes a dead rank's place. To grow, use a "
                "DataLoader over a map-style dataset"
            )
            self._record_event("cannot_grow", reason=why)
            print(f"evergrad: {why}", file=sys.stderr)

    def _stepped_directly(self) -> None:
        """An optimizer is about to change the wrapped model, and not by `job.step`."""
        if self._loop.is_iterating:
            with self._stopping():
                self._optimizer_calls.refuse_direct("inside of job.batches")

    def _epoch(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """One epoch for the script; whether it made its steps by the job is known at the end."""
        calls = self._optimizer_calls
        calls.others = 0
        if self._rank_state.model is None:
            self._refuse_part_wrapped(wraps=False)
        self._begun += 1
        with self._stopping(), closing(cast("Generator[Any, None, None]", batches)):
            for batch in batches:
                self._batch_index = self._position.index + len(self._step_batches) - 1
                yield batch
        if self._is_among_others and not self._position.step and self._rank_state.model is None:
            with self._stopping():
                calls.refuse_epoch()

    def _refuse_part_wrapped(self, *, wraps: bool) -> None:
        """`UsageError` if one rank calls `job.wrap` before an epoch that another one begins without it.

        Each would wait for the other one in another collective. Each says what it does, and then looks for the others:
        so whoever is later finds it.
        """
        worker, epoch = self._worker, self._begun
        if (
            not isinstance(worker, ElasticWorker)
            or self._bootstrap.is_waiting
            or worker.plan.generation
            or worker.world_size == 1
        ):
            return
        mine, theirs = (StoreKeys.wrapped, StoreKeys.unwrapped) if wraps else (StoreKeys.unwrapped, StoreKeys.wrapped)
        worker.client.set(mine(epoch), str(self.rank))
        if (other := worker.client.find(theirs(epoch))) is not None:
            with_it, without = (self.rank, int(other)) if wraps else (int(other), self.rank)
            with self._stopping():
                raise UsageError(
                    f"job.wrap: rank {with_it} has called it, and rank {without} has begun job.batches without it: "
                    "they would wait for each other. Call model = job.wrap(model) on every rank, before the loop"
                )

    def _tell_misuse(self) -> None:
        """The script has come to its end without a step of the job: say so if optimizers were stepped all the same."""
        if why := self._optimizer_calls.unused(self._rank_state.model is not None):
            if isinstance(self._worker, ElasticWorker):  # whose launcher says it
                with suppress(RuntimeError):
                    self._worker.client.set(StoreKeys.misuse, f"rank {self.rank}: {why}")
            else:
                print(f"evergrad: rank {self.rank}: {why}", file=sys.stderr)

    def _reduced(
        self,
        model: nn.Module,
        overlapped: Optimizer | None,
        hooks: Sequence[Callable[[CommHook], CommHook]],
        find_unused_parameters: bool,
        options: dict[str, Any],
    ) -> Any:
        """The model among others: under a DDP whose gradients this job reduces, and the same on all ranks."""
        rank_state, step_batches = self._rank_state, self._step_batches
        around = JobReductionContext(self._barrier, step_batches, self._reach_site, self._loop.ended_backward)
        try:
            gradients = GradientReducer(
                model,
                around,
                keep=self._strategy == "forward",
                hooks=hooks,
                find_unused_parameters=find_unused_parameters,
                **options,
            )
        except (TypeError, ValueError) as error:
            if not options:
                raise
            given = ", ".join(f"{name}={short_repr(value)}" for name, value in options.items())
            self._loop.stop_job(
                UsageError(f"job.wrap({given}): DistributedDataParallel refuses that: {first_line(error)}")
            )
        self._barrier.gradients = gradients
        gradients.module.register_forward_pre_hook(step_batches.note_forward)
        if overlapped is not None:
            gradients.overlap = OptimizerOverlap(overlapped, gradients.parameters, undoable=self._worker.survives)
            rank_state.optimizers.adopt((overlapped,))
            rank_state.optimizers.overlap = gradients.overlap
        self._sites.watch(gradients.module, self._reach_site, lambda: bool(step_batches))
        self._sites.set_state(rank_state.live_tensors, self._barrier.note_inexact)
        if not self._bootstrap.is_waiting and self._worker.plan.generation == 0:
            self._refuse_part_wrapped(wraps=True)
            try:
                self._refuse_other_models(model)
                gradients.broadcast(self._worker.group(), 0)
            except GroupBroken as error:
                self._loop.stop_job(UsageError(
                    f"a rank was lost before training began ({error}): start the job again. If that repeats it, see "
                    "that every rank calls job.wrap"
                ))  # fmt: skip
        return gradients.module

    def _refuse_other_models(self, model: nn.Module) -> None:
        """`UsageError` if ranks have built different models, before anything is exchanged by their shapes."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        mine = {
            f"model/{name}": f"no. {number}, {str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
            for number, (name, each) in enumerate(tensors, 1)
        }
        _, difference = compare_ranks(self._worker.group(), Fingerprint(0, mine, {}))
        if difference:
            self._loop.stop_job(UsageError(
                f"job.wrap: ranks have built different models: {difference}. Build the same model on every rank"
            ))  # fmt: skip

    def _close_loaders(self) -> None:
        """Of loaders and their workers."""
        self._position.close_loader()
        for source in self._sources.values():
            source.close()

    def _on_sigterm(self, number: int) -> None:
        """By a signal: leave before the next step, or at once where there is none to come, or if asked again."""
        if self._barrier.is_stopped:  # it ends already, by an error that it must not be kept from
            return
        if self._barrier.leave_requested or not self._loop.is_iterating:
            sys.exit(128 + number)
        self._barrier.leave_requested = True
        self._record_event("leave_requested", rank=self.rank, step=self._position.step)

    def _reach_site(self, phase: Phase, bucket: int | None = None, at: Any = None) -> None:
        if self._sites.is_armed(self._position.step):
            self._sites.reach(phase, self._position.step, bucket, at)
