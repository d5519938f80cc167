"""What crosses packages: frozen values that turn into plain JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TypeAlias

from evergrad.dtypes import DType

MAX_AXES = 64
"""The most axes of a tensor that is served: NumPy's limit."""

_MAX_SHARES = 100
_MAX_LOOKED_AT = 2_000

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class Role(StrEnum):
    """What a tensor is for."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    OTHER = "other"


class Check(StrEnum):
    """The result of one check; what could not be judged is `unknown`, never `ok`."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, holds: bool) -> Check:
        """What a check says that could be made."""
        return cls.OK if holds else cls.FAILED


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A tensor's extent in the file, as its neighbours see it."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One named tensor of a checkpoint: what it is, not what it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    role: Role
    nbytes: int
    neighbours: tuple[Neighbour, ...] = field(default=(), repr=False, compare=False)
    """The chain of tensors whose bytes overlap, this one included, by where they start."""
    place: Neighbour | None = field(default=None, repr=False, compare=False)
    read_only: str = ""
    """The reason why its bits cannot be altered in place; empty if they can."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.nbytes // self.dtype.itemsize

    @property
    def shares(self) -> tuple[str, ...]:
        """Names of the other tensors that lie in the same bytes (tied weights, views); the first hundred of them."""
        mine = self.place
        if mine is None:
            return ()
        before = bisect_left(self.neighbours, mine.stop, key=lambda n: n.start)
        # Those that begin last are the likeliest to reach this one: a bounded look, however long the chain is.
        candidates = self.neighbours[max(0, before - _MAX_LOOKED_AT) : before]
        found = (n.name for n in candidates if n.name != self.name and mine.start < n.stop)
        return tuple(islice(found, _MAX_SHARES))

    def to_json(self) -> dict[str, Json]:
        """The row that `evergrad inspect --json` prints; `shares` and `read_only` only where they apply."""
        row: dict[str, Json] = {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype.value,
            "role": self.role.value,
            "nbytes": self.nbytes,
        }
        if self.neighbours and (shares := self.shares):
            row["shares"] = list(shares)
        if self.read_only:
            row["read_only"] = self.read_only
        return row


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How one tensor differs between two checkpoints.

    `status` is `equal` (every bit), `changed`, `shape`, `dtype`, `only in a` or `only in b`. `changed` counts
    elements whose bits (or, across dtypes, values) differ; `max_abs` is the largest finite |Δ|; the two
    `nonfinite` fields count NaN and infinities on either side.
    """

    name: str
    status: str
    other_name: str | None = None
    detail: str = ""
    numel: int = 0
    changed: int = 0
    max_abs: float = 0.0
    nonfinite_a: int = 0
    nonfinite_b: int = 0

    @property
    def equal(self) -> bool:
        """Whether the two are the same bit for bit."""
        return self.status == "equal"

    def to_json(self) -> dict[str, Json]:
        """The row that `evergrad diff --json` prints."""
        return {
            "name": self.name,
            "other_name": self.other_name,
            "status": self.status,
            "detail": self.detail,
            "numel": self.numel,
            "changed": self.changed,
            "max_abs": self.max_abs,
            "nonfinite_a": self.nonfinite_a,
            "nonfinite_b": self.nonfinite_b,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints, tensor by tensor."""

    a: str
    b: str
    format_a: str
    format_b: str
    tensors: tuple[TensorDiff, ...]
    note: str = ""
    """Remarks: tensors that were not matched by name, and values that only one of the formats can hold."""
    values: tuple[str, ...] = ()
    """Values besides tensors that differ (`optimizer/param_groups/0/lr: 0.1 / 0.9`), where both files hold some."""
    uncompared: Mapping[str, str] = field(default_factory=dict)
    """Content that could not be compared, by name, with what it is; anything here makes the verdict `unknown`."""
    compared: int = 0
    """The number of values and other content besides tensors that was compared."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Content that `tensors_only` excluded, by name, with a description; it is no part of the verdict."""

    @property
    def verdict(self) -> str:
        """`different`, or else `unknown` if something could not be compared or nothing was, or else `equal`."""
        if self.values or any(not tensor.equal for tensor in self.tensors):
            return "different"
        return "equal" if (self.tensors or self.compared) and not self.uncompared else "unknown"

    @property
    def equal(self) -> bool:
        """True if all that was to be compared was, and is the same: tensors bit for bit, values by type and value."""
        return self.verdict == "equal"

    @property
    def different(self) -> tuple[TensorDiff, ...]:
        """The tensors that differ, in the order of the first file."""
        return tuple(tensor for tensor in self.tensors if not tensor.equal)

    def __getitem__(self, name: str) -> TensorDiff:
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def to_json(self) -> dict[str, Json]:
        """What `evergrad diff --json` prints."""
        return {
            "a": self.a,
            "b": self.b,
            "format_a": self.format_a,
            "format_b": self.format_b,
            "equal": self.equal,
            "verdict": self.verdict,
            **({"note": self.note} if self.note else {}),
            **({"values": list(self.values)} if self.values else {}),
            **({"uncompared": dict(self.uncompared)} if self.uncompared else {}),
            **({"compared": self.compared} if self.compared else {}),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }
