"""`evergrad inspect`: what is in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, console, print_json, printable, shape, size

if TYPE_CHECKING:
    from rich.tree import Tree

    from evergrad.formats import Checkpoint
    from evergrad.records import TensorInfo

__all__ = ["EPILOG", "inspect"]

EPILOG = (
    "Examples:\n\n  evergrad inspect model.pt --tree\n\n"
    "  evergrad inspect checkpoint-500/ --where role:optimizer --json\n\n"
    "Exit codes: 0 fine · 2 usage or unreadable input."
)
_SHOWN_OTHERS = 5


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint: any file or folder.")],
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
    (Keras, Chainer, PyTorch), .keras, TensorFlow, npz, npy. Orbax folders are
    listed, and not read. Nothing in the file is executed.
    """
    from evergrad.formats import open_checkpoint
    from evergrad.state import select

    with open_checkpoint(file) as ck:
        infos = [ck.tensors[name] for name in (select(ck.tensors, where) if where else ck.tensors)]
        if as_json:
            print_json(
                {
                    "format": ck.format,
                    "tensors": [info.to_json() for info in infos],
                    "total_bytes": sum(info.nbytes for info in infos),
                    **({"others": dict(ck.others)} if ck.others else {}),
                }
            )
        elif tree:
            console().print(_tree(ck, infos))
            _print_summary(ck, infos)
        else:
            _print_table(infos)
            _print_summary(ck, infos)


def _print_table(infos: list[TensorInfo]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", justify="right")
    table.add_column("dtype")
    table.add_column("role")
    table.add_column("size", justify="right", no_wrap=True)
    shared = any(info.neighbours for info in infos)
    if shared:
        table.add_column("shares bytes with", overflow="fold")
    for info in infos:
        row = [info.name, shape(info.shape), info.dtype.value, info.role.value, size(info.nbytes)]
        table.add_row(*(Text(printable(cell)) for cell in [*row, *([_few(info.shares)] if shared else [])]))
    console().print(table)


def _print_summary(ck: Checkpoint, infos: list[TensorInfo]) -> None:
    total = sum(info.nbytes for info in infos)
    left_out = f" of {len(ck.tensors)}" if len(infos) != len(ck.tensors) else ""
    plural = "s" if len(infos) != 1 or left_out else ""
    print(f"\n{printable(ck.format)}: {len(infos)}{left_out} tensor{plural}, {size(total)}")
    for name, what in list(ck.others.items())[:_SHOWN_OTHERS]:
        print(f"left alone: {printable(name)} ({printable(what)})")
    if len(ck.others) > _SHOWN_OTHERS:
        print(f"left alone: {len(ck.others) - _SHOWN_OTHERS} more objects")


def _tree(ck: Checkpoint, infos: list[TensorInfo]) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text(printable(ck.path), style="bold"))
    branches: dict[str, Tree] = {}
    for info in infos:
        *parents, last = info.name.split("/")
        branch, path = root, ""
        for parent in parents:
            path = f"{path}/{parent}"
            if path not in branches:
                branches[path] = branch.add(Text(printable(parent), style="bold"))
            branch = branches[path]
        told = f"  {shape(info.shape)} {info.dtype} {size(info.nbytes)}"
        branch.add(Text.assemble(printable(last), (told, "dim")))
    return root


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
