"""Two checkpoints, tensor by tensor, in any formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.errors import AmbiguousMatch
from evergrad.formats.contract import Bits, Checkpoint, Progress, blocks, choose
from evergrad.formats.match import Match, match, unwrapped
from evergrad.formats.registry import open_checkpoint
from evergrad.formats.values import finite, values
from evergrad.records import Comparison, Json, TensorDiff, TensorInfo
from evergrad.state import Where

__all__ = ["compare"]

_WITH_VALUES = ("torch-zip", "torch-legacy", "pytorch-h5")
"""Formats that hold values besides tensors: a file of theirs that holds none says so."""


def compare(
    a: str | PathLike[str] | Checkpoint,
    b: str | PathLike[str] | Checkpoint,
    *,
    where: Where = None,
    progress: Progress | None = None,
) -> Comparison:
    """How two checkpoints differ: per tensor equal or not, changed elements, max |Δ|, non-finite values.

    Equal means bit for bit. Tensors are matched by name; the `module.` and `_orig_mod.` that DDP and
    `torch.compile` put before names are ignored. Where no name is shared (another framework), tensors are matched
    by layer, shape and order, and compared axis by axis (see `match`). `where` limits the comparison to a selection
    of `a`. Memory stays bounded, but for tensors whose axes are turned, which are read whole.

    What cannot be compared (strings in HDF5, arrays in a compressed database, …) is named in `uncompared`; the verdict
    then is `unknown` at best.
    """
    with ExitStack() as stack:
        first = a if isinstance(a, Checkpoint) else stack.enter_context(open_checkpoint(a))
        second = b if isinstance(b, Checkpoint) else stack.enter_context(open_checkpoint(b))
        names, unread = choose(first, where)
        partners, note = _partners(first, second)
        total = sum(first.tensors[name].nbytes for name in names)
        done = 0
        rows: list[TensorDiff] = []
        for name in names:
            pair = partners.get(name)
            if pair is None:
                rows.append(TensorDiff(name, "only in a", numel=first.tensors[name].numel))
            else:
                rows.append(_compare(first, second, pair))
            done += first.tensors[name].nbytes
            if progress is not None:
                progress(done, total)
        if where is None:
            met = {pair.b for pair in partners.values()}
            rows += [
                TensorDiff(name, "only in b", numel=info.numel)
                for name, info in second.tensors.items()
                if name not in met
            ]
        differing, uncompared = _unread(first, second, unread, where)
        if where is None:
            found = _values(first, second)
            differing += found.differing
            uncompared |= found.uncompared
            note = "; ".join(filter(None, [note, found.note]))
        return Comparison(
            str(first.path),
            str(second.path),
            first.format,
            second.format,
            tuple(rows),
            note,
            tuple(differing),
            uncompared,
        )


def _unread(
    first: Checkpoint, second: Checkpoint, unread: Mapping[str, str], where: Where
) -> tuple[list[str], dict[str, str]]:
    """Content that no reader of ours understands, compared by its bytes: what differs, and what has none to compare."""
    there = second.unread
    names = unread if where is not None else dict.fromkeys((*unread, *there))
    differing: list[str] = []
    uncompared: dict[str, str] = {}
    for name in names:
        a = first.fingerprint(name) if name in unread else None
        b = second.fingerprint(name) if name in there else None
        what = unread.get(name) or there[name]
        # Only within one format do the same bytes mean the same, and other bytes something else.
        if a is None or b is None or first.format != second.format:
            uncompared[name] = what
        elif a != b:
            differing.append(f"{name}: {what} / other bytes")
    return differing, uncompared


@dataclass(slots=True)
class _Values:
    """The result of comparing values that are not tensors."""

    differing: list[str] = field(default_factory=list)
    uncompared: dict[str, str] = field(default_factory=dict)
    note: str = ""


def _values(first: Checkpoint, second: Checkpoint) -> _Values:
    """Values besides tensors that differ; those of which one format cannot hold any are named or noted."""
    a, b = first.skeleton.values(), second.skeleton.values()
    if (a and not b and second.format not in _WITH_VALUES) or (b and not a and first.format not in _WITH_VALUES):
        holder, side = (first, "a") if a else (second, "b")
        objects = {name: what for name, what in holder.others.items() if name not in holder.unread}
        plain = sum(not (isinstance(node, dict) and "object" in node) for node in (a or b).values())
        told = f"{plain} value{'s' if plain != 1 else ''} besides tensors only in {side}: the other format holds none"
        return _Values(uncompared=objects, note=told if plain else "")
    return _Values(
        [
            f"{name}: {_shown(a, name)} / {_shown(b, name)}"
            for name in dict.fromkeys((*a, *b))
            if name not in a or name not in b or not _same(a[name], b[name])
        ]
    )


def _same(a: Json, b: Json) -> bool:
    """Whether two nodes are the same in type and to the bit: 0.0 is not -0.0, and 1, 1.0 and True are three values."""
    waiting = [(a, b)]
    while waiting:
        x, y = waiting.pop()
        if type(x) is not type(y):
            return False
        if isinstance(x, dict) and isinstance(y, dict):
            if x.keys() != y.keys():
                return False
            waiting += [(x[key], y[key]) for key in x]
        elif isinstance(x, list) and isinstance(y, list):
            if len(x) != len(y):
                return False
            waiting += zip(x, y, strict=True)
        elif isinstance(x, float) and isinstance(y, float):
            if struct.pack("<d", x) != struct.pack("<d", y):
                return False
        elif x != y:
            return False
    return True


def _shown(values_: dict[str, Json], name: str) -> str:
    if name not in values_:
        return "–"
    text = json.dumps(values_[name])
    return text if len(text) <= 60 else text[:59] + "…"


def _partners(first: Checkpoint, second: Checkpoint) -> tuple[dict[str, Match], str]:
    """Which tensor of b goes with which of a, and a note where names did not tell."""
    named = _by_name(first.tensors, second.tensors)
    if named or not first.tensors:
        return {a: Match(a, b) for a, b in named.items()}, ""
    try:  # not one name in common: another framework, perhaps
        pairs = {pair.a: pair for pair in match(first, second).pairs}
    except AmbiguousMatch as error:
        return {}, str(error)
    return pairs, f"names differ: {len(pairs)} tensors matched by layer, shape and order" if pairs else ""


def _by_name(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """Which name of b goes with which of a: the same, or the same without wrappers' prefixes, if that is clear."""
    right = set(b)
    found = {name: name for name in a if name in right}
    taken = set(found.values())
    bare: dict[str, list[str]] = {}
    for name in right - taken:
        bare.setdefault(unwrapped(name), []).append(name)
    for name in a:
        candidates = [] if name in found else bare.get(unwrapped(name), [])
        if len(candidates) == 1 and candidates[0] not in taken:
            found[name] = candidates[0]
            taken.add(candidates[0])
    return found


