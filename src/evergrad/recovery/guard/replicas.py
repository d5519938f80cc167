"""What every rank must have alike, by name: parameters, optimizer state, and the plain values beside it.

Buffers are not here: they differ between ranks by right. Neither is what is tracked, which may be a rank's own.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad._digest import bytes_of, digest_bytes
from evergrad.errors import StateError, UsageError, nearest
from evergrad.records import Check, Json, record_from_json, record_to_json
from evergrad.recovery.guard.digests import digest_tensors
from evergrad.recovery.guard.norms import MagnitudeHistory, SuspiciousMagnitude
from evergrad.recovery.process_group import Group, swap
from evergrad.state import Skeleton, flatten, join, unflatten

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A plain value: how it is read, as text, and how it is set; None if it cannot be."""

    read: Callable[[], str]
    put: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's copy. Tensors are the live ones: writing to them heals them."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, PlainValue] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digests(self, paths: Iterable[str] | None = None) -> dict[str, bytes]:
        """The digest of everything, or of what is at these paths."""
        chosen = [*self.tensors, *self.values] if paths is None else list(paths)
        found = digest_tensors({path: self.tensors[path] for path in chosen if path in self.tensors})
        return found | {path: digest_bytes(self.values[path].read().encode()) for path in chosen if path in self.values}


@dataclass(frozen=True, slots=True)
class TensorChange:
    """What differs between two copies of a tensor: how many elements, and the first of them."""

    count: int = 0
    first: int = -1
    """The index of the first element that differs, counted through all of them."""
    expected: Json = None
    found: Json = None
    bits: int = 0
    """The bits in which this element differs, as a mask."""

    def plus(self, later: TensorChange) -> TensorChange:
        """Together with what differs further on."""
        return replace(self, count=self.count + later.count) if self.count else later

    def __str__(self) -> str:
        if not self.count:
            return "the same when it was read again"
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        mask = f", bits {self.bits:#x}" if self.bits else ""
        where = f"element {self.first}: " if self.first >= 0 else ""
        return f"{where}expected {self.expected}, found {self.found}{mask}{more}"


