"""Whose a tensor is: every rank's the same, one piece of a larger one, or the rank's own.

| kind | what it is | at another world size |
|---|---|---|
| `replicated` | equal on all ranks: declared, or known from DDP | any rank's |
| `first` | rank 0's is as good as any: the buffers of a DDP or FSDP module | rank 0's, as DDP would broadcast it |
| `sharded` | a piece of a larger tensor, with its place in it: DTensor, FSDP2 | cut anew |
| `own` | everything else: random generators, cursors | an error, or your function |

Being called replicated is a claim. It is believed only while the ranks' digests agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from evergrad.errors import DamagedFile

PlacementKind = Literal["replicated", "first", "sharded", "own"]

ALL = "**"
"""The pattern that every path matches."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Where a rank's piece lies in the whole tensor.

    >>> TensorPiece((5, 7), (2, 0), (2, 7)).overlap(TensorPiece((5, 7), (3, 0), (2, 7)))
    TensorPiece(whole=(5, 7), offset=(3, 0), shape=(1, 7))
    """

    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the piece."""

    @classmethod
    def of_whole(cls, shape: tuple[int, ...]) -> TensorPiece:
        """The place of a tensor that is not cut."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return math.prod(self.shape)

    def overlap(self, other: TensorPiece) -> TensorPiece | None:
        """What two pieces of the same tensor have in common."""
        begins = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return TensorPiece(self.whole, tuple(begins), shape) if all(n > 0 for n in shape) else None

    def slices(self, within: TensorPiece) -> tuple[slice, ...]:
        """This piece, as seen from the beginning of a larger one."""
        return tuple(
            slice(begin - start, begin - start + n)
            for begin, start, n in zip(self.offset, within.offset, self.shape, strict=True)
        )


class _Patterns:
    """Patterns, sorted so that tens of thousands of paths are soon looked up."""

    __slots__ = ("_paths", "_prefixes")

    def __init__(self, patterns: Iterable[str]) -> None:
        self._paths = frozenset(patterns)
        # Every path begins with nothing.
        self._prefixes = tuple("" if p == ALL else p for p in self._paths if p == ALL or p[-1:] == "/")

    def match(self, path: str) -> bool:
        return path in self._paths or path.startswith(self._prefixes)


@dataclass(frozen=True, slots=True)
class Placements:
    """What a rank says of its tensors. A pattern is a path, a path's beginning with its `/`, or `**`."""

    replicated: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    sharded: Mapping[str, TensorPiece] = field(default_factory=dict)
    _replicated: _Patterns = field(init=False, repr=False, compare=False)
    _first: _Patterns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_replicated", _Patterns(self.replicated))
        object.__setattr__(self, "_first", _Patterns(self.first))

    def kind(self, path: str) -> PlacementKind:
        """Whose the tensor at a path is; the narrower claim counts.

        >>> said = Placements(("model/",), ("model/bn.running_mean",))
        >>> said.kind("model/fc.weight"), said.kind("model/bn.running_mean"), said.kind("rng/torch")
        ('replicated', 'first', 'own')
        """
        if path in self.sharded:
            return "sharded"
        if self._first.match(path):
            return "first"
        return "replicated" if self._replicated.match(path) else "own"

    def merged(self, other: Placements) -> Placements:
        """What either of two says."""
        return Placements(
            tuple(dict.fromkeys((*self.replicated, *other.replicated))),
            tuple(dict.fromkeys((*self.first, *other.first))),
            {**self.sharded, **other.sharded},
        )

    def to_json(self) -> dict[str, Any]:
        """As the header of a shard and its manifest carry it; nothing for what is not there."""
        out: dict[str, Any] = {}
        if self.replicated:
            out["replicated"] = list(self.replicated)
        if self.first:
            out["first"] = list(self.first)
        if self.sharded:
            out["sharded"] = {
                path: {"shape": list(place.whole), "offset": list(place.offset), "piece": list(place.shape)}
                for path, place in self.sharded.items()
            }
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any], path: str = "manifest") -> Placements:
        """The way back; `DamagedFile`, naming a path, for what cannot be."""
        try:
            sharded = {
                str(name): TensorPiece(_sizes(place["shape"]), _sizes(place["offset"]), _sizes(place["piece"]))
                for name, place in dict(data.get("sharded", {})).items()
            }
            for name, place in sharded.items():
                if not len(place.whole) == len(place.offset) == len(place.shape) or any(
                    begin + n > size for begin, n, size in zip(place.offset, place.shape, place.whole, strict=True)
                ):
                    raise ValueError(f"{name!r:.80} lies outside of its tensor")
            return cls(_texts(data.get("replicated", ())), _texts(data.get("first", ())), sharded)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise DamagedFile(path, f"the placements cannot be: {error}") from None


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"impossible sizes {sizes!s:.80}")
    return sizes


def _texts(values: Any) -> tuple[str, ...]:
    texts = tuple(values)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a pattern that is no text")
    return texts
