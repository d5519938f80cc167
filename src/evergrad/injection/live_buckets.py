"""Faults in what ranks send each other: buckets of gradients, on their way through DDP's comm hook.

DDP takes one comm hook, and cannot let go of it. So faults do not register their own: `comm_faults` wraps whichever
hook there is, for good, and does nothing as long as nothing is scheduled. Only a DDP without a hook is given one, which
reduces as DDP itself does, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from evergrad.errors import EvergradError, UsageError
from evergrad.injection.live_order import Order
from evergrad.injection.live_passing import PassingTarget
from evergrad.injection.live_targets import inside
from evergrad.records import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import nn

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
                target.pass_bucket(bucket.index(), bucket.buffer())
        future = hook(state, bucket)
        for target in mine:
            if target.received:
                future = future.then(target.receiver(bucket.index()))
        return future

    return pass_on


class BucketTarget(PassingTarget):
    """The gradients in a bucket: what this rank sends, or what it receives."""

    what = "communication"

    def __init__(self, order: Order, model: nn.Module, *, received: bool) -> None:
        super().__init__(order)
        self.received = received
        self.parameters = frozenset(id(parameter) for parameter in inside(model).parameters())
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

    def watch(self) -> None:
        """Let buckets come by."""
        if self not in _scheduled:
            _scheduled.add(self)
            self._register()

    def missed(self, step: int) -> UsageError:
        """A layout that has changed, another comm hook, or an error that could not be raised within it."""
        if self._error is not None:
            return UsageError(f"communication: step {step}: {self._error}")
        if self._shares is None:
            return self.unseen()
        names = ", ".join(name.removeprefix("communication/") for name in list(self.left)[:3])
        return UsageError(
            f"step {step} has gone by, and faults found no place: {names} did not pass by. DDP lays its buckets out "
            "anew after its first pass: choose a later step."
        )

    def unseen(self) -> UsageError:
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

    def pass_bucket(self, index: int, buffer: torch.Tensor) -> None:
        """A bucket comes by. An exception here would wedge DDP: it waits until the step is over."""
        name = f"communication/bucket-{index}"
        try:
            seen = self._seen.get(name)
            if self.left.get(name) and self.order.needs_sizes and seen is not None and seen[1] != tuple(buffer.shape):
                raise UsageError(
                    f"{name} has {buffer.numel():,} elements, and {seen[1][0]:,} in the step before: DDP has laid its "
                    "buckets out anew, as it does after its first pass. Choose a later step."
                )
            self.meet(name, buffer)
        except EvergradError as error:
            self._error = self._error or error

    def receiver(self, index: int) -> Callable[[Any], Any]:
        """What is to be done once a bucket is reduced."""

        def receive(future: Any) -> Any:
            found = future.value()
            self.pass_bucket(index, found[0] if isinstance(found, (list, tuple)) else found)
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
