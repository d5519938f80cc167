"""From one format to another, exactly or not at all."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evergrad._files import check_replaceable, replacing
from evergrad.errors import ConversionLoss, UsageError
from evergrad.formats.checkpoint import ANOTHER_TARGET, Bits, Checkpoint, Format, OtherTensor, aliases_of, check_views
from evergrad.formats.registry import formats, open_checkpoint
from evergrad.state import Skeleton
from evergrad.wording import did_you_mean

if TYPE_CHECKING:
    import torch


def convert(
    a: str | PathLike[str] | Checkpoint,
    b: str | PathLike[str],
    *,
    to: str | None = None,
    tensors_only: bool = False,
    skip_unread: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write checkpoint `a` as `b`, in the format that b's ending names (or `to` does).

    Everything is kept: tensors to the bit, nesting, key types, numbers, ties between tensors. What the target
    cannot hold raises `ConversionLoss`, which lists it, and nothing is written; `tensors_only=True` agrees to keep
    tensors and names alone. Tensors of a kind that cannot be kept (quantised, sparse, …) and of a type that the
    target lacks are refused even then; `skip_unread=True` agrees to leave them out. Views get bytes of their own;
    if they would become far larger than what they are views of, that is refused. The new file appears whole or not
    at all.
    """
    if skip_unread and not tensors_only:
        raise UsageError("skip_unread=True needs tensors_only=True (--skip-unread needs --tensors-only)")
    target = Path(b)
    format = _target_format(target, to)
    with ExitStack() as stack:
        source = a if isinstance(a, Checkpoint) else stack.enter_context(open_checkpoint(a))
        if target.exists():
            if target.is_dir() or any(target.samefile(file) for file in source.files() if file.exists()):
                raise UsageError(
                    f"{target}: cannot be written over (it is {'a folder' if target.is_dir() else 'the source'})"
                )
            check_replaceable(target)
            if not overwrite:
                raise UsageError(
                    f"{target}: exists already. Choose another name, or replace it: overwrite=True, or --overwrite."
                )
        if not target.parent.is_dir():
            raise UsageError(f"{target}: there is no folder {str(target.parent)!r}")
        unwritable = format.unwritable(source) if tensors_only else {}
        if tensors_only and not skip_unread:
            _refuse_unread(source, format.name, unwritable)
        if unwritable and len(unwritable) == len(source.tensors):
            name, why = next(iter(unwritable.items()))
            told = f"{source.path}: as {format.name} no tensor would be left: {name:.80} ({why})"
            raise ConversionLoss(f"{told}. {ANOTHER_TARGET}", [f"{name} ({why})" for name, why in unwritable.items()])
        written = _Part(source, unwritable) if unwritable else source
        _check_views(source, unwritable, tensors_only)
        format.check_write(target)
        with replacing(target) as temporary:
            format.write(written, temporary, tensors_only=tensors_only)
    return target


class _Part(Checkpoint):
    """A checkpoint without some of its tensors, to be written with `tensors_only`."""

    def __init__(self, source: Checkpoint, without: Container[str]) -> None:
        self.format, self.path, self.others, self.metadata = source.format, source.path, source.others, source.metadata
        self.tensors = {name: info for name, info in source.tensors.items() if name not in without}
        self.skeleton = Skeleton.of_names(self.tensors)
        self._source = source

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        return self._source.read_bits(name, start, stop)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        return self._source.xor(name, indices, patterns)

    def borrow(self, name: str) -> torch.Tensor:
        """Lend the tensor as the source does."""
        return self._source.borrow(name)

    def close(self) -> None:
        """Leave the source open: it belongs to the caller."""


def unwritable_tensors(source: Checkpoint, b: str | PathLike[str], *, to: str | None = None) -> dict[str, str]:
    """Tensors that the format of `b` cannot hold, by name, with why: of a type that NumPy lacks, …"""
    return _target_format(Path(b), to).unwritable(source)


def _check_views(source: Checkpoint, without: Container[str], tensors_only: bool) -> None:
    """Refuse views that would become far larger; a tied tensor is stored once where the state is kept."""
    stored_once = {} if tensors_only else aliases_of(source.skeleton, source.tensors)
    check_views(source, without={*stored_once, *(name for name in source.tensors if name in without)})


def unread_tensors(source: Checkpoint) -> dict[str, str]:
    """Tensors that no conversion keeps as what they are, by name, with what each is: quantised, sparse, …"""
    return {name: what for name, what in source.others.items() if isinstance(what, OtherTensor)}


def parts_of_unread(source: Checkpoint) -> list[str]:
    """The tensors that are listed only as parts of `unread_tensors`: the integers of a quantised tensor, …"""
    # What is all of a file is called `.`, in a folder `file/.`.
    starts = tuple(name[:-1] if name == "." or name.endswith("/.") else f"{name}/" for name in unread_tensors(source))
    return [name for name in source.tensors if name.startswith(starts)] if starts else []


def left_out(source: Checkpoint, b: str | PathLike[str], *, to: str | None = None) -> dict[str, str]:
    """Return the content that `tensors_only=True` drops when `source` is written as `b`: name → description.

    First tensors that the target has no type for, which `skip_unread=True` drops, then content that no target keeps
    (`ck.others`, `ck.unkept`), then arrays that are no tensors, then all other values, then the container's notes
    where the target has no place for them.
    """
    found = {**unwritable_tensors(source, b, to=to), **source.others, **source.unkept}
    for name, what in source.skeleton.described_values().items():
        while name in found:
            name += "'"
        found[name] = what
    lost = set(_target_format(Path(b), to).losses(source))
    for key in source.metadata:
        if f"metadata {key!r}" in lost:
            found[f"metadata {key!r}"] = "a note of the container"
    return found


def _refuse_unread(source: Checkpoint, target: str, unwritable: Mapping[str, str]) -> None:
    lost = [f"{name} ({what})" for name, what in unread_tensors(source).items()]
    lost += [f"{name:.80} ({why})" for name, why in unwritable.items()]
    if lost:
        shown = "; ".join(lost[:3]) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
        hint = "Leave them out: skip_unread=True, or --skip-unread." + (f" {ANOTHER_TARGET}" if unwritable else "")
        count = f"{len(lost)} tensor{'s' if len(lost) > 1 else ''} that cannot be converted"
        raise ConversionLoss(f"{source.path}: as {target} this would lose {count}: {shown}. {hint}", lost)


def losses(source: Checkpoint, b: str | PathLike[str], *, to: str | None = None) -> list[str]:
    """What writing `source` as `b` would lose, one item each; nothing is written."""
    check_views(source, without=aliases_of(source.skeleton, source.tensors))
    return _target_format(Path(b), to).losses(source)


def _target_format(target: Path, to: str | None) -> Format:
    writable = {format.name: format for format in formats() if format.suffixes}
    if to is not None:
        if to not in writable:
            raise UsageError(
                f"unknown target format {to!r} (expected {', '.join(writable)}).{did_you_mean(to, writable)}"
            )
        return writable[to]
    for format in writable.values():
        if target.suffix in format.suffixes:
            return format
    endings = [suffix for format in writable.values() for suffix in format.suffixes]
    raise UsageError(
        f"{target}: no format is written with the ending {target.suffix!r} (expected {', '.join(endings)})."
        f"{did_you_mean(target.suffix, endings) if target.suffix else ''} Or name it: to=…, or --to."
    )
