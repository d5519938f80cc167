"""`evergrad inspect`, `verify`, `diff`, `convert`: checkpoint files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import (
    JsonOption,
    complete_words,
    given_path,
    print_json,
    print_rows,
    print_some,
    printable,
    progress,
    shape,
    size,
)
from evergrad.wording import count_of

if TYPE_CHECKING:
    from evergrad.formats import Checkpoint
    from evergrad.formats.verify import TensorVerdict, Verification
    from evergrad.records import Check, Comparison, Json, TensorDiff, TensorInfo


EPILOG_INSPECT = (
    "Examples:\n\n  evergrad inspect model.pt --tree\n\n"
    "  evergrad inspect checkpoint-500/ --where role:optimizer --json\n\n"
    "Exit codes: 0 fine · 2 usage or unreadable input."
)
_SHOWN_OTHERS = 5
_ROWS = 1000  # of the JSON document, written at a time


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=given_path, help="A checkpoint: any file or folder.")],
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only these: a name (with all below it), a glob, role:ROLE or re:REGEX. Repeatable."),
    ] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show the nesting instead of a table.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the tensors of a checkpoint, without reading them.

    Formats are recognised by content: torch (zip and old), Lightning,
    safetensors (single and sharded); folders of Transformers' Trainer,
    DeepSpeed ZeRO, torch.distributed.checkpoint (DCP), and plain ones; HDF5
    (Keras, Chainer, PyTorch), .keras, TensorFlow (also a SavedModel), npz, npy.
    Orbax folders are listed, and not read; files of other formats are named.
    Nothing in the file is executed.
    """
    from evergrad.formats import open_checkpoint
    from evergrad.state import select

    with open_checkpoint(file) as ck:
        infos = [ck.tensors[name] for name in (select(ck.tensors, where) if where else ck.tensors)]
        if as_json:
            _print_json(ck, infos)
        elif tree:
            branches = _Branch.of(infos)
            print_some(branches.lines(printable(ck.path)), 1 + branches.size())
            _print_summary(ck, infos)
        else:
            _print_table(infos)
            _print_summary(ck, infos)


def _print_json(ck: Checkpoint, infos: list[TensorInfo]) -> None:
    """One JSON document, written row by row: as a whole it would take ten times the memory of the listing."""
    write = sys.stdout.write
    write(f'{{"format": {json.dumps(ck.format)}, "tensors": [')
    for start in range(0, len(infos), _ROWS):
        write((", " if start else "") + ", ".join(map(_json_row, infos[start : start + _ROWS])))
    write(f'], "total_bytes": {sum(info.nbytes for info in infos)}')
    if ck.others:
        write(f', "others": {json.dumps(dict(ck.others))}')
    if arrays := ck.arrays:
        write(f', "arrays": {json.dumps(arrays)}')
    if ck.unindexed:
        write(f', "unindexed": {json.dumps(list(ck.unindexed))}')
    write("}\n")


def _json_row(info: TensorInfo) -> str:
    """The same as `json.dumps(info.to_json())`, in a quarter of the time."""
    if info.read_only or info.neighbours:
        return json.dumps(info.to_json())
    return (
        f'{{"name": {encode_basestring_ascii(info.name)}, "shape": {list(info.shape)}, "dtype": "{info.dtype.value}", '
        f'"role": "{info.role.value}", "nbytes": {info.nbytes}}}'
    )


def _print_table(infos: list[TensorInfo]) -> None:
    columns = ["tensor", "shape", "dtype", "role", "size"]
    shared = any(info.neighbours for info in infos)

    def cells(info: TensorInfo) -> list[str]:
        row = [info.name, shape(info.shape), info.dtype.value, info.role.value, size(info.nbytes)]
        return [*row, _few(info.shares)] if shared else row

    print_rows([*columns, "shares bytes with"] if shared else columns, infos, cells, right=("shape", "size"))