def _compare(first: Checkpoint, second: Checkpoint, pair: Match) -> TensorDiff:
    name, other, axes = pair.a, pair.b, pair.axes
    a, b = first.tensors[name], second.tensors[other]
    other_name = other if other != name else None
    shape = tuple(a.shape[axis] for axis in axes) if axes else a.shape
    turned = _turned(second, other, axes) if axes and shape == b.shape else None
    if shape != b.shape:
        return TensorDiff(name, "shape", other_name, f"{_shape(a)} / {_shape(b)}", a.numel)
    changed = nonfinite_a = nonfinite_b = 0
    largest = 0.0
    for start, stop in blocks(a):
        x = first.read_bits(name, start, stop)
        y = second.read_bits(other, start, stop) if turned is None else turned[start:stop]
        numbers_x = values(x, a.dtype)
        ok_x = finite(numbers_x)
        nonfinite_a += int(len(ok_x) - np.count_nonzero(ok_x))
        if a.dtype is b.dtype:
            unequal = x != y if x.ndim == 1 else (x != y).any(axis=1)
            if not unequal.any():
                nonfinite_b += int(len(ok_x) - np.count_nonzero(ok_x))
                continue
            numbers_y = values(y, b.dtype)
        else:
            numbers_y = values(y, b.dtype)
            if numbers_x.ndim != numbers_y.ndim:
                return TensorDiff(name, "dtype", other_name, f"{a.dtype} / {b.dtype}", a.numel, a.numel)
            numbers_x, numbers_y, unequal = _across_types(numbers_x, numbers_y)
        ok_y = finite(numbers_y)
        nonfinite_b += int(len(ok_y) - np.count_nonzero(ok_y))
        changed += int(np.count_nonzero(unequal))
        both = unequal & ok_x & ok_y
        if both.any():
            largest = max(largest, _largest(numbers_x[both], numbers_y[both]))
    status, detail = ("changed" if changed else "equal"), ""
    if a.dtype is not b.dtype:
        status, detail = "dtype", f"{a.dtype} / {b.dtype}"
    return TensorDiff(name, status, other_name, detail, a.numel, changed, largest, nonfinite_a, nonfinite_b)


def _turned(ck: Checkpoint, name: str, axes: tuple[int, ...]) -> Bits:
    """All bits of a tensor, its axes put back into the order that they had before `axes` reordered them."""
    info = ck.tensors[name]
    bits = ck.read_bits(name)
    grid = bits.reshape(*info.shape, *bits.shape[1:])
    back = [axes.index(axis) for axis in range(len(axes))]
    return np.ascontiguousarray(grid.transpose(*back, *range(len(axes), grid.ndim))).reshape(bits.shape)


def _across_types(
    x: npt.NDArray[Any], y: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Numbers of two types as one, and which of the elements differ; NaN equals NaN."""
    if "f" in (x.dtype.kind, y.dtype.kind):
        x, y = x.astype(np.float64), y.astype(np.float64)
        unequal = ~((x == y) | (np.isnan(x) & np.isnan(y)))
    else:  # integers stay integers: NumPy compares them exactly, whatever their signs and widths
        unequal = x != y
    return x, y, unequal if unequal.ndim == 1 else unequal.any(axis=1)


def _largest(x: npt.NDArray[Any], y: npt.NDArray[Any]) -> float:
    """The largest |x − y|, without overflow; of complex numbers, the modulus."""
    if x.dtype.kind in "iu" and x.dtype == y.dtype:
        # The difference of two 64-bit integers fits into 64 unsigned bits.
        high, low = np.maximum(x, y), np.minimum(x, y)
        return float((high.astype(np.uint64) - low.astype(np.uint64)).max())
    with np.errstate(over="ignore"):
        delta = np.abs(x.astype(np.float64) - y.astype(np.float64))
        return float((np.hypot(delta[:, 0], delta[:, 1]) if delta.ndim == 2 else delta).max())


def _shape(info: TensorInfo) -> str:
    return "×".join(str(n) for n in info.shape) or "scalar"
