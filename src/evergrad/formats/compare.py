"""Two checkpoints, tensor by tensor, in any formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.errors import AmbiguousMatch
from evergrad.formats.bitcast import finite, values
from evergrad.formats.checkpoint import Bits, Checkpoint, OtherTensor, ProgressCallback, block_ranges, describe_others
from evergrad.formats.match import Match, match, strip_wrapper_prefixes
from evergrad.formats.registry import open_checkpoint
from evergrad.records import Comparison, Json, TensorDiff, TensorInfo
from evergrad.state import ROOT, Skeleton, Where
from evergrad.state.selection import items_of_where, no_match_error, select_one
from evergrad.state.skeleton import describe
from evergrad.wording import count_of

_WITH_VALUES = ("torch-zip", "torch-legacy", "pytorch-h5")
"""Formats that hold values besides tensors: a file of theirs that holds none says so."""


def compare(
    a: str | PathLike[str] | Checkpoint,
    b: str | PathLike[str] | Checkpoint,
    *,
    where: Where = None,
    tensors_only: bool = False,
    progress: ProgressCallback | None = None,
) -> Comparison:
    """How two checkpoints differ: per tensor equal or not, changed elements, max |Δ|, non-finite values.

    Equal means bit for bit. Tensors are matched by name; the `module.` and `_orig_mod.` that DDP and
    `torch.compile` put before names are ignored. Where no name is shared (another framework), tensors are matched
    by layer, shape and order, and compared axis by axis (see `match`). `where` limits the comparison to a selection
    of tensors and of the values besides them, in both. Memory stays bounded, but for tensors whose axes are turned,
    which are read whole.

    What cannot be compared (strings in HDF5, values that the other format has no place for, …) is named in
    `uncompared`; the verdict then is `unknown` at best. `tensors_only` leaves values out, and names them in `left_out`.
    """
    with ExitStack() as stack:
        first = a if isinstance(a, Checkpoint) else stack.enter_context(open_checkpoint(a))
        second = b if isinstance(b, Checkpoint) else stack.enter_context(open_checkpoint(b))
        partners, note = _partners(first, second)
        chosen = _Chosen.of(first, second, where, partners)
        names = [name for name in first.tensors if name in chosen.a]
        total = sum(first.tensors[name].nbytes for name in names)
        done = 0
        rows: list[TensorDiff] = []
        found = _Found()
        for name in names:
            pair = partners.get(name)
            if pair is None:
                rows.append(TensorDiff(name, "only in a", numel=first.tensors[name].numel))
            elif why := first.listed_only.get(name) or second.listed_only.get(pair.b):
                row = _compare_forms(first.tensors[name], second.tensors[pair.b], pair)
                rows += [row] if row is not None else []
                found.uncompared |= {name: why} if row is None else {}
            else:
                rows.append(_compare(first, second, pair))
            done += first.tensors[name].nbytes
            if progress is not None:
                progress(done, total)
        met = {pair.b for pair in partners.values()}
        rows += [
            TensorDiff(name, "only in b", numel=info.numel)
            for name, info in second.tensors.items()
            if name in chosen.b and name not in met
        ]
        _compare_unread(first, second, chosen, tensors_only, found)
        _compare_values(first, second, chosen, tensors_only, found)
        return Comparison(
            str(first.path),
            str(second.path),
            first.format,
            second.format,
            tuple(rows),
            "; ".join(filter(None, [note, found.note])),
            tuple(found.differing),
            found.uncompared,
            found.compared,
            found.left_out,
        )


@dataclass(slots=True)
class _Chosen:
    """The names that a selection takes from two checkpoints."""

    a: set[str] = field(default_factory=set)
    """Tensors and unread content of the first."""
    b: set[str] = field(default_factory=set)
    """Tensors and unread content of the second."""
    values: set[str] = field(default_factory=set)
    """Values, objects, parts of objects, and containers, of either."""

    @classmethod
    def of(cls, first: Checkpoint, second: Checkpoint, where: Where, partners: Mapping[str, Match]) -> _Chosen:
        """Apply each item of the selection to everything; `UnknownTensor` if one chooses nothing in either."""
        both = (first, second)
        containers = dict.fromkeys((*first.skeleton.containers(), *second.skeleton.containers()), "")
        described = [dict.fromkeys(ck.skeleton.values(within_objects=True), "") | _objects(ck) for ck in both]
        if where is None:
            mine, theirs = ({*ck.tensors, *ck.unread} for ck in both)
            return cls(mine, theirs, {*described[0], *described[1], *containers})
        pools = [{**ck.tensors, **describe_others(ck.unread, ck.tensors)} for ck in both]
        values = describe_others(described[1] | described[0], ())
        places = describe_others(containers, values)
        chosen = cls()
        for item in items_of_where(where):
            mine, theirs, held = (set(select_one(pool, item)) for pool in (*pools, values))
            if not mine:  # the name that a partner has in another framework
                mine = {name for name, pair in partners.items() if pair.b in theirs}
            if not (mine or theirs or held):
                raise no_match_error({**pools[0], **pools[1], **values}, item)
            held |= set(select_one(places, item))
            if isinstance(item, str) and (item in values or item in places):  # all below it, as of tensors
                held |= {name for name in (*values, *places) if name.startswith((f"{item}/", f"{item}."))}
            chosen.a |= mine
            chosen.b |= theirs
            chosen.values |= held
        chosen._add_parts(pools, described, {*values, *places})
        for taken, pool in ((chosen.a, pools[0]), (chosen.b, pools[1])):
            taken |= {f"{name}@attributes" for name in taken} & pool.keys()
        return chosen

    def _add_parts(
        self, pools: Sequence[Mapping[str, TensorInfo]], described: Sequence[Mapping[str, str]], names: set[str]
    ) -> None:
        """Add all parts of the objects that are chosen, and the scale, size … of tensors of which a part is chosen."""
        asked = set(self.values)
        for pool, objects, of in zip(pools, described, (self.a, self.b), strict=True):
            tensors = {name for name, what in objects.items() if isinstance(what, OtherTensor)}
            self.values |= {name for part in of for name in _above(part) if name in tensors}
            tensors &= asked
            of |= {part for part in pool if not tensors.isdisjoint(_above(part))}
            whole = {name for name, what in objects.items() if what and name in self.values}
            self.values |= {part for part in names if not whole.isdisjoint(_above(part))}


def _above(name: str) -> list[str]:
    """The paths of everything that a path lies in."""
    parts = name.split("/")
    return [ROOT, *("/".join(parts[:count]) for count in range(1, len(parts)))] if name != ROOT else []


def _objects(ck: Checkpoint) -> dict[str, str]:
    """The objects of the skeleton, each with its description in `others`."""
    # The object that is all of a file is called `file/.` in its folder, and `file` in the skeleton.
    return {name: ck.others.get(name) or ck.others.get(f"{name}/.") or what for name, what in ck.skeleton.objects()}


@dataclass(slots=True)
class _Found:
    """The result of comparing what is not a tensor."""

    differing: list[str] = field(default_factory=list)
    uncompared: dict[str, str] = field(default_factory=dict)
    compared: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    note: str = ""


def _compare_unread(first: Checkpoint, second: Checkpoint, chosen: _Chosen, tensors_only: bool, found: _Found) -> None:
    """Compare content that no reader of ours understands by its bytes; what has none to compare is named."""
    here, there = first.unread, second.unread
    for name in dict.fromkeys((*here, *there)):
        if not (name in here and name in chosen.a) and not (name in there and name in chosen.b):
            continue
        what = here.get(name) or there[name]
        if tensors_only and not isinstance(what, OtherTensor):
            found.left_out[name] = what
            continue
        a = first.fingerprint(name) if name in here else None
        b = second.fingerprint(name) if name in there else None
        # Only within one format do the same bytes mean the same, and other bytes something else.
        if a is None or b is None or first.format != second.format:
            found.uncompared[name] = what
            continue
        found.compared += 1
        if a != b:
            found.differing.append(f"{name}: {what} / other bytes")


def _compare_values(first: Checkpoint, second: Checkpoint, chosen: _Chosen, tensors_only: bool, found: _Found) -> None:
    """Compare values besides tensors, and containers; values that the other format has no place for are named."""
    for ck, other, side in ((first, second, "a"), (second, first, "b")):
        if ck.skeleton.values() and not other.skeleton.values() and other.format not in _WITH_VALUES:
            _name_values(ck, side, chosen, tensors_only, found)
            return
    a, b = (ck.skeleton.values(within_objects=True) for ck in (first, second))
    here, there = _objects(first), _objects(second)
    objects = there | here
    tensors = {name for name, what in objects.items() if isinstance(what, OtherTensor)}
    alone = here.keys() ^ there.keys()  # such an object is named, and its parts are not
    for name in dict.fromkeys((*a, *b)):
        if name not in chosen.values:
            continue
        above = _above(name)
        if tensors_only and tensors.isdisjoint((name, *above)):
            if objects.keys().isdisjoint(above):
                found.left_out[name] = objects.get(name) or describe(a[name] if name in a else b[name])
            continue
        found.compared += 1
        if not alone.isdisjoint(above):
            continue
        if name not in a or name not in b or not _same(a[name], b[name]):
            found.differing.append(f"{name}: {_shown(a, name)} / {_shown(b, name)}")
    if not tensors_only and _tells_containers(first) and _tells_containers(second):
        for name, one, two in first.skeleton.other_containers(second.skeleton):
            if name in chosen.values or name in chosen.a:  # the key of a value, a container or a tensor
                found.differing.append(f"{name}: {one} / {two}")


def _name_values(ck: Checkpoint, side: str, chosen: _Chosen, tensors_only: bool, found: _Found) -> None:
    """Name the values of the one file that holds some; only tensors of other kinds are more than values."""
    objects, unread = _objects(ck), ck.unread
    plain = 0
    for name, node in ck.skeleton.values().items():
        if name not in chosen.values or name in unread:
            continue
        what = objects.get(name) or describe(node)
        if tensors_only and not isinstance(what, OtherTensor):
            found.left_out.setdefault(name, what)
        else:
            found.uncompared.setdefault(name, what)
            plain += name not in objects
    if plain:
        told = f"{count_of(plain, 'value')} besides tensors in {side}, and none in the other file to compare with"
        found.note = f"{told}. To compare tensors alone: tensors_only=True, or --tensors-only."


def _tells_containers(ck: Checkpoint) -> bool:
    """Return True if the file distinguishes lists from dicts; names of tensors alone do not."""
    return ck.format in _WITH_VALUES or ck.skeleton.root != Skeleton.of_names(ck.tensors).root


def _same(a: Json, b: Json) -> bool:
    """Return True if two nodes have equal types and bits: 0.0 is not -0.0, and 1, 1.0 and True are three values."""
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
    node = values_[name]
    if isinstance(node, dict) and "object" in node:
        return str(node["object"])
    text = describe(node) if isinstance(node, dict) and [] in node.values() else json.dumps(node)
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
        bare.setdefault(strip_wrapper_prefixes(name), []).append(name)
    for name in a:
        candidates = [] if name in found else bare.get(strip_wrapper_prefixes(name), [])
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
    for start, stop in block_ranges(a):
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


def _compare_forms(a: TensorInfo, b: TensorInfo, pair: Match) -> TensorDiff | None:
    """The difference of two tensors of which one is listed and not read; None if shape and type are the same."""
    other_name = pair.b if pair.b != pair.a else None
    if (tuple(a.shape[axis] for axis in pair.axes) if pair.axes else a.shape) != b.shape:
        return TensorDiff(pair.a, "shape", other_name, f"{_shape(a)} / {_shape(b)}", a.numel)
    if a.dtype is not b.dtype:
        return TensorDiff(pair.a, "dtype", other_name, f"{a.dtype} / {b.dtype}", a.numel)
    return None


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