def _print_summary(ck: Checkpoint, infos: list[TensorInfo]) -> None:
    total = sum(info.nbytes for info in infos)
    left_out = f" of {len(ck.tensors)}" if len(infos) != len(ck.tensors) else ""
    plural = "s" if len(infos) != 1 or left_out else ""
    print(f"\n{printable(ck.format)}: {len(infos)}{left_out} tensor{plural}, {size(total)}")
    for name, what in list(ck.others.items())[:_SHOWN_OTHERS]:
        print(f"left alone: {printable(name)} ({printable(what)})")
    if len(ck.others) > _SHOWN_OTHERS:
        print(f"left alone: {len(ck.others) - _SHOWN_OTHERS} more objects; --json names all")
    arrays = ck.arrays
    for name, what in list(arrays.items())[:_SHOWN_OTHERS]:
        print(f"not listed as a tensor: {printable(name)} ({printable(what)})")
    if len(arrays) > _SHOWN_OTHERS:
        print(f"not listed as a tensor: {len(arrays) - _SHOWN_OTHERS} more arrays; --json names all")
    if ck.unindexed:
        print(f"not in the index: {printable(_few(tuple(ck.unindexed)))}")
    fixed = [info.name for info in infos if info.read_only]
    if fixed:
        print(f"cannot be altered in place: {printable(_few(tuple(fixed)))} ({ck.tensors[fixed[0]].read_only})")


class _Branch:
    """The tensors and branches below one key, in the order in which they come."""

    __slots__ = ("branches", "children")

    def __init__(self) -> None:
        self.children: list[tuple[str, _Branch | TensorInfo]] = []
        self.branches: dict[str, _Branch] = {}

    @classmethod
    def of(cls, infos: list[TensorInfo]) -> _Branch:
        """The nesting that the names have."""
        root = cls()
        for info in infos:
            *parents, last = info.name.split("/")
            branch = root
            for parent in parents:
                below = branch.branches.get(parent)
                if below is None:
                    below = branch.branches[parent] = cls()
                    branch.children.append((parent, below))
                branch = below
            branch.children.append((last, info))
        return root

    def size(self) -> int:
        """Number of lines below this one."""
        waiting, count = [self], 0
        while waiting:
            branch = waiting.pop()
            count += len(branch.children)
            waiting.extend(branch.branches.values())
        return count

    def lines(self, title: str) -> Iterator[str]:
        """The tree as text, line by line; names nest as deep as they like."""
        yield title
        open_: list[tuple[Iterator[tuple[str, _Branch | TensorInfo]], int, str]] = []
        open_.append((iter(self.children), len(self.children), ""))
        while open_:
            children, left, indent = open_.pop()
            if not left:
                continue
            name, child = next(children)
            open_.append((children, left - 1, indent))
            fork, below = ("├── ", "│   ") if left > 1 else ("└── ", "    ")
            if isinstance(child, _Branch):
                yield f"{indent}{fork}{printable(name)}"
                open_.append((iter(child.children), len(child.children), indent + below))
            else:
                told = f"{shape(child.shape)} {child.dtype} {size(child.nbytes)}"
                yield f"{indent}{fork}{printable(name)}  {told}"


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


# `evergrad verify`: is a checkpoint sound?