def replica_of(model: nn.Module | None, optimizers: Sequence[Optimizer] = ()) -> Replica:
    """The replica of a model and its optimizers: `optimizer/…`, or `optimizer/<number>/…` if there are several.

    Paths are those that `flatten` gives `optimizer.state_dict()`.
    """
    named = model.named_parameters() if model is not None else ()
    tensors = {f"model/{name}": parameter.detach() for name, parameter in named}
    values: dict[str, PlainValue] = {}
    for number, optimizer in enumerate(optimizers):
        root = "optimizer" if len(optimizers) == 1 else f"optimizer/{number}"
        numbers: dict[torch.Tensor, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                numbers.setdefault(parameter, len(numbers))
            rest = {key: value for key, value in group.items() if key != "params"}
            _take(f"{root}/param_groups/{index}", rest, group, tensors, values)
        for parameter, state in optimizer.state.items():
            if parameter in numbers and isinstance(state, dict):
                _take(f"{root}/state/{numbers[parameter]}", state, state, tensors, values)
    return Replica(tensors, values)


def _take(
    place: str,
    found: Mapping[Any, Any],
    live: dict[Any, Any],
    tensors: dict[str, torch.Tensor],
    values: dict[str, PlainValue],
) -> None:
    for key, value in found.items():
        path = join(place, str(key))
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach()
            continue
        try:
            inside = flatten({"value": value}).tensors
        except StateError:  # a function, say: it has no form that could be compared
            continue
        tensors |= {path + name.removeprefix("value"): tensor for name, tensor in inside.items()}
        values[path] = _value(live, key, can_be_set=not inside)


def _value(live: dict[Any, Any], key: Any, *, can_be_set: bool) -> PlainValue:
    def read() -> str:
        return flatten({"value": live[key]}).skeleton.dumps()

    def put(text: str) -> None:
        live[key] = unflatten({}, Skeleton.loads(text))["value"]

    return PlainValue(read, put if can_be_set else None)


def shown_value(text: str) -> str:
    """A plain value as people read it."""
    root: Any = Skeleton.loads(text).root
    return json.dumps(root["dict"][0][1])


def change_between(expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype, start: int = 0) -> TensorChange:
    """How bytes differ from those that were expected, of elements of this type; `start` is the first one's index."""
    kind = _BITS[dtype.itemsize]
    shape = (-1, dtype.itemsize // kind.itemsize)
    one, two = expected.cpu().view(kind).view(shape), found.cpu().view(kind).view(shape)
    wrong = (one != two).any(dim=1).nonzero().flatten()
    if not wrong.numel():
        return TensorChange()
    first = int(wrong[0])
    mask = (1 << 8 * kind.itemsize) - 1
    bits = int(one[first, 0]) & mask ^ int(two[first, 0]) & mask
    values = [_shown(side[first].clone().view(dtype)) for side in (one, two)]
    return TensorChange(wrong.numel(), start + first, values[0], values[1], bits if shape[1] == 1 else 0)


def _shown(element: torch.Tensor) -> Json:
    value = (element.float() if element.is_floating_point() and element.dtype.itemsize < 4 else element).item()
    return value if isinstance(value, bool | int) else str(value)


# Digests combined: tensor → module → role → root. Ranks compare the root, and descend only where it differs.
#
#     root ── model ───── model/layer4.0.conv1 ── model/layer4.0.conv1.weight
#          └─ optimizer ─ optimizer/state/0 ───── optimizer/state/0/exp_avg
#
# Names are part of every digest above them, so a tensor that one rank has and another lacks is a difference, too.

SIZE = 16
"""Bytes of a digest."""


@dataclass(slots=True)
class DigestTree:
    """The digests of one rank, at every level."""

    leaves: dict[str, bytes]
    modules: dict[str, bytes] = field(init=False)
    roles: dict[str, bytes] = field(init=False)
    root: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.modules = _combined({path: (module_of(path), digest) for path, digest in self.leaves.items()})
        self.roles = _combined({path: (role_of(path), digest) for path, digest in self.modules.items()})
        self.root = _combined({path: ("", digest) for path, digest in self.roles.items()}).get("", bytes(SIZE))

    @property
    def names(self) -> bytes:
        """The digest of all paths."""
        return digest_bytes("\n".join(sorted(self.leaves)).encode("utf-8", "surrogatepass"))

    def find(self, group: Group) -> dict[str, list[bytes]]:
        """The leaves in which ranks differ, with every rank's digest; all ranks have the same paths.

        Every rank calls it, and gets the same.
        """
        wrong = differing(group, self.roles, sorted(self.roles))
        wrong = differing(group, self.modules, [path for path in sorted(self.modules) if role_of(path) in wrong])
        return differing(group, self.leaves, [path for path in sorted(self.leaves) if module_of(path) in wrong])


def differing(group: Group, digests: Mapping[str, bytes], paths: Sequence[str]) -> dict[str, list[bytes]]:
    """Of these paths those in which ranks differ, with every rank's digest."""
    rows = gather_digests(group, b"".join(digests[path] for path in paths))
    found = {}
    for number, path in enumerate(paths):
        column = [row[number * SIZE : (number + 1) * SIZE] for row in rows]
        if len(set(column)) > 1:
            found[path] = column
    return found


def gather_digests(group: Group, mine: bytes) -> list[bytes]:
    """What every rank has, by rank; as many bytes on each."""
    rows = torch.zeros(group.size, len(mine), dtype=torch.uint8)
    if not mine:
        return [b""] * group.size
    rows[group.rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    group.all_reduce(rows).wait()  # nobody else writes this row: the sum is the row
    return [row.numpy().tobytes() for row in rows]


def gather_json(group: Group, mine: Any) -> list[Any]:
    """What every rank says, by rank; of any length."""
    text = json.dumps(mine).encode()
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(text)
    group.all_reduce(sizes).wait()
    longest = int(sizes.max())
    rows = gather_digests(group, text.ljust(longest))
    return [json.loads(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]


def module_of(path: str) -> str:
    """The path of what a tensor belongs to.

    >>> module_of("model/layer4.0.conv1.weight"), module_of("optimizer/state/0/exp_avg"), module_of("model/scale")
    ('model/layer4.0.conv1', 'optimizer/state/0', 'model')
    """
    parent, _, last = path.rpartition("/")
    prefix, _, _ = last.rpartition(".")
    return f"{parent}/{prefix}" if prefix else parent


def role_of(path: str) -> str:
    """The first word of a path."""
    return path.partition("/")[0]


def _combined(below: Mapping[str, tuple[str, bytes]]) -> dict[str, bytes]:
    """The digest of each parent, from its children's paths and digests."""
    texts: dict[str, list[bytes]] = {}
    for path, (parent, digest) in sorted(below.items()):
        texts.setdefault(parent, []).append(path.encode("utf-8", "surrogatepass") + b"\0" + digest)
    return {parent: digest_bytes(b"".join(parts)) for parent, parts in texts.items()}


# How closely a job is guarded against silent corruption.

Healing: TypeAlias = Literal["majority", "verified"]
"""What becomes of replicas that differ: the minority gets the majority's bytes; or all go back to the newest version
that was saved when a check had found all replicas alike."""

_HEALING = ("majority", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What `job.guard` was told; checked when it is built."""

    every: int = 50
    """Steps between two checks."""
    norm_factor: float = 10.0
    """A gradient norm beyond this many times the median of the last steps is suspicious."""
    range_factor: float = 10.0
    """A parameter beyond this many times the largest that its tensor ever had at a check is suspicious."""
    heal: Healing = "majority"
    stop: bool = False
    """Whether the job stops when a gradient is not finite, and is not the second time either."""

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"job.guard(every={self.every!r}): expected a number of steps, 1 or more")
        for name in ("norm_factor", "range_factor"):
            factor = getattr(self, name)
            fits = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not (fits and math.isfinite(factor) and factor > 1):
                raise UsageError(f"job.guard({name}={factor!r}): expected a number greater than 1")
        if self.heal not in _HEALING:
            close = nearest(str(self.heal), _HEALING, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"job.guard(heal={self.heal!r}): expected one of {', '.join(_HEALING)}{hint}")
        if not isinstance(self.stop, bool):
            raise UsageError(f"job.guard(stop={self.stop!r}): expected True or False")

    def to_json(self) -> dict[str, Json]:
        """As the timeline shows them."""
        return {
            "every": self.every,
            "norm_factor": self.norm_factor,
            "range_factor": self.range_factor,
            "heal": self.heal,
            "stop": self.stop,
        }


# Compares the replicas of all ranks, names what differs, and gives the minority the majority's bytes.
#
#     digests ──root alike──▶ ok
#        └─root differs─▶ descend to paths ──majority for each──▶ heal, look again ──▶ degraded
#                               └─────────no majority for one──▶ nothing is changed ──▶ failed
#
# A check is collective: every rank calls it when all have applied the same steps, and all get the same answer. If the
# group breaks meanwhile it is done again in the next generation: what has been healed by then is the majority's.

_CHUNK_BYTES = 4 << 20
_TOLD = 16
"""How many differences are told one by one."""


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """One rank's copy of something is not what it should be."""

    rank: int
    path: str
    what: str
    """How it differs, for people."""
    change: TensorChange | None = None
    """How it differs; None if that was not looked at."""
    healed: bool = False

    def to_json(self) -> dict[str, Json]:
        """As a line of the timeline."""
        return {"rank": self.rank, "path": self.path, "what": self.what, "healed": self.healed}


@dataclass(frozen=True, slots=True)
class GuardResult:
    """What a check has found; the same on all ranks."""

    status: Check
    """ok · degraded: differed, and was healed · failed: differs, and was left as it is · unknown: one rank alone."""
    step: int
    differences: tuple[ReplicaDifference, ...] = ()
    suspects: tuple[SuspiciousMagnitude, ...] = ()
    """Parameters that are alike on all ranks, and out of their range."""
    why: str = ""
    """One line, unless all is well."""
    seconds: float = 0.0
    nbytes: int = 0

    @property
    def is_verified(self) -> bool:
        """Whether a version that is saved now can be relied on: all ranks are alike, and nothing is suspicious."""
        return self.status in (Check.OK, Check.DEGRADED) and not self.suspects


class ReplicaCheck:
    """The checks of one rank."""

    def __init__(self, settings: GuardSettings, tell: Callable[..., None] = lambda *_, **__: None) -> None:
        self.settings = settings
        self._record_event = tell
        self._ranges = MagnitudeHistory(settings.range_factor)

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is to be checked."""
        return step > 0 and step % self.settings.every == 0

    def check(self, group: Group, replica: Replica, *, step: int) -> GuardResult:
        """Compare all ranks' replicas, and heal what a majority can heal; `GroupBroken` if the group breaks."""
        began = time.monotonic()
        tree = DigestTree(replica.digests())
        status, why, differences = self._compare(group, replica, tree)
        suspects: list[SuspiciousMagnitude] = []
        if status is not Check.FAILED:
            of_model = {path: tensor for path, tensor in replica.tensors.items() if path.startswith("model/")}
            suspects = self._ranges.read(of_model)
            self._ranges.accept(suspects)  # said once: what all ranks have alike is what the job has
            why = why or "; ".join(map(str, suspects[:2]))
        took = time.monotonic() - began
        checked = GuardResult(status, step, tuple(differences), tuple(suspects), why, took, replica.nbytes)
        self._say(group, checked)
        return checked

    def _compare(self, group: Group, replica: Replica, tree: DigestTree) -> tuple[Check, str, list[ReplicaDifference]]:
        if group.size == 1:
            return Check.UNKNOWN, "one rank: there is nobody to compare with", []
        if len(set(gather_digests(group, tree.root))) == 1:
            return Check.OK, "", []
        if len(set(gather_digests(group, tree.names))) > 1:
            differences = _missing(gather_json(group, sorted(tree.leaves)))
            return Check.FAILED, f"ranks do not have the same tensors: {_first(differences)}", differences
        digests = tree.find(group)
        if not digests:  # the tree was right, and what was first compared was not
            return Check.OK, "", []
        return self._settle(group, replica, tree, digests)

    def _settle(
        self, group: Group, replica: Replica, tree: DigestTree, digests: Mapping[str, Sequence[bytes]]
    ) -> tuple[Check, str, list[ReplicaDifference]]:
        """Heal what differs, if all of it can be healed; else only name it."""
        agreed = {path: Counter(column).most_common(1)[0] for path, column in digests.items()}
        torn = [path for path, (_, count) in agreed.items() if 2 * count <= group.size]
        fixed = [path for path in digests if path in replica.values and replica.values[path].put is None]
        heals = not torn and not fixed and self.settings.heal == "majority"
        mine: list[ReplicaDifference] = []
        for path, column in digests.items():
            # Of several that are equally frequent the lowest rank's is compared with; nothing is changed then.
            source = column.index(agreed[path][0])
            others = [rank for rank, digest in enumerate(column) if digest != column[source]]
            change = _exchange(group, replica, path, source, others, heals)
            if change is not None:
                mine.append(ReplicaDifference(group.rank, path, str(change), change, heals))
        gathered = gather_json(group, [record_to_json(each) for each in mine])
        differences = sorted(
            (record_from_json(ReplicaDifference, row) for rows in gathered for row in rows),
            key=lambda each: (each.path, each.rank),
        )
        if not heals:
            reason = "no majority of ranks agrees" if torn else "it cannot be set" if fixed else "heal='verified'"
            return Check.FAILED, f"{reason}: {_first(differences, torn or fixed)}", differences
        leaves = tree.leaves | replica.digests(digests)
        if len(set(gather_digests(group, DigestTree(leaves).root))) > 1:
            differences = [replace(each, healed=False) for each in differences]
            return Check.FAILED, f"still different after it was healed: {_first(differences)}", differences
        return Check.DEGRADED, f"healed: {_first(differences)}", differences

    def _say(self, group: Group, checked: GuardResult) -> None:
        for each in [each for each in checked.differences if each.rank == group.rank][:_TOLD]:
            self._record_event("corruption_found", step=checked.step, **each.to_json())
        if group.rank == 0:
            self._record_event("guard_check", step=checked.step, status=str(checked.status), reason=checked.why,
                       differences=len(checked.differences), suspects=len(checked.suspects),
                       bytes=checked.nbytes, seconds=checked.seconds)  # fmt: skip


def _exchange(
    group: Group, replica: Replica, path: str, source: int, others: Sequence[int], heals: bool
) -> TensorChange | None:
    """Give the source's copy to the others, who note how theirs differs, and take it over if they shall."""
    if path in replica.values:
        value = replica.values[path]
        texts = gather_json(group, value.read())
        if group.rank not in others:
            return None
        if heals and value.put is not None:
            value.put(texts[source])
        return TensorChange(1, -1, shown_value(texts[source]), shown_value(texts[group.rank]))
    if group.rank != source and group.rank not in others:
        return None
    tensor = replica.tensors[path]
    # Of another shape or type no byte has a counterpart: sizes first, so that nobody waits for what never comes.
    kinds = [str(tensor.dtype), *tensor.shape]
    change = TensorChange()
    for other in others if group.rank == source else (group.rank,):
        peer = other if group.rank == source else source
        if _tell_each_other(group, peer, kinds):
            if group.rank == source:
                _send(group, tensor, peer)
            else:
                change = _receive(group, tensor, peer, heals)
        elif group.rank != source:
            change = TensorChange(1, -1, "another type or shape", " ".join(map(str, kinds)))
    return None if group.rank == source else change


def _tell_each_other(group: Group, peer: int, kinds: Sequence[object]) -> bool:
    """Whether both have the same kind of tensor."""
    mine = torch.tensor([int.from_bytes(digest_bytes(" ".join(map(str, kinds)).encode())[:7], "little")])
    theirs = torch.zeros(1, dtype=torch.int64)
    swap(group, mine, peer, theirs, peer)
    return bool(mine == theirs)


def _send(group: Group, tensor: torch.Tensor, to: int) -> None:
    for chunk in torch.split(bytes_of(tensor), _CHUNK_BYTES):
        group.send(chunk.cpu(), to).wait()


def _receive(group: Group, tensor: torch.Tensor, sender: int, heals: bool) -> TensorChange:
    mine = bytes_of(tensor)  # the tensor's own memory, or a copy if its elements are not in order
    change, start = TensorChange(), 0
    for chunk in torch.split(mine, _CHUNK_BYTES):
        expected = torch.empty(chunk.numel(), dtype=torch.uint8)
        group.receive(expected, sender).wait()
        change = change.plus(change_between(expected, chunk, tensor.dtype, start))
        start += chunk.numel() // tensor.element_size()
        if heals:
            chunk.copy_(expected)
    if heals and not tensor.is_contiguous():
        tensor.copy_(mine.view(tensor.dtype).view(tensor.shape))
    return change


def _missing(paths: Sequence[Sequence[str]]) -> list[ReplicaDifference]:
    """Who has what the most ranks have not, or lacks what they have."""
    sets = [frozenset(each) for each in paths]
    usual = Counter(sets).most_common(1)[0][0]
    found = []
    for rank, mine in enumerate(sets):
        found += [ReplicaDifference(rank, path, "missing") for path in sorted(usual - mine)]
        found += [ReplicaDifference(rank, path, "only here") for path in sorted(mine - usual)]
    return found


def _first(differences: Sequence[ReplicaDifference], paths: Sequence[str] = ()) -> str:
    shown = next((each for each in differences if not paths or each.path in paths), differences[0])
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return f"{shown.path} on rank {shown.rank}, {shown.what}{more}"
