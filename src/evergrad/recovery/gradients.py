"""Gradients reduced over a group that may break, under a DDP that never hears of it.

DDP works on a group of one. Its comm hook hands every bucket to us; the reduction runs while backward goes on, and is
waited for at its end, in the thread that called `backward()`: first ours, then DDP's own end of the pass, then `ended`,
which may repair gradients before `backward()` returns. With an `OptimizerOverlap` the optimizer updates a bucket's
parameters
once it is reduced: what has arrived when another bucket is ready, the rest at the end of the pass.

The bucket layout decides the order of summation, and so the last bit. DDP makes its buckets anew after its first pass;
a joiner's DDP is in its first pass when the others are long past theirs. So there is one *agreed* layout: as long as a
DDP's own is another, its gradients are gathered into the agreed one after the pass, without overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from evergrad.errors import UsageError
from evergrad.recovery.optimizer_overlap import OptimizerOverlap
from evergrad.recovery.process_group import CollectiveWork, Group, GroupBroken, solitary

# Gradients in buckets: which parameters lie in which, and one bucket on its way through a reduction.

BucketLayout: TypeAlias = "tuple[tuple[int, ...], ...]"
"""The numbers of the parameters in each bucket, in order. The order of summation, so the last bit, depends on it."""

CommHook: TypeAlias = "Callable[[Any, Any], Future[torch.Tensor]]"
"""What DDP calls a comm hook: (state, bucket) → a future of the bucket's reduced gradients."""


