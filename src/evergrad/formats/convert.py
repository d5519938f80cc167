"""From one format to another, exactly or not at all."""

from __future__ import annotations

from contextlib import ExitStack
from os import PathLike
from pathlib import Path

from evergrad.errors import UsageError, nearest
from evergrad.formats.contract import Checkpoint, Format
from evergrad.formats.durable import replacing
from evergrad.formats.registry import formats, open_checkpoint

__all__ = ["convert", "losses"]


def convert(
    a: str | PathLike[str] | Checkpoint,
    b: str | PathLike[str],
    *,
    to: str | None = None,
    tensors_only: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write checkpoint `a` as `b`, in the format that b's ending names (or `to` does).

    Everything is kept: tensors to the bit, nesting, key types, numbers, ties between tensors. What the target
    cannot hold raises `ConversionLoss`, which lists it, and nothing is written; `tensors_only=True` agrees to keep
    tensors and names alone. The new file appears whole or not at all.
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
            if not overwrite:
                raise UsageError(
                    f"{target}: exists already. Choose another name, or replace it: overwrite=True, or --overwrite."
                )
        if not target.parent.is_dir():
            raise UsageError(f"{target}: there is no folder {str(target.parent)!r}")
        with replacing(target) as temporary:
            format.write(source, temporary, tensors_only=tensors_only)
    return target


def losses(source: Checkpoint, b: str | PathLike[str], *, to: str | None = None) -> list[str]:
    """What writing `source` as `b` would lose, one item each; nothing is written."""
    return _target_format(Path(b), to).losses(source)


def _target_format(target: Path, to: str | None) -> Format:
    writable = {format.name: format for format in formats() if format.suffixes}
    if to is not None:
        if to not in writable:
            close = nearest(to, writable, count=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"unknown target format {to!r} (expected {', '.join(writable)}).{hint}")
        return writable[to]
    for format in writable.values():
        if target.suffix in format.suffixes:
            return format
    endings = ", ".join(suffix for format in writable.values() for suffix in format.suffixes)
    raise UsageError(
        f"{target}: no format is written with the ending {target.suffix!r} (expected {endings}). "
        "Or name it: to=…, or --to."
    )
