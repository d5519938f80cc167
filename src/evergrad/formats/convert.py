"""From one format to another, exactly or not at all."""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path

from evergrad.errors import ConversionLoss, UsageError
from evergrad.formats.contract import Checkpoint, Format, OtherTensor
from evergrad.formats.durable import check_replaceable, replacing
from evergrad.formats.registry import formats, open_checkpoint
from evergrad.wording import meant

__all__ = ["convert", "left_out", "losses", "parts_of_unread", "unread_tensors"]


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
    tensors and names alone. Tensors of a kind that cannot be kept (quantised, sparse, …) are refused even then;
    `skip_unread=True` agrees to leave them out. The new file appears whole or not at all.
    """
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
        if tensors_only and not skip_unread:
            _refuse_unread(source, format.name)
        format.check_write(target)
        with replacing(target) as temporary:
            format.write(source, temporary, tensors_only=tensors_only)
    return target


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

    First content that no target keeps (`ck.others`, `ck.unkept`), then arrays that are no tensors, then all other
    values, then the container's notes where the target has no place for them.
    """
    found = {**source.others, **source.unkept}
    for name, what in source.skeleton.described_values().items():
        while name in found:
            name += "'"
        found[name] = what
    lost = set(losses(source, b, to=to))
    for key in source.metadata:
        if f"metadata {key!r}" in lost:
            found[f"metadata {key!r}"] = "a note of the container"
    return found


def _refuse_unread(source: Checkpoint, target: str) -> None:
    lost = [f"{name} ({what})" for name, what in unread_tensors(source).items()]
    if lost:
        shown = "; ".join(lost[:3]) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
        hint = "Leave them out: skip_unread=True, or --skip-unread."
        count = f"{len(lost)} tensor{'s' if len(lost) > 1 else ''} that cannot be converted"
        raise ConversionLoss(f"{source.path}: as {target} this would lose {count}: {shown}. {hint}", lost)


def losses(source: Checkpoint, b: str | PathLike[str], *, to: str | None = None) -> list[str]:
    """What writing `source` as `b` would lose, one item each; nothing is written."""
    return _target_format(Path(b), to).losses(source)


def _target_format(target: Path, to: str | None) -> Format:
    writable = {format.name: format for format in formats() if format.suffixes}
    if to is not None:
        if to not in writable:
            raise UsageError(f"unknown target format {to!r} (expected {', '.join(writable)}).{meant(to, writable)}")
        return writable[to]
    for format in writable.values():
        if target.suffix in format.suffixes:
            return format
    endings = [suffix for format in writable.values() for suffix in format.suffixes]
    raise UsageError(
        f"{target}: no format is written with the ending {target.suffix!r} (expected {', '.join(endings)})."
        f"{meant(target.suffix, endings) if target.suffix else ''} Or name it: to=…, or --to."
    )
