"""Replay: the same faults again, in the same file or in the same weights of another one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad._files import exclusive
from evergrad.errors import UnknownTensor, UsageError
from evergrad.formats import Checkpoint, Match, match, open_checkpoint
from evergrad.formats.bitcast import finite, values
from evergrad.formats.byte_source import record_dry_run
from evergrad.formats.checkpoint import Bits, ProgressCallback
from evergrad.injection.faults import Fault
from evergrad.injection.injection_plan import Column, InjectionPlan, conflict_free_batches, read_numbers
from evergrad.injection.injector import CheckpointFiles, Digest, OutputSettings, prepare_injection
from evergrad.injection.log import InjectionLog
from evergrad.records import TensorInfo

_PIECE = 1 << 18  # elements whose addresses are looked at together

Rename: TypeAlias = "Mapping[str, str | Match] | Literal['auto'] | None"


def replay(
    log: InjectionLog | str | PathLike[str],
    other: str | PathLike[str],
    *,
    rename: Rename = None,
    source: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    in_place: bool = False,
    log_to: str | PathLike[str] | None = None,
    stale_checksum: bool | None = None,
    digest: Digest = "blocks",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> InjectionLog:
    """Let the faults of a log happen in another checkpoint: the same elements, the same bits aimed at.

    Nothing is drawn. Bits that were flipped are flipped, bits that were stuck are stuck, on whatever values are there;
    onto the same file that gives the same bytes. `rename` says which tensor is which where names differ: a mapping
    (to a name, or to a `Match` with the order of the axes), or "auto", which matches layers across frameworks and
    needs the file that was injected, by default where the log says it was.
    """
    log = log if isinstance(log, InjectionLog) else InjectionLog.load(log)
    given = Path(other)
    outcome = OutputSettings(
        out=None if out is None else Path(out),
        in_place=in_place,
        log=None if log_to is None else Path(log_to),
        stale_checksum=bool(log.settings.get("stale_checksum")) if stale_checksum is None else stale_checksum,
        digest=digest,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    with ExitStack() as locks:
        with record_dry_run(stale=outcome.stale_checksum) as noted, open_checkpoint(given) as ck:
            if in_place:
                locks.enter_context(exclusive(CheckpointFiles.of(ck, given).locked))
            planned = plan_replay(ck, log, _names(log, ck, rename, source))
            job = prepare_injection(
                ck,
                noted,
                given,
                replace(planned, injected=log.injected),
                outcome,
                attempts=log.attempts,
                fault=log.fault,
                settings={**log.settings, "digest": digest, "replay_of": log.digest},
                left_out={},
            )
        return job.execute(progress)


def _names(
    log: InjectionLog,
    ck: Checkpoint,
    rename: Rename,
    source: str | PathLike[str] | None,
) -> dict[str, Match]:
    """For tensors of the log that are called, or laid out, otherwise here: what they are."""
    if rename is None:
        return {}
    if rename == "auto":
        places = [Path(source)] if source is not None else [Path(log.file), Path(log.out)]
        there = next((path for path in places if path.exists()), None)
        if there is None:
            raise UsageError(
                f"{places[0]}: is not there, and matching by --rename auto (rename='auto') needs the file that was "
                f"injected. Say where it is (source=…, --source FILE), or name the tensors."
            )
        return {pair.a: pair for pair in match(there, ck).pairs}
    if not isinstance(rename, Mapping):
        raise UsageError(f"rename {rename!r:.80}: expected 'auto' or a mapping of names")
    unused = [name for name in rename if name not in {column.tensor for column in log.columns}]
    if unused:
        raise UnknownTensor(
            unused[0], [column.tensor for column in log.columns], where="rename", what="tensor of the log"
        )
    return {a: b if isinstance(b, Match) else Match(a, b) for a, b in rename.items()}


def map_column(ck: Checkpoint, column: Column, pair: Match | None) -> Column:
    """The column with the name and the numbers that it has here."""
    name = pair.b if pair is not None else column.tensor
    info = ck.tensors.get(name)
    if info is None:
        hint = f"{ck.path} (say what it is called there: rename={{…}} or 'auto', --rename)"
        raise UnknownTensor(name, ck.tensors, where=hint)
    if info.dtype is not column.dtype:
        raise UsageError(
            f"{ck.path}: {name} is {info.dtype} (the log has {column.dtype}): bits mean something else there"
        )
    numbers = _moved(ck, column, info, pair.axes if pair is not None else None)
    return Column(info.name, info.dtype, info.shape, numbers, column.aim, column.old, column.new)


def _each_byte_once(ck: Checkpoint, columns: list[Column]) -> list[Column]:
    """One column a tensor, also where two names are one here; what else lies in the same bytes is refused."""
    found: dict[str, list[Column]] = {}
    for column in columns:
        alike = (name for name in found if _are_one(ck, name, column.tensor))
        found.setdefault(next(alike, column.tensor), []).append(column)
    chains: dict[int, list[str]] = {}
    for name in found:
        if ck.tensors[name].place is not None:
            chains.setdefault(id(ck.tensors[name].neighbours), []).append(name)
    for names in chains.values():
        taken: set[int] = set()
        for name in names if len(names) > 1 else ():
            elements = np.unique(
                np.concatenate([column.numbers for column in found[name]]) // found[name][0].dtype.parts
            )
            where = _addresses_of(ck, name, elements)
            mine = set((where[:, None] + np.arange(found[name][0].dtype.itemsize)).reshape(-1).tolist())
            if taken & mine:
                raise UsageError(
                    f"{ck.path}: faults of the log meet in {name}, which shares bytes with {names[0]} there"
                )
            taken |= mine
    return [_joined(name, parts) for name, parts in found.items()]


def _are_one(ck: Checkpoint, a: str, b: str) -> bool:
    """Whether two names stand for the same elements in the same bytes."""
    if a == b:
        return True
    one, two = ck.tensors[a], ck.tensors[b]
    if one.place is None or two.place is None or one.neighbours is not two.neighbours:
        return False
    same = (one.shape, one.dtype, one.place.start) == (two.shape, two.dtype, two.place.start)
    if not same:
        return False
    for start in range(0, one.numel, _PIECE):
        stop = min(start + _PIECE, one.numel)
        first, second = ck.addresses(a, start, stop), ck.addresses(b, start, stop)
        if first is None or second is None:
            return first is second
        if not np.array_equal(first, second):
            return False
    return True


def _addresses_of(ck: Checkpoint, name: str, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The byte at which each of these elements, in ascending order, begins."""
    pieces: list[npt.NDArray[np.int64]] = []
    for piece in np.split(elements, np.flatnonzero(np.diff(elements // _PIECE)) + 1):
        start = int(piece[0]) // _PIECE * _PIECE
        where = ck.addresses(name, start, min(start + _PIECE, ck.tensors[name].numel))
        assert where is not None, "only tensors with places share bytes in part"
        pieces.append(where[piece - start])
    return np.concatenate(pieces)


def _joined(name: str, parts: list[Column]) -> Column:
    first = parts[0]
    if len(parts) == 1:
        return first
    rows = ([getattr(part, what) for part in parts] for what in ("numbers", "aim", "old", "new"))
    return Column(name, first.dtype, first.shape, *(np.concatenate(pieces) for pieces in rows))


def plan_replay(ck: Checkpoint, log: InjectionLog, names: Mapping[str, Match]) -> InjectionPlan:
    """What the faults of a log come to here; `names` are of tensors that are called or laid out otherwise."""
    fault = log.known_fault()
    elements: object = fault.elements if fault is not None else log.fault.get("elements", 1)
    aimed = [map_column(ck, column, names.get(column.tensor)) for column in log.columns]
    columns = [_repeated(ck, column, fault) for column in _each_byte_once(ck, aimed)]
    if type(elements) is not int or elements < 1 or any(len(column) % elements for column in columns):
        raise UsageError(f"{log.path}: its faults are not runs of {elements!r:.60} elements, as it says")
    changed = sum(int((column.old != column.new).reshape(-1, elements).any(axis=1).sum()) for column in columns)
    lost = sum(int((~finite(values(column.new, column.dtype))).sum()) for column in columns)
    return InjectionPlan(columns, sum(len(column) for column in columns) // elements, changed, lost)


def _repeated(ck: Checkpoint, column: Column, fault: Fault | None) -> Column:
    """What the numbers hold here, and what becomes of that."""
    cells, rows = np.unique(column.numbers, return_inverse=True)
    now = read_numbers(ck, ck.tensors[column.tensor], cells)
    old, new = np.empty_like(column.old), np.empty_like(column.new)
    for step in conflict_free_batches(rows.reshape(-1, 1), len(cells)):
        old[step] = now[rows[step]]
        new[step] = _altered(column, step, old[step], fault)
        now[rows[step]] = new[step]
    return Column(column.tensor, column.dtype, column.shape, column.numbers, column.aim, old, new)


def _altered(column: Column, rows: npt.NDArray[np.int64], old: Bits, fault: Fault | None) -> Bits:
    if fault is None:  # a user's own, of which the log knows only what it did
        flipped: Bits = column.old[rows] ^ column.new[rows]
        return old ^ flipped
    return fault.alter(old, column.aim[rows], column.dtype)


def _moved(ck: Checkpoint, column: Column, info: TensorInfo, axes: tuple[int, ...] | None) -> npt.NDArray[np.int64]:
    """The numbers of the same elements where the axes have another order."""
    if axes is not None and sorted(axes) != list(range(len(column.shape))):
        raise UsageError(f"{column.tensor}: axes {axes} are no order of the axes of shape {column.shape}")
    shape = column.shape if axes is None else tuple(column.shape[axis] for axis in axes)
    if info.shape != shape:
        expected = f"{shape}" + ("" if axes is None else f", axes {axes} of {column.shape}")
        raise UsageError(
            f"{ck.path}: {info.name} has shape {info.shape} (expected {expected}). "
            f"If its axes have another order, say so: --rename auto (rename='auto'), or axes in the map."
        )
    if axes is None:
        return column.numbers
    elements, parts = np.divmod(column.numbers, column.dtype.parts)
    places = np.unravel_index(elements, column.shape)
    moved = np.ravel_multi_index(tuple(places[axis] for axis in axes), info.shape)
    return moved * column.dtype.parts + parts
