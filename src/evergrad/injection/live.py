"""Soft errors in a running training: at a step, on some ranks, in what is in use there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from weakref import WeakSet

from evergrad.errors import EvergradError, UsageError
from evergrad.injection.faults import Fault
from evergrad.injection.injector import Selection, checked_seed, dtypes_of, items_of, selection_to_json
from evergrad.injection.live_faults import DrawnFaults, LiveFaults, ReplayedFaults, derived_seed
from evergrad.injection.live_targets import (
    ActivationTarget,
    GradientTarget,
    LiveTarget,
    StateTarget,
    TransientTarget,
    is_wrapped,
    unwrap_model,
)
from evergrad.injection.log import InjectionLog
from evergrad.injection.sampling import Amount, Sampling, checked_sampling
from evergrad.records import Json, Role, TensorInfo
from evergrad.state import Where
from evergrad.wording import checked_choice, short_repr

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


# When live faults happen: steps are counted, and every hook comes off as soon as all is done.
#
# Steps are counted by the optimizer, one call a step, or told by a clock, which is asked before each forward pass.
# The model is hooked in the step itself only, and where sizes have to be seen in the one before it.


class LiveInjection:
    """Faults that are scheduled in a running training, or that have happened in it.

    A fault happens once, also if its step is done again. As a context manager it removes at its end what has not
    happened by then; that is an error if the step has gone by.
    """

    def __init__(self, schedule: LiveSchedule | None = None) -> None:
        """None where nothing is to happen: on another rank."""
        self._schedule = schedule

    @property
    def done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._schedule is None or self._schedule.is_done

    @property
    def log(self) -> InjectionLog | None:
        """What has happened on this rank; None if nothing has."""
        return None if self._schedule is None else self._schedule.log

    def remove(self) -> None:
        """Take off every hook; what has not happened will not. Twice is fine."""
        if self._schedule is not None:
            self._schedule.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and self._schedule is not None:
                self._schedule.check_missed()
        finally:
            self.remove()

    def __repr__(self) -> str:
        faults = 0 if self.log is None else self.log.injected
        state = "done" if self.done else "waiting" if self._schedule and self._schedule.is_open else "removed"
        return f"<LiveInjection: {state}, {faults} faults>"


class LiveSchedule:
    """One target, its step, and the hooks that tell when that is."""

    def __init__(
        self,
        target: LiveTarget,
        model: nn.Module,
        step: int,
        *,
        now: int,
        clock: Callable[[], int] | None,
        settings: Mapping[str, Json],
    ) -> None:
        self.is_open, self.is_done = True, False
        self.log: InjectionLog | None = None
        self._target, self._model, self._step, self._settings = target, model, step, settings
        # Sizes are seen in the step before.
        self._first = step - 1 if target.needs_previous_step and target.faults.needs_sizes else step
        self._current_step, self._clock = now, clock
        self._is_hooked = False
        self._handles: list[Any] = []
        target.on_done, target.on_error = self._end, self.close

    def start(self, optimizer: Optimizer | None) -> None:
        """Hook what has to be hooked; what can happen at once does."""
        if self._clock is None and optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(self._after_optimizer_step))
        if self._clock is not None or self._current_step >= self._first:
            self._hook_forward()
        if self._current_step == self._step:
            self._target.inject()
        elif self._current_step == self._first:
            self._target.observe_previous_step()

    def check_missed(self) -> None:
        """Raise what there is to be said if the step has gone by."""
        present = self._current_step if self._clock is None else self._clock()
        if self.is_open and present > self._step:
            self.close()
            raise self._target.missed_error(self._step)

    def close(self) -> None:
        """Take off every hook; twice is fine."""
        if self.is_open:
            self.is_open = False
            happened = self._target.injected
            if self.log is None and happened is not None and happened.plans:  # some of them, before it was over
                self.log = self._target.faults.log(happened, self._settings)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        self._target.close()

    def _end(self) -> None:
        """Everything has happened."""
        assert self._target.injected is not None
        self.log = self._target.faults.log(self._target.injected, self._settings)
        self.is_done = True
        self.close()

    def _hook_forward(self) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            self._handles.append(self._model.register_forward_pre_hook(self._before_pass))

    def _after_optimizer_step(self, *_: object) -> None:
        """The optimizer has made a step."""
        self._current_step += 1
        if self._current_step >= self._first and self.is_open:
            self.check_missed()
            self._hook_forward()

    def _before_pass(self, model: nn.Module, _: object) -> None:
        if not self.is_open or not model.training:
            return
        self.check_missed()
        present = self._current_step if self._clock is None else self._clock()
        if present == self._step:
            self._target.inject()
        elif present == self._first:
            self._target.observe_previous_step()


# Which ranks live faults happen on, and where they would be erased at once.
#
# DDP's constructor gives rank 0's parameters and buffers to all ranks, and each forward pass begins with rank 0's
# buffers for all: what was hit on another rank before that is gone, and a study would have measured nothing.


@dataclass(frozen=True)
class FaultyRanks:
    """The ranks that are hit, None for all; and this process among them."""

    chosen: tuple[int, ...] | None
    own: int
    world: int | None
    """How many there are; None if nobody has said."""

    @classmethod
    def of(cls, chosen: Sequence[int] | None, own: int | None) -> FaultyRanks:
        """Checked; a process that is told nothing asks torch.distributed, and is rank 0 of one without it."""
        from torch import distributed

        joined = distributed.is_available() and distributed.is_initialized()
        world = distributed.get_world_size() if joined else 1 if own is None else None
        if own is None:
            own = distributed.get_rank() if joined else 0
        elif not _is_rank(own):
            raise UsageError(f"rank: expected this process's rank, from 0 on, found {short_repr(own)}")
        if chosen is None:
            return cls(None, own, world)
        if not isinstance(chosen, (list, tuple, range, set, frozenset)) or not chosen:
            raise UsageError(f"ranks: expected a list of ranks such as [1], found {short_repr(chosen)}")
        for rank in chosen:
            if not _is_rank(rank):
                raise UsageError(f"ranks: expected ranks from 0 on, found {short_repr(rank)}")
            if world is not None and rank >= world:
                there = "this process is the only one" if world == 1 else f"there are 0 to {world - 1}"
                raise UsageError(f"ranks: rank {rank} is not there: {there}")
        return cls(tuple(dict.fromkeys(chosen)), own, world)

    @property
    def is_hit(self) -> bool:
        """Whether anything happens in this process."""
        return self.chosen is None or self.own in self.chosen

    def seed(self, seed: int) -> int:
        """Each rank's draws are its own. One rank alone has those of a file, and so have all where none are named."""
        return seed if self.chosen is None or len(self.chosen) == 1 else derived_seed(seed, "rank", self.own)

    def refuse_erased(self, model: nn.Module, *, is_state: bool, bare: bool) -> None:
        """Refuse what wrapping the model would erase."""
        if not is_state or bare or is_wrapped(model) or not self._others():
            return
        raise UsageError(
            f"rank {self._others()[0]}: the model is not wrapped yet, and DDP's constructor gives rank 0's parameters "
            "and buffers to every rank: the fault would be erased. Wrap it first (bare=True if it never will be)."
        )

    def refuse_shared(self, model: nn.Module, hit: Sequence[TensorInfo]) -> None:
        """Refuse buffers that the next forward pass replaces by rank 0's."""
        if not is_wrapped(model) or not getattr(model, "broadcast_buffers", False) or not self._others():
            return
        buffers = [info.name for info in hit if info.role is Role.BUFFER]
        if buffers:
            raise UsageError(
                f"rank {self._others()[0]}: {buffers[0]} is a buffer, and DDP gives rank 0's buffers to every rank "
                "before each forward pass: the fault would be erased. Hit rank 0, or select other tensors."
            )

    def _others(self) -> list[int]:
        """The ranks that are hit, but for rank 0."""
        if self.chosen is not None:
            return [rank for rank in self.chosen if rank]
        return [self.own or 1] if self.own or (self.world or 1) > 1 else []


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 0