class GradientBucket:
    """What a comm hook is given: as torch's own GradBucket, but it can be made, and be reduced a second time."""

    def __init__(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], is_last: bool) -> None:
        self._index, self._buffer, self._parameters, self._is_last = index, buffer, list(parameters), is_last

    def index(self) -> int:
        """Its number in the order of reduction, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All of its gradients, flat; after the reduction, what they have become."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Reduce this instead, as compression does."""
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients it holds."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, as views of the buffer."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = torch.split(self._buffer, sizes)
        return [shaped(part, parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Whether no other bucket comes after it."""
        return self._is_last


class BucketReduction:
    """One bucket in one backward pass."""

    def __init__(self, index: int, numbers: tuple[int, ...], buffer: torch.Tensor, is_last: bool) -> None:
        self.index, self.numbers, self.buffer, self.is_last = index, numbers, buffer, is_last
        self.local: torch.Tensor | None = None
        """This rank's own gradients, unscaled, as long as they may have to be reduced again."""
        self.promised: Future[torch.Tensor] = Future()
        """What DDP waits for."""
        self.work: CollectiveWork | None = None
        self.reduced: Future[torch.Tensor] | None = None
        """Completed when the collective is over; the hooks' own work hangs on it."""
        self.outcome: Future[torch.Tensor] | None = None

    @property
    def is_arrived(self) -> bool:
        """Whether `collect` has nothing to wait for."""
        return self.work is not None and self.work.is_done

    def collect(self) -> None:
        """Wait for the reduction and put its result into the buffer; `GroupBroken` if there will be none."""
        assert self.work is not None
        ticket, self.work = self.work, None
        ticket.wait()
        assert self.reduced is not None
        assert self.outcome is not None
        reduced, self.reduced = self.reduced, None
        reduced.set_result(self._sent)
        result = self.outcome.value()
        self.outcome = None
        if result.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(result)

    def begin(self, ticket: CollectiveWork, sent: torch.Tensor) -> Future[torch.Tensor]:
        """The collective is under way with this tensor; the future that hooks may hang their own work on."""
        self.work, self._sent = ticket, sent
        self.reduced = Future()
        return self.reduced

    def give_up(self) -> None:
        """There will be no result; nobody may wait for one."""
        self.work = self.reduced = self.outcome = None


def flattened(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient in the order in which DDP's buckets hold it: that of the parameter's memory (channels last, say)."""
    if parameter.is_contiguous():
        return gradient.reshape(-1)
    ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
    return ordered.copy_(gradient).as_strided((gradient.numel(),), (1,))


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The way back, as a view."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


class ReductionContext(Protocol):
    """What a reduction has to know of the job."""

    def group(self) -> Group:
        """The group of the present generation; `GroupBroken`."""

    def weight(self) -> float:
        """What this rank's gradients count for; all ranks' together are 1."""

    def passes(self) -> int:
        """How many passes the job has brought to their end. In the first two the layout is agreed anew each time."""

    layout: BucketLayout | None
    """What all ranks have agreed on."""

    def root(self) -> int:
        """The rank whose layout holds then: one that was there from the beginning."""

    def misuse(self) -> str:
        """Return the reason why gradients must not be reduced now; empty if they may be."""

    def shares_buffers(self) -> bool:
        """Whether this forward pass is one that every rank makes: in a step, and not in one that others repair."""

    def reach_site(self, bucket: int, at: str) -> None:
        """A place where a failure may be scheduled: before, during or after the reduction of a bucket."""

    def backward_ended(self) -> None:
        """The pass is over: everything has been reduced here, or has failed."""


class GradientReducer:
    """The reduction of one module's gradients.

    `keep` holds a copy of every bucket as this rank has computed it, until the next pass: without it nothing can be
    reduced again.
    """

    overlap: OptimizerOverlap | None = None
    """What updates parameters within the pass."""

    def __init__(
        self,
        module: nn.Module,
        job: ReductionContext,
        *,
        keep: bool,
        hooks: Sequence[Callable[[CommHook], CommHook]] = (),
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        self._job, self._keep = job, keep
        self.module = DistributedDataParallel(
            module,
            process_group=solitary(),
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
            **options,
        )
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._chain: CommHook = self._reduce
        for hook in hooks:
            self._chain = hook(self._chain)
        self.failed: str | None = None
        self.done: set[int] = set()
        self._parts: list[BucketReduction] = []
        self._copies: dict[tuple[int, int], torch.Tensor] = {}
        self._is_direct = self._is_gathered = False
        self._raised: BaseException | None = None
        self._misused: UsageError | None = None
        self._known: dict[bool, BucketLayout] = {}
        self._used: set[int] | None = None
        if find_unused_parameters:
            self._used = set()
            for number, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(self._note_use(number))  # type: ignore[no-untyped-call]
        self.module.register_comm_hook(None, _unannotated(self._hook))
        self.module._register_buffer_comm_hook(None, self._share_buffers, _BufferCommHookLocation.PRE_FORWARD)

    @property
    def num_buckets(self) -> int:
        """How many buckets the agreed layout has; 0 while it is not agreed for good."""
        return len(self._job.layout) if self._is_settled() and self._job.layout is not None else 0

    @property
    def reduced_buckets(self) -> tuple[int, ...]:
        """The buckets that are reduced, and may stay so."""
        return tuple(sorted(self.done)) if self._is_settled() else ()

    @property
    def layout(self) -> BucketLayout:
        """The layout of the last pass: DDP's own, or the agreed one if that was taken instead."""
        return tuple(part.numbers for part in self._parts)

    @property
    def reduced(self) -> list[torch.Tensor]:
        """The buckets' gradients, flat, after `settle`."""
        return [part.buffer for part in self._parts]

    def finish_reduction(self) -> None:
        """Reduce what has not been reduced yet, and apply what is to be; `GroupBroken` if that cannot be."""
        if self._misused is not None:
            raise self._misused
        if self.failed is not None:
            raise GroupBroken(self.failed)
        group = self._job.group()
        if not (self._is_direct or self._is_gathered):
            self._gather(group)
        missing = [part for part in self._parts if part.index not in self.done]
        for part in missing:
            self._start(part)
        for part in missing:
            self._complete(part)
        if self.failed is not None:
            raise GroupBroken(self.failed)
        if self._used is not None:
            self._share_use(group)
        if not self._is_direct:
            self._scatter()
        if self.overlap is not None:
            for part in self._parts:
                if part.index not in self.overlap.applied:
                    self.overlap.apply(part.index, part.numbers)

    def reopen(self, buckets: Iterable[int]) -> None:
        """Take back what was reduced in these buckets; `settle` reduces them again from what this rank had."""
        self.failed = None
        again = set(buckets) if self._is_settled() else set(range(len(self._parts)))
        if self.overlap is not None:
            self.overlap.undo(again)
        self.done -= again
        for part in self._parts:
            if part.index in again and (self._is_direct or self._is_gathered):
                assert part.local is not None, "this rank's own gradients were not kept"
                part.buffer.copy_(part.local)
        if self._is_gathered and not self._is_settled():  # another rank may not even know the layout yet
            self._scatter()
            self._is_gathered = False

    def discard(self) -> None:
        """Nothing of this pass remains."""
        self.failed = None
        self.done.clear()
        self._parts.clear()
        self._misused = None
        if self.overlap is not None:
            self.overlap.undo()
        if self._used is not None:
            self._used.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> None:
        """The step was applied."""
        if self._used is not None:
            self._used.clear()

    def broadcast(self, group: Group, root: int) -> None:
        """Give one rank's parameters and buffers to all, as DDP does when it is made."""
        _broadcast(group, root, [*self.module.module.parameters(), *self.module.module.buffers()])

    def share_buffers(self, group: Group) -> None:
        """Rank 0's buffers for all; DDP does that in the first pass after an epoch, which need not be everyone's."""
        if self.module.broadcast_buffers:
            _broadcast(group, 0, list(self.module.module.buffers()))

    def begin_step(self) -> None:
        """A step's first pass shares buffers, whatever passes without gradients there were before it."""
        self.module.require_forward_param_sync = True

    def _hook(self, _: object, bucket: Any) -> Future[torch.Tensor]:
        index, buffer = bucket.index(), bucket.buffer()
        if index == 0:
            self._begin()
        if buffer.layout is not torch.strided:
            self._raised = self._raised or UsageError("sparse gradients cannot be reduced: use sparse=False")
            self.failed = self.failed or "sparse gradients"
        numbers = tuple(self._numbers[id(parameter)] for parameter in bucket.parameters())
        part = BucketReduction(index, numbers, buffer, bucket.is_last())
        self._parts.append(part)
        if self._is_direct:
            if self._keep:
                part.local = self._copy(part)
            with suppress(GroupBroken):
                self._start(part)
            if self.overlap is not None:
                with suppress(GroupBroken):
                    self._apply_arrived(self.overlap)
        return part.promised

    def _begin(self) -> None:
        """The first bucket of a pass is ready."""
        self._parts.clear()
        self.done.clear()
        known = self._known.get(self.module._has_rebuilt_buckets)
        self._is_direct = self._is_settled() and known is not None and known == self._job.layout
        self._is_gathered = False
        if wrong := self._job.misuse():
            self.failed, self._misused = self.failed or "this backward is none of the job's", UsageError(wrong)
        elif self.overlap is not None and self.overlap.applied:
            self.failed = self.failed or "two passes in a step"
            self._misused = UsageError(
                "overlap=True: a second backward, and the first has updated parameters already. Call job.step after "
                "each; to accumulate gradients, run all but the last under model.no_sync()"
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._collect)

    def _collect(self) -> None:
        """The pass is over, but for what DDP does at its end."""
        if self._is_direct:
            for part in self._parts:
                with suppress(GroupBroken):
                    self._complete(part)
                    self._apply(part)
        for part in self._parts:
            part.give_up()
            part.promised.set_result(part.buffer)
        self._check_complete()
        if not self._is_direct:
            self._known[self.module._has_rebuilt_buckets] = self.layout
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        self._job.backward_ended()

    def _check_complete(self) -> None:
        if self._parts[-1].is_last:
            return
        reached = {number for part in self._parts for number in part.numbers}
        names = [name for name, parameter in self.module.module.named_parameters() if parameter.requires_grad]
        unused = [names[number] for number in range(len(names)) if number not in reached]
        raise UsageError(
            f"backward reached no gradient for {len(unused)} parameters or more, near {unused[0]!r}: a branch that "
            "this rank did not use. Say job.wrap(model, find_unused_parameters=True)."
        )

    def _start(self, part: BucketReduction) -> None:
        """Begin to reduce a bucket; after the first error none is begun any more."""
        if self.failed is not None:
            raise GroupBroken(self.failed)
        self._visit(part.index, "before")
        parameters = [self.parameters[number] for number in part.numbers]
        try:
            part.outcome = self._chain(part, _Reducible(part, parameters))
        except GroupBroken as error:
            self.failed = self.failed or str(error)
            raise
        self._visit(part.index, "during")

    def _reduce(self, _: Any, bucket: Any) -> Future[torch.Tensor]:
        """The innermost hook: scale, and sum over all ranks."""
        assert isinstance(bucket, _Reducible)
        buffer, weight = bucket.buffer(), self._job.weight()
        if weight:
            buffer.mul_(weight)
        else:
            buffer.zero_()  # what counts for nothing may still be infinite
        return bucket.part.begin(self._job.group().all_reduce(buffer), buffer)

    def _complete(self, part: BucketReduction) -> None:
        if part.work is None:
            return
        try:
            part.collect()
        except GroupBroken as error:
            self.failed = self.failed or str(error)
            raise
        self.done.add(part.index)
        self._visit(part.index, "after")

    def _apply_arrived(self, overlap: OptimizerOverlap) -> None:
        """Update what has been reduced meanwhile, in order, while later buckets are computed or on their way."""
        for part in self._parts[len(overlap.applied) :]:
            if self.failed is not None or not part.is_arrived:
                return
            self._complete(part)
            self._apply(part)

    def _apply(self, part: BucketReduction) -> None:
        """Within the pass: update a bucket's parameters, if it is reduced; after an error it waits for `settle`."""
        overlap = self.overlap
        if overlap is None or self.failed is not None or part.index not in self.done or part.index in overlap.applied:
            return
        try:
            overlap.apply(part.index, part.numbers)
        except Exception as error:  # raised out of backward, as at a site
            self._raised = self._raised or error
            self.failed = self.failed or str(error)
            raise GroupBroken(self.failed) from None

    def _visit(self, bucket: int, at: str) -> None:
        try:
            self._job.reach_site(bucket, at)
        except Exception as error:  # raised out of backward, once DDP has ended its pass: inside it would wedge DDP
            self._raised = self._raised or error
            self.failed = self.failed or str(error)
            raise GroupBroken(self.failed) from None

    def _copy(self, part: BucketReduction) -> torch.Tensor:
        key = part.index, part.buffer.numel()
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = torch.empty_like(part.buffer)
        return copy.copy_(part.buffer)

    def _is_settled(self) -> bool:
        return self._job.passes() >= 2

    def _gather(self, group: Group) -> None:
        """Put this rank's gradients into the agreed layout's buckets, once a pass."""
        if not self._is_settled():
            self._agree(group)
        assert self._job.layout is not None
        parts = []
        for index, numbers in enumerate(self._job.layout):
            grads = torch.cat([self._gradient(self.parameters[number]) for number in numbers])
            part = BucketReduction(index, numbers, grads, index + 1 == len(self._job.layout))
            if self._keep:
                part.local = self._copy(part)
            parts.append(part)
        self._parts, self._is_gathered = parts, True
        self.done.clear()

    def _scatter(self) -> None:
        """Make the gradients parts of the buckets, as DDP's are.

        Not copies: kernels choose by alignment, so that a norm of the same numbers elsewhere in memory can differ in
        its last bit, and ranks must not.
        """
        for part in self._parts:
            for number, piece in zip(part.numbers, self._pieces(part), strict=True):
                parameter = self.parameters[number]
                if parameter.grad is not None or self._used is None or number in self._used:
                    parameter.grad = piece

    def _agree(self, group: Group) -> None:
        """Take one rank's layout for all."""
        mine = self.layout
        if self._job.passes() == 0:  # done again, DDP would bring its second layout to the first pass
            mine = self._known.get(False, mine)
        count = len(self.parameters)
        message = torch.zeros(2 * count, dtype=torch.int64)
        message[:count] = torch.tensor([number for bucket in mine for number in bucket])
        message[count : count + len(mine)] = torch.tensor([len(bucket) for bucket in mine])
        group.broadcast(message, self._job.root()).wait()
        numbers, sizes = message[:count].tolist(), [size for size in message[count:].tolist() if size]
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        self._job.layout = tuple(tuple(numbers[end - size : end]) for size, end in zip(sizes, ends, strict=True))

    def _share_use(self, group: Group) -> None:
        """What any rank has used gets its gradient on all; what none has used is left alone, as DDP does."""
        assert self._used is not None
        bits = torch.zeros(len(self.parameters), dtype=torch.uint8)
        bits[sorted(self._used)] = 1
        group.all_reduce(bits, "max").wait()
        others = {number for number, bit in enumerate(bits.tolist()) if bit} - self._used
        self._used |= others
        for part in self._parts if self._is_direct else ():
            for number, piece in zip(part.numbers, self._pieces(part), strict=True):
                if number in others:
                    self.parameters[number].grad = piece

    def _pieces(self, part: BucketReduction) -> list[torch.Tensor]:
        return GradientBucket(0, part.buffer, [self.parameters[number] for number in part.numbers], False).gradients()

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        return flattened(grad, parameter)

    def _note_use(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            assert self._used is not None
            self._used.add(number)

        return note

    def _share_buffers(self, _: object, buffers: dict[str, torch.Tensor]) -> None:
        """Before a forward pass: rank 0's buffers for all, as DDP does."""
        if self.failed is not None or not self._job.shares_buffers():
            return
        try:
            _broadcast(self._job.group(), 0, list(buffers.values()))
        except GroupBroken as error:
            self.failed = str(error)


class _Reducible(GradientBucket):
    """A bucket that knows which part of the pass it is."""

    def __init__(self, part: BucketReduction, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(part.index, part.buffer, parameters, part.is_last)
        self.part = part


def _unannotated(hook: CommHook) -> Any:
    """A hook without annotations: torch takes none but its own classes, and those not as texts."""

    def plain(state, bucket):  # type: ignore[no-untyped-def]
        return hook(state, bucket)

    return plain


def _broadcast(group: Group, root: int, tensors: Sequence[torch.Tensor]) -> None:
    """Give one rank's tensors to all, those of a kind in one message."""
    if group.size == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    flats = [(torch.cat([tensor.reshape(-1) for tensor in alike]), alike) for alike in kinds.values()]
    tickets = [group.broadcast(flat, root) for flat, _ in flats]
    for ticket, (flat, alike) in zip(tickets, flats, strict=True):
        ticket.wait()
        if group.rank != root:
            for tensor, piece in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
