"""Replay: the same faults again, in the same file or in the same weights of another one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad.errors import UnknownTensor, UsageError
from evergrad.formats import Checkpoint, Match, match, open_checkpoint
from evergrad.formats.contract import Bits
from evergrad.formats.rehearsal import rehearsal
from evergrad.formats.values import finite, values
from evergrad.injection.columns import Column
from evergrad.injection.execution import Digest, Outcome, prepare
from evergrad.injection.faults import Fault
from evergrad.injection.log import InjectionLog
from evergrad.injection.plan import Plan, levels, present
from evergrad.injection.workplace import Progress, exclusive
from evergrad.records import TensorInfo

__all__ = ["Rename", "replay"]

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
    progress: Progress | None = None,
) -> InjectionLog:
    """Let the faults of a log happen in another checkpoint: the same elements, the same bits aimed at.

    Nothing is drawn. Bits that were flipped are flipped, bits that were stuck are stuck, on whatever values are there;
    onto the same file that gives the same bytes. `rename` says which tensor is which where names differ: a mapping
    (to a name, or to a `Match` with the order of the axes), or "auto", which matches layers across frameworks and
    needs the file that was injected, by default where the log says it was.
    """
    log = log if isinstance(log, InjectionLog) else InjectionLog.load(log)
    given = Path(other)
    outcome = Outcome(
        out=None if out is None else Path(out),
        in_place=in_place,
        log=None if log_to is None else Path(log_to),
        stale_checksum=bool(log.settings.get("stale_checksum")) if stale_checksum is None else stale_checksum,
        digest=digest,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    fault = log.known_fault()
    with exclusive(given) if in_place else nullcontext():
        with rehearsal(stale=outcome.stale_checksum) as noted, open_checkpoint(given) as ck:
            names = _names(log, ck, rename, source)
            columns = [_repeat(ck, column, names.get(column.tensor), fault) for column in log.columns]
            elements: object = fault.elements if fault is not None else log.fault.get("elements", 1)
            if type(elements) is not int or elements < 1 or any(len(column) % elements for column in columns):
                raise UsageError(f"{log.path}: its faults are not runs of {elements!r:.60} elements, as it says")
            changed = sum(int((column.old != column.new).reshape(-1, elements).any(axis=1).sum()) for column in columns)
            lost = sum(int((~finite(values(column.new, column.dtype))).sum()) for column in columns)
            job = prepare(
                ck,
                noted,
                given,
                Plan(columns, log.injected, changed, lost),
                outcome,
                attempts=log.attempts,
                fault=log.fault,
                settings={**log.settings, "digest": digest, "replay_of": log.digest},
                left_out={},
            )
        return job.carry_out(progress)


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
                f"{places[0]}: is not there, and matching by rename='auto' needs the file that was injected. "
                f"Say where it is (source=…, --source FILE), or name the tensors."
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


def _repeat(ck: Checkpoint, column: Column, pair: Match | None, fault: Fault | None) -> Column:
    """The column as it is here: the same elements, what they hold here, and what becomes of that."""
    name = pair.b if pair is not None else column.tensor
    info = ck.tensors.get(name)
    if info is None:
        hint = f"{ck.path} (say what it is called there: rename={{…}} or 'auto', --rename)"
        raise UnknownTensor(name, ck.tensors, where=hint)
    axes = pair.axes if pair is not None else None
    if info.dtype is not column.dtype:
        raise UsageError(
            f"{ck.path}: {name} is {info.dtype} (the log has {column.dtype}): bits mean something else there"
        )
    numbers = _moved(ck, column, info, axes)
    cells, rows = np.unique(numbers, return_inverse=True)
    now = present(ck, info, cells)
    old, new = np.empty_like(column.old), np.empty_like(column.new)
    for step in levels(rows.reshape(-1, 1), len(cells)):
        old[step] = now[rows[step]]
        new[step] = _altered(column, step, old[step], fault)
        now[rows[step]] = new[step]
    return Column(info.name, info.dtype, info.shape, numbers, column.aim, old, new)


def _altered(column: Column, rows: npt.NDArray[np.int64], old: Bits, fault: Fault | None) -> Bits:
    if fault is None:  # a user's own, of which the log knows only what it did
        flipped: Bits = column.old[rows] ^ column.new[rows]
        return old ^ flipped
    return fault.alter(old, column.aim[rows], column.dtype)


def _moved(ck: Checkpoint, column: Column, info: TensorInfo, axes: tuple[int, ...] | None) -> npt.NDArray[np.int64]:
    """The numbers of the same elements where the axes have another order."""
    shape = column.shape if axes is None else tuple(column.shape[axis] for axis in axes)
    if info.shape != shape:
        expected = f"{shape}" + ("" if axes is None else f", axes {axes} of {column.shape}")
        raise UsageError(
            f"{ck.path}: {info.name} has shape {info.shape} (expected {expected}). "
            f"If its axes have another order, say so: rename='auto', or axes in the map."
        )
    if axes is None:
        return column.numbers
    elements, parts = np.divmod(column.numbers, column.dtype.parts)
    places = np.unravel_index(elements, column.shape)
    moved = np.ravel_multi_index(tuple(places[axis] for axis in axes), info.shape)
    return moved * column.dtype.parts + parts