# Faults in what ranks send each other: buckets of gradients, on their way through DDP's comm hook.
#
# DDP takes one comm hook, and cannot let go of it. So faults do not register their own: `comm_faults` wraps whichever
# hook there is, for good, and does nothing as long as nothing is scheduled. Only a DDP without a hook is given one,
# which reduces as DDP itself does, to the last bit.

Hook: TypeAlias = "Callable[[Any, Any], torch.futures.Future[torch.Tensor]]"

_scheduled: WeakSet[BucketTarget] = WeakSet()
"""Held by the hooks of the models and optimizers that they are for."""


def comm_faults(hook: Hook) -> Hook:
    """A comm hook of DDP around another one, through which faults reach what this rank sends and receives.

    For `model.register_comm_hook(state, eg.comm_faults(hook))` and `job.wrap(model, hooks=[eg.comm_faults])`. What
    happens, and when, `eg.inject_live(…, target="communication")` says; until then it hands every bucket on.
    """

    # No annotations: torch takes none but its own classes, and those not as texts.
    def pass_on(state, bucket):  # type: ignore[no-untyped-def]
        if not _scheduled:
            return hook(state, bucket)
        first = id(bucket.parameters()[0])
        mine = [target for target in list(_scheduled) if first in target.parameters]
        for target in mine:
            if not target.received:
                target.on_bucket(bucket.index(), bucket.buffer())
        future = hook(state, bucket)
        for target in mine:
            if target.received:
                future = future.then(target.on_reduced(bucket.index()))
        return future

    return pass_on


class BucketTarget(TransientTarget):
    """The gradients in a bucket: what this rank sends, or what it receives."""

    what = "communication"

    def __init__(self, order: LiveFaults, model: nn.Module, *, received: bool) -> None:
        super().__init__(order)
        self.received = received
        self.parameters = frozenset(id(parameter) for parameter in unwrap_model(model).parameters())
        self._model = model
        self._error: EvergradError | None = None

    def check(self, *, now: bool) -> list[TensorInfo]:
        """Only ranks that are joined send anything."""
        from torch.nn.parallel import DistributedDataParallel

        if not isinstance(self._model, DistributedDataParallel):
            raise UsageError(
                f"communication: a {type(self._model).__name__} sends nothing to other ranks. Give the model as "
                "DistributedDataParallel or job.wrap has wrapped it, on two ranks or more."
            )
        return super().check(now=now)

    def observe_previous_step(self) -> None:
        """Let buckets come by."""
        if self not in _scheduled:
            _scheduled.add(self)
            self._register()

    def missed_error(self, step: int) -> UsageError:
        """A layout that has changed, another comm hook, or an error that could not be raised within it."""
        if self._error is not None:
            return UsageError(f"communication: step {step}: {self._error}")
        if self._shares is None:
            return self.unseen_error()
        names = ", ".join(name.removeprefix("communication/") for name in list(self.not_injected)[:3])
        return UsageError(
            f"step {step} has gone by, and faults found no place: {names} did not pass by. DDP lays its buckets out "
            "anew after its first pass: choose a later step."
        )

    def unseen_error(self) -> UsageError:
        """Our hook is not among those of this model."""
        return UsageError(
            "communication: no bucket passed by. This model has a comm hook of its own: register it as "
            "model.register_comm_hook(state, eg.comm_faults(hook)), or under a job as "
            "job.wrap(model, hooks=[eg.comm_faults])."
        )

    def close(self) -> None:
        """DDP keeps the hook; it does nothing from now on."""
        super().close()
        _scheduled.discard(self)

    def on_bucket(self, index: int, buffer: torch.Tensor) -> None:
        """A bucket comes by. An exception here would wedge DDP: it waits until the step is over."""
        name = f"communication/bucket-{index}"
        try:
            seen = self._seen.get(name)
            if (
                self.not_injected.get(name)
                and self.faults.needs_sizes
                and seen is not None
                and seen[1] != tuple(buffer.shape)
            ):
                raise UsageError(
                    f"{name} has {buffer.numel():,} elements, and {seen[1][0]:,} in the step before: DDP has laid its "
                    "buckets out anew, as it does after its first pass. Choose a later step."
                )
            self.on_tensor(name, buffer)
        except EvergradError as error:
            self._error = self._error or error

    def on_reduced(self, index: int) -> Callable[[Any], Any]:
        """What is to be done once a bucket is reduced."""

        def receive(future: Any) -> Any:
            found = future.value()
            self.on_bucket(index, found[0] if isinstance(found, (list, tuple)) else found)
            return found

        return receive

    def _register(self) -> None:
        """A DDP without any comm hook gets ours around a reduction like its own."""
        found: Any = self._model
        if found._comm_hooks:
            return
        found.register_comm_hook(found.process_group, comm_faults(_reduce))


