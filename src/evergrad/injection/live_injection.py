"""Soft errors in a running training: at a step, on some ranks, in what is in use there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from evergrad.errors import UsageError
from evergrad.injection.faults import Fault
from evergrad.injection.injector import Selection, checked_seed, dtypes_of, items_of, selection_told
from evergrad.injection.live_buckets import BucketTarget
from evergrad.injection.live_order import Again, Drawn, Order
from evergrad.injection.live_passing import ActivationTarget
from evergrad.injection.live_ranks import Ranks
from evergrad.injection.live_scheduling import LiveInjection, Schedule
from evergrad.injection.live_targets import GradientTarget, StateTarget, Target
from evergrad.injection.log import InjectionLog
from evergrad.injection.sampling import Amount, Sampling, checked_sampling
from evergrad.records import Json
from evergrad.state import Where
from evergrad.wording import checked_choice, shown

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

TARGETS = ("weights", "buffers", "optimizer", "gradients", "activations", "communication", "state")
_PASSING = ("gradients", "activations", "communication")


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
    present = now if clock is None else _present(clock)
    if step < present:
        raise UsageError(f"step {step}: has gone by, step {present} comes next. Choose that one or a later one.")
    place = Ranks.of(ranks, rank)
    items = items_of(where)
    settings: dict[str, Json] = {"step": step, "rank": place.own}
    order: Order
    if isinstance(fault, InjectionLog):
        given = [count, fraction, rate, probability, dtypes, items]
        if any(one is not None for one in given):
            raise UsageError("a log says itself how many faults happen, and where: leave count, where and the like out")
        target, order = _target_of(fault), Again(fault)
    else:
        checked_choice("target", target, TARGETS)
        checked_seed(seed)
        amount = Amount(count, fraction, rate, hours, probability)
        checked_sampling(sampling)
        types = None if dtypes is None else dtypes_of(dtypes)
        selected = None if target == "activations" else items  # there it selects modules, not tensors
        order = Drawn(fault, amount, selected, types, sampling, allow_nonfinite, place.seed(seed))
        if place.seed(seed) != seed:
            settings["common_seed"] = seed
    if received and target != "communication":
        raise UsageError(f"received: only communication is received, and the target is {target}")
    if optimizer is None:
        _check_unneeded(target, order, counts=clock is None and step > present)
    hit = _target(target, order, model, optimizer, items, received=received)
    place.refuse_erased(model, is_state=target not in _PASSING, bare=bare)
    place.refuse_shared(model, hit.check(now=step == present))
    if not place.is_hit:
        return LiveInjection()
    settings["target"] = target
    if target == "activations" and items is not None:
        settings["where"] = selection_told(items)
    if received:
        settings["received"] = True
    schedule = Schedule(hit, model, step, now=present, clock=clock, settings=settings)
    schedule.begin(optimizer)
    return LiveInjection(schedule)


def _target(
    target: str, order: Order, model: nn.Module, optimizer: Optimizer | None, where: Selection | None, *, received: bool
) -> Target:
    if target == "gradients":
        assert optimizer is not None
        return GradientTarget(order, model, optimizer)
    if target == "activations":
        names = None
        if isinstance(order, Again):
            names = frozenset(column.tensor for column in order.source.columns)
        return ActivationTarget(order, model, where, names)
    if target == "communication":
        return BucketTarget(order, model, received=received)
    return StateTarget(order, target, model, optimizer)


def _target_of(log: InjectionLog) -> str:
    """What the names of a log are names of."""
    found = {column.tensor.partition("/")[0] for column in log.columns}
    passing = [kind for kind in _PASSING if kind in found]
    if passing and len(found) > 1:
        raise UsageError(f"the log has faults in {', '.join(sorted(found))}, which do not happen at the same moment")
    return passing[0] if passing else "state"


def _check_things(model: object, optimizer: object, fault: object, clock: object) -> None:
    from torch import nn
    from torch.optim import Optimizer

    if not isinstance(model, nn.Module):
        raise UsageError(f"model: expected a module, found {shown(model)}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer: expected an optimizer or None, found {shown(optimizer)}")
    if not isinstance(fault, (Fault, InjectionLog)):
        raise UsageError(f"fault {fault!r:.80}: expected a fault such as BitFlip(bits='exponent'), or an injection log")
    if clock is not None and not callable(clock):
        raise UsageError(f"clock: expected a function that tells the present step's number, found {shown(clock)}")


def _check_steps(step: object, now: object, clock: object) -> None:
    for name, value in (("step", step), ("now", now)):
        if type(value) is not int or value < 0:
            raise UsageError(f"{name}: expected the number of a step, from 0 on, found {shown(value)}")
    if clock is not None and now:
        raise UsageError("now and clock are two ways to say which step comes next: choose one")


def _present(clock: Callable[[], int]) -> int:
    found: object = clock()
    if type(found) is not int or found < 0:
        raise UsageError(f"clock: expected the number of the present step, found {shown(found)}")
    return found


def _check_unneeded(target: str, order: Order, *, counts: bool) -> None:
    """Whether it goes without an optimizer."""
    needed = target in ("optimizer", "gradients", "state")
    if isinstance(order, Again) and target == "state":
        needed = any(column.tensor.startswith("optimizer/") for column in order.source.columns)
    if needed:
        raise UsageError(f"target {target}: needs the optimizer, and it is None")
    if counts:
        raise UsageError("steps are counted by the optimizer, and it is None: give it, or a clock that tells the step")