EPILOG_VERIFY = (
    "Examples:\n\n  evergrad verify model.pt\n\n"
    "  evergrad verify checkpoint-500/ --where role:optimizer --strict --json\n\n"
    "Exit codes: 0 nothing wrong · 1 something is, or something could not be read and has no checksum, and is named, "
    "or a version has no digests of its capture (with --strict: or a tensor has no checksum) · "
    "2 usage or unreadable input."
)
_SHOWN = 20


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=given_path, help="A checkpoint: any file or folder.")],
    where: Annotated[list[str] | None, typer.Option(help="Only these tensors; as in inspect. Repeatable.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A tensor without a checksum counts as wrong.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show sound tensors too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Look for damage: checksums that do not hold, NaN and infinities, values that no training makes.

    Where a format has no checksums (safetensors, npy, plain HDF5), a flipped
    low bit leaves no trace: such tensors are "unknown", not "ok".
    """
    from evergrad.formats import verify as verify_checkpoint

    with progress("verifying") as advance:
        verification = verify_checkpoint(file, where=where, progress=advance)
    if as_json:
        print_json(verification.to_json())
    else:
        _print_verify(verification, show_all)
    if verification.nothing_checked:
        return 1 if strict else 0
    if verification.unverified or verification.doubts:
        return 1
    return 1 if verification.verdict in _wrong(strict) else 0


def _print_verify(verification: Verification, show_all: bool) -> None:
    rows = verification.tensors if show_all else verification.wrong
    parts = {part: check for part, check in verification.container.items() if show_all or check in _wrong(False)}

    def cells(row: TensorVerdict | tuple[str, Check]) -> tuple[str, str, str, str, str]:
        if isinstance(row, tuple):
            part, check = row
            what = "its check failed" if check in _wrong(False) else "no tensor"
            return part, check.value, check.value, "", what
        return row.name, row.verdict.value, row.checksum.value, row.values.value, _what(row)

    if rows or parts:
        both: list[TensorVerdict | tuple[str, Check]] = [*rows, *parts.items()]
        print_rows(("tensor", "verdict", "checksum", "values", "what"), both, cells)
        print()
    for name, check in verification.others.items():
        if check in _wrong(False):
            print(f"{check}: {printable(name)}, which is listed and not read: its checksum does not hold")
    doubted = [row for row in verification.tensors if row.doubt]
    for row in doubted[:_SHOWN]:
        print(f"unknown: {printable(row.name)} ({printable(row.doubt)})")
    if len(doubted) > _SHOWN:
        print(f"unknown: {len(doubted) - _SHOWN} more; --json names all")
    for name, what in list(verification.unverified.items())[:_SHOWN]:
        print(f"not verified: {printable(name)} ({printable(what)})")
    if len(verification.unverified) > _SHOWN:
        print(f"not verified: {len(verification.unverified) - _SHOWN} more; --json names all")
    for name, why in list(verification.doubts.items())[:_SHOWN]:
        print(f"unverified: {printable(name)} ({printable(why)})")
    if len(verification.doubts) > _SHOWN:
        print(f"unverified: {len(verification.doubts) - _SHOWN} more; --json names all")
    print(printable(_summary_verify(verification)))


def _what(row: TensorVerdict) -> str:
    """The reason; begun with the tensor's name where it points at one of its elements."""
    if row.reason.startswith("["):
        return f"{row.name}{row.reason}"
    return f"{row.name} {row.reason}" if row.reason.startswith("= ") else row.reason


def _summary_verify(verification: Verification) -> str:
    from evergrad.records import Check

    if verification.nothing_checked:
        sound = sum(check is Check.OK for check in verification.container.values())
        return f"nothing to verify: {verification.format}, no tensors" + (
            f" ({count_of(sound, 'other part')} with a checksum that holds)" if sound else ""
        )
    tensors = verification.tensors
    bad_parts = sum(check in _wrong(False) for check in verification.container.values())
    doubted = sum(bool(tensor.doubt) for tensor in tensors)
    unsealed = sum(tensor.checksum == "unknown" for tensor in tensors) - doubted
    told = [f"{len(verification.wrong)} of {len(tensors)} tensors wrong"]
    if bad_parts:
        told.append(f"{bad_parts} of {len(verification.container)} other parts wrong")
    if verification.unverified:
        told.append(f"{len(verification.unverified)} more not verified")
    if verification.doubts:
        told.append(f"{unsealed} without a digest from the time of the capture")
    elif unsealed:
        told.append(f"{unsealed} without a checksum" if unsealed < len(tensors) else "no checksums in this format")
    if doubted:
        told.append(f"{doubted} with checksums for a part only")
    return f"{verification.verdict}: {verification.format}, {', '.join(told)}"


def _wrong(strict: bool) -> tuple[str, ...]:
    return ("failed", "degraded", "unknown") if strict else ("failed", "degraded")


# `evergrad diff`: how two checkpoints differ.

_SHOWN_VALUES = 20

EPILOG_DIFF = (
    "Examples:\n\n  evergrad diff before.pt after.pt\n\n"
    "  evergrad diff model.pt model.safetensors --where 'model/**'\n\n"
    "  evergrad diff model.pt model.npz --tensors-only\n\n"
    "Exit codes: 0 the same, bit for bit · 1 different, or unknown: something could not be compared, and is named, or "
    "there was nothing to compare · 2 usage or unreadable input."
)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", parser=given_path, help="A checkpoint: any file or folder.")],
    b: Annotated[
        Path, typer.Argument(metavar="B", parser=given_path, help="Another one, in the same or another format.")
    ],
    where: Annotated[
        list[str] | None, typer.Option(help="Only these tensors and values; as in inspect. Repeatable.")
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values besides tensors, as convert --tensors-only does.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show equal tensors too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Compare two checkpoints tensor by tensor, across formats.

    Equal means bit for bit; values besides tensors count as well. The `module.`
    and `_orig_mod.` prefixes of DDP and torch.compile are ignored. Where no name
    is shared, layers are matched by shape and order. What cannot be compared is
    named, and makes the verdict "unknown": values too, if the other format holds
    none, unless --tensors-only leaves them out.
    """
    from evergrad.formats import compare

    with progress("comparing") as advance:
        comparison = compare(a, b, where=where, tensors_only=tensors_only, progress=advance)
    if as_json:
        print_json(comparison.to_json())
    else:
        _print_diff(comparison, show_all)
    return 0 if comparison.equal else 1


def _print_diff(comparison: Comparison, show_all: bool) -> None:
    if comparison.note:
        print(printable(comparison.note))
    rows = comparison.tensors if show_all else comparison.different
    if rows:
        columns = ("tensor", "verdict", "changed", "max |Δ|", "non-finite")
        print_rows(
            columns,
            rows,
            lambda row: (row.name, _verdict(row), _changed(row), _delta(row), _nonfinite(row)),
            right=columns[2:],
        )
        print()
    if comparison.values:
        print("values:")
        for line in comparison.values[:_SHOWN_VALUES]:
            print(f"  {printable(line)}")
        if len(comparison.values) > _SHOWN_VALUES:
            print(f"  and {len(comparison.values) - _SHOWN_VALUES} more")
        print()
    for name, what in list(comparison.uncompared.items())[:_SHOWN_VALUES]:
        print(f"not compared: {printable(name)} ({printable(what)})")
    if len(comparison.uncompared) > _SHOWN_VALUES:
        print(f"not compared: {len(comparison.uncompared) - _SHOWN_VALUES} more; --json names all")
    print(_summary_diff(comparison))


def _summary_diff(comparison: Comparison) -> str:
    left_out = len(comparison.left_out)
    more = f"; {count_of(left_out, 'value')} besides tensors {'were' if left_out > 1 else 'was'} not compared"
    return _told(comparison) + (more if left_out else "")


def _told(comparison: Comparison) -> str:
    tensors, values, rest = len(comparison.tensors), len(comparison.values), len(comparison.uncompared)
    if not tensors and not comparison.compared and not values and not rest:
        return "nothing to compare: no tensors" + ("" if comparison.left_out else " and no values")
    compared = count_of(comparison.compared, "value") if comparison.compared else ""
    alike = " and ".join(filter(None, [f"{tensors} tensors" if tensors else "", compared]))
    if comparison.equal:
        return f"equal: all {alike}, bit for bit"
    missed = f"{rest} more could not be compared" if rest else ""
    if comparison.verdict == "unknown":
        return f"unknown: {alike} are equal, {missed}" if alike else f"unknown: {missed.replace(' more', '')}"
    told = f", {values} value{'s' if values != 1 else ''}" if values else ""
    return f"different: {len(comparison.different)} of {tensors} tensors{told}" + (f"; {missed}" if missed else "")


def _verdict(row: TensorDiff) -> str:
    name = f" (there: {row.other_name})" if row.other_name else ""
    return f"{row.status} {row.detail}".strip() + name


def _changed(row: TensorDiff) -> str:
    return f"{row.changed:,} of {row.numel:,}" if row.changed else ""


def _delta(row: TensorDiff) -> str:
    return f"{row.max_abs:.3g}" if row.changed else ""


def _nonfinite(row: TensorDiff) -> str:
    return f"{row.nonfinite_a:,} → {row.nonfinite_b:,}" if row.nonfinite_a or row.nonfinite_b else ""


# `evergrad convert`: from one format to another.

EPILOG_CONVERT = (
    "Examples:\n\n  evergrad convert model.pt model.safetensors\n\n"
    "  evergrad convert checkpoint-500/ all.pt --tensors-only\n\n"
    "  evergrad convert model.pt model.npz --dry-run\n\n"
    "Exit codes: 0 written · 1 with --skip-unread: written without some tensors, which are named; with --dry-run: "
    "something would be lost · "
    "2 usage, unreadable input, or something would be lost (nothing is written then)."
)


def convert(
    a: Annotated[Path, typer.Argument(metavar="A", parser=given_path, help="A checkpoint: any file or folder.")],
    b: Annotated[
        Path, typer.Argument(metavar="B", parser=given_path, help="The file to write; its ending names the format.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="The format, if the ending does not tell: torch-zip, safetensors, hdf5, npz, npy.",
            autocompletion=complete_words("torch-zip", "safetensors", "hdf5", "npz", "npy"),
        ),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Agree to keep tensors and names, and nothing else.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace B if it exists.")] = False,
    skip_unread: Annotated[
        bool,
        typer.Option(
            "--skip-unread", help="With --tensors-only: leave out tensors that cannot be converted (exit 1 if any)."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be lost (exit 1 if something); write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Convert a checkpoint exactly, or refuse and say what would be lost.

    Tensors stay the same to the bit; nesting, key types, numbers and tied tensors are kept too.
    Tensors of other kinds (quantised, sparse, …), and of types that the target lacks (bfloat16 in npz), are
    refused, also with --tensors-only, unless --skip-unread leaves them out.
    """
    from evergrad import formats
    from evergrad.errors import UsageError

    if skip_unread and not tensors_only:
        raise UsageError("--skip-unread needs --tensors-only")
    with formats.open_checkpoint(a) as source:
        if dry_run:
            losses = formats.losses(source, b, to=to)
            if as_json:
                print_json({"out": str(b), "losses": list(losses)})
            else:
                print("\n".join(f"would lose: {printable(loss)}" for loss in losses) or "nothing would be lost")
            return 1 if losses else 0
        written = formats.convert(
            source, b, to=to, tensors_only=tensors_only, skip_unread=skip_unread, overwrite=overwrite
        )
        left_out = formats.left_out(source, b, to=to) if tensors_only else {}
        unread = formats.unread_tensors(source) if tensors_only else {}
        unwritable = formats.unwritable_tensors(source, b, to=to) if tensors_only else {}
        kept = {name: info.nbytes for name, info in source.tensors.items() if name not in unwritable}
        parts = {name: kept[name] for name in formats.parts_of_unread(source) if name in kept} if unread else {}
        whole = [nbytes for name, nbytes in kept.items() if name not in parts]
    if as_json:
        more: dict[str, Json] = {"left_out": dict(left_out)} if left_out else {}
        if parts:
            more |= {"parts": len(parts), "parts_bytes": sum(parts.values())}
        print_json({"out": str(written), "tensors": len(whole), "total_bytes": sum(whole), **more})
    else:
        for name, what in list(left_out.items())[:_SHOWN]:
            print(f"left out: {printable(name)} ({printable(what)})")
        if len(left_out) > _SHOWN:
            print(f"left out: {len(left_out) - _SHOWN} more; --json names all")
        told = [f"{count_of(len(whole), 'tensor')}, {size(sum(whole))}"]
        if parts:
            told.append(f"{count_of(len(parts), 'part')} of tensors that are left out, {size(sum(parts.values()))}")
        if left_out:
            values = len(left_out) - len(unwritable)
            told += [f"{count_of(len(unwritable), 'tensor')} left out"] if unwritable else []
            told += [f"{count_of(values, 'value')} left out"] if values else []
        print(f"{printable(written)}: {'; '.join(told)}")
    return 1 if unread or unwritable else 0