def _reduce(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks, as DDP computes it without a hook: torch's own hook divides, which differs by a bit."""
    from torch import distributed

    buffer = bucket.buffer()
    buffer.mul_(1.0 / group.size())
    sent: Any = distributed.all_reduce(buffer, group=group, async_op=True)
    found: torch.futures.Future[torch.Tensor] = sent.get_future().then(lambda future: future.value()[0])
    return found


TARGETS = ("weights", "buffers", "optimizer", "gradients", "activations", "communication", "state")
_TRANSIENT = ("gradients", "activations", "communication")


def inject_live(
    model: nn.Module,
    optimizer: Optimizer | None,
    fault: Fault | InjectionLog,
    *,
    target: str = "weights",
    where: Where = None,
    step: int = 0,
    now: int = 0,
    ranks: Sequence[int] | None = None,
    rank: int | None = None,
    count: int | None = None,
    fraction: float | None = None,
    rate: float | None = None,
    hours: float = 1.0,
    probability: float | None = None,
    sampling: Sampling = "element",
    dtypes: Iterable[str] | None = None,
    allow_nonfinite: bool = True,
    seed: int = 0,
    received: bool = False,
    clock: Callable[[], int] | None = None,
    bare: bool = False,
) -> LiveInjection:
    """Let faults happen in a running training, at the step of that number; what comes back has their log.

    What is hit, and when in the step:

    - `weights`, `buffers`, `optimizer` (its state), or `state` (all three): right before the forward pass; at once if
      the step is the next one. Paths, draws and log are those of a file of `{"model": model.state_dict(), "optimizer":
      optimizer.state_dict()}`: the same seed gives the same bits there.
    - `gradients`: right before the optimizer's step, as `gradients/<parameter>`.
    - `activations`: what modules give in training mode, in the memory that the next operation reads. `where` selects
      modules (`"features.*"`); by default those that have no modules below them.
    - `communication`: DDP's buckets of gradients, as this rank sends them or, with `received`, as it receives them.
      A model with a comm hook of its own needs `eg.comm_faults` around it.

    How many, which bits and which seed: as in `eg.inject`. `fault` may be a log instead, of a file or a training: then
    exactly its elements and bits are hit, by name.

    When: the optimizer's steps are counted from `now`, the number of the step that comes next; or `clock` tells the
    number of the present one (`lambda: job.applied`). Where: only on `ranks`, all by default. This process's own is
    torch.distributed's, or `rank` (`job.rank`). Where `ranks` names several, each draws from a seed of its own.
    Wrap the model first: what is hit on a rank other than 0 before that would be erased, and is refused unless `bare`.

    It happens once, and then every hook comes off. What found no place when its step has gone by is a `UsageError`.

    >>> faults = inject_live(model, optimizer, BitFlip("exponent"), count=1, step=120, ranks=[1])   # doctest: +SKIP
    """
    _check_things(model, optimizer, fault, clock)
    _check_steps(step, now, clock)
    present = now if clock is None else _checked_clock(clock)
    if step < present:
        raise UsageError(f"step {step}: has gone by, step {present} comes next. Choose that one or a later one.")
    place = FaultyRanks.of(ranks, rank)
    items = items_of(where)
    settings: dict[str, Json] = {"step": step, "rank": place.own}
    order: LiveFaults
    if isinstance(fault, InjectionLog):
        given = [count, fraction, rate, probability, dtypes, items]
        if any(one is not None for one in given):
            raise UsageError("a log says itself how many faults happen, and where: leave count, where and the like out")
        target, order = _target_of(fault), ReplayedFaults(fault)
    else:
        checked_choice("target", target, TARGETS)
        checked_seed(seed)
        amount = Amount(count, fraction, rate, hours, probability)
        checked_sampling(sampling)
        types = None if dtypes is None else dtypes_of(dtypes)
        selected = None if target == "activations" else items  # there it selects modules, not tensors
        order = DrawnFaults(fault, amount, selected, types, sampling, allow_nonfinite, place.seed(seed))
        if place.seed(seed) != seed:
            settings["common_seed"] = seed
    if received and target != "communication":
        raise UsageError(f"received: only communication is received, and the target is {target}")
    if optimizer is None:
        _check_unneeded(target, order, counts=clock is None and step > present)
    hit = _target(target, order, model, optimizer, items, received=received)
    place.refuse_erased(model, is_state=target not in _TRANSIENT, bare=bare)
    place.refuse_shared(model, hit.check(now=step == present))
    if not place.is_hit:
        return LiveInjection()
    settings["target"] = target
    if target == "activations" and items is not None:
        settings["where"] = selection_to_json(items)
    if received:
        settings["received"] = True
    schedule = LiveSchedule(hit, model, step, now=present, clock=clock, settings=settings)
    schedule.start(optimizer)
    return LiveInjection(schedule)


def _target(
    target: str,
    order: LiveFaults,
    model: nn.Module,
    optimizer: Optimizer | None,
    where: Selection | None,
    *,
    received: bool,
) -> LiveTarget:
    if target == "gradients":
        assert optimizer is not None
        return GradientTarget(order, model, optimizer)
    if target == "activations":
        names = None
        if isinstance(order, ReplayedFaults):
            names = frozenset(column.tensor for column in order.source.columns)
        return ActivationTarget(order, model, where, names)
    if target == "communication":
        return BucketTarget(order, model, received=received)
    return StateTarget(order, target, model, optimizer)


def _target_of(log: InjectionLog) -> str:
    """What the names of a log are names of."""
    found = {column.tensor.partition("/")[0] for column in log.columns}
    passing = [kind for kind in _TRANSIENT if kind in found]
    if passing and len(found) > 1:
        raise UsageError(f"the log has faults in {', '.join(sorted(found))}, which do not happen at the same moment")
    return passing[0] if passing else "state"


def _check_things(model: object, optimizer: object, fault: object, clock: object) -> None:
    from torch import nn
    from torch.optim import Optimizer

    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a module, found {short_repr(model)}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer: expected an optimizer or None, found {short_repr(optimizer)}")
    if not isinstance(fault, (Fault, InjectionLog)):
        raise UsageError(f"fault {fault!r:.80}: expected a fault such as BitFlip(bits='exponent'), or an injection log")
    if clock is not None and not callable(clock):
        raise UsageError(f"clock: expected a function that tells the present step's number, found {short_repr(clock)}")


def _check_steps(step: object, now: object, clock: object) -> None:
    for name, value in (("step", step), ("now", now)):
        if type(value) is not int or value < 0:
            raise UsageError(f"{name}: expected the number of a step, from 0 on, found {short_repr(value)}")
    if clock is not None and now:
        raise UsageError("now and clock are two ways to say which step comes next: choose one")


def _checked_clock(clock: Callable[[], int]) -> int:
    found: object = clock()
    if type(found) is not int or found < 0:
        raise UsageError(f"clock: expected the number of the present step, found {short_repr(found)}")
    return found


def _check_unneeded(target: str, order: LiveFaults, *, counts: bool) -> None:
    """Whether it goes without an optimizer."""
    needed = target in ("optimizer", "gradients", "state")
    if isinstance(order, ReplayedFaults) and target == "state":
        needed = any(column.tensor.startswith("optimizer/") for column in order.source.columns)
    if needed:
        raise UsageError(f"target {target}: needs the optimizer, and it is None")
    if counts:
        raise UsageError("steps are counted by the optimizer, and it is None: give it, or a clock that tells the step")
