"""Records that cross packages: frozen values, and one codec that turns them into plain JSON and back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from evergrad.dtypes import DType

MAX_AXES = 64
"""The most axes of a tensor that is served: NumPy's limit."""

_MAX_SHARES = 100
_MAX_LOOKED_AT = 2_000

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_Record = TypeVar("_Record")


def record_to_json(record: Any) -> dict[str, Json]:
    """The fields of a dataclass by name, in order, as plain JSON: what `record_from_json` reads.

    Enums become their values, tuples lists, keys texts, nested dataclasses objects. The writer of a record that is kept
    or sent adds its `schema_version`, and takes it off before the record is read.

    >>> record_to_json(Neighbour("a", 0, 8))
    {'name': 'a', 'start': 0, 'stop': 8}
    """
    return {one.name: _plain(getattr(record, one.name)) for one in fields(record) if one.init}


def record_from_json(cls: type[_Record], values: Mapping[str, Any]) -> _Record:
    """Back from `record_to_json`, by the types of the fields; those that are missing have their defaults.

    TypeError, ValueError, AttributeError or KeyError if it is something else. Plain values are taken as they are.

    >>> record_from_json(Neighbour, {"name": "a", "start": 0, "stop": 8})
    Neighbour(name='a', start=0, stop=8)
    """
    readers = _readers(cls)  # type: ignore[arg-type]  # mypy takes a class for something unhashable
    return cls(**{name: readers[name](value) if name in readers else value for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(part) for key, part in value.items()}
    return record_to_json(value) if is_dataclass(value) else value


@cache
def _readers(cls: type) -> dict[str, Callable[[Any], Any]]:
    """How each field is read that is not in JSON as it is in the record."""
    readers = {name: _reader(kind) for name, kind in get_type_hints(cls).items()}
    return {name: read for name, read in readers.items() if read is not None}


def _reader(kind: Any) -> Callable[[Any], Any] | None:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [_reader(arg) for arg in args if arg is not NoneType]
        read = others[0] if len(others) == 1 else None
        return None if read is None else lambda value: None if value is None else read(value)
    if origin is tuple:
        parts = [_reader(arg) or _same for arg in args if arg is not Ellipsis]
        if Ellipsis in args:
            return lambda value: tuple(map(parts[0], value))
        return lambda value: tuple(read(part) for read, part in zip(parts, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, part = (int if args[0] is int else _reader(args[0]) or _same), _reader(args[1]) or _same
        return lambda value: {key(name): part(one) for name, one in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if isinstance(kind, type) and is_dataclass(kind):
        return lambda value: record_from_json(kind, value)
    return None


def _same(value: Any) -> Any:
    return value


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
