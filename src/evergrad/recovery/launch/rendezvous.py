"""Which of several machines this is, and where the job's head can be reached: options, Slurm, head.json.

One launcher runs on each machine. Node 0 is the head: it hosts the store, and when that listens it writes head.json
into the run's folder, which all machines share. Everybody else waits for that file.

Argument > environment > Slurm: `--node-rank`, EVERGRAD_NODE_RANK, SLURM_PROCID; `--nnodes`, SLURM_NNODES.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from evergrad._files import replacing
from evergrad.errors import FileAccessError, UsageError
from evergrad.records import Json

HEAD_FILE = "head.json"
_SCHEMA_VERSION = 1
_MOST_NAMES = 1 << 16


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Which node of how many this launcher is, and what they are called."""

    rank: int
    names: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """Whether it is the one that hosts the store."""
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """Where the head of a job is, and what it was launched with."""

    host: str
    """A number, not a name: looking names up may take long, or fail, on some of the machines."""
    port: int
    machine: str
    pid: int
    settings: dict[str, Json]

    def write(self, run: Path) -> None:
        """Into the run's folder, whole or not at all."""
        with replacing(run / HEAD_FILE) as path:
            path.write_text(json.dumps(asdict(self) | {"schema_version": _SCHEMA_VERSION}, indent=2) + "\n")

    @classmethod
    def read(cls, run: Path) -> HeadAddress | None:
        """From the run's folder; None if it is not there yet."""
        path = run / HEAD_FILE
        try:
            # To look at the folder first makes a network file system ask again whether the file is there.
            text = path.read_bytes() if HEAD_FILE in os.listdir(run) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FileAccessError(path, f"cannot be read: {error.strerror}") from None
        if text is None:
            return None
        try:
            values = json.loads(text)
            if values.pop("schema_version") != _SCHEMA_VERSION:
                raise ValueError("another version")
            head = cls(**values)
            if not isinstance(head.host, str) or type(head.port) is not int or not isinstance(head.settings, dict):
                raise ValueError("host, port and settings are a text, a number and a table")
            return head
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FileAccessError(path, f"is no head file of this version of evergrad: {error}") from None

    def check(self, settings: Mapping[str, Json], option_of: Mapping[str, str]) -> None:
        """Refuse to be part of another job: everything that was asked for must be the same here as at the head."""
        for name, value in self.settings.items():
            if name != "node_names" and settings.get(name) != value:  # the names are the head's to give
                option = option_of.get(name, "--" + name.replace("_", "-"))
                raise UsageError(
                    f"{option}: expected what the head of this job was started with on {self.machine}, {value!r}, "
                    f"found {settings.get(name)!r}. Start every node by the same command"
                )


def node_identity(num_nodes: int | None, rank: int | None, env: Mapping[str, str]) -> NodeIdentity:
    """What the options say, where there are none the environment, or Slurm."""
    by_slurm = num_nodes is None and "SLURM_NNODES" in env
    if rank is None:
        said = next((name for name in ("EVERGRAD_NODE_RANK", "SLURM_PROCID") if name in env), None)
        if said is None:
            raise UsageError(
                "--multinode: expected --node-rank I or EVERGRAD_NODE_RANK, or to be started by srun, found none"
            )
        rank = _number(said, env[said])
    if num_nodes is None:
        if not by_slurm:
            raise UsageError("--multinode: expected --nnodes N, or to be started by srun, found neither")
        num_nodes = _number("SLURM_NNODES", env["SLURM_NNODES"])
        tasks = _number("SLURM_NTASKS", env.get("SLURM_NTASKS", str(num_nodes)))
        if tasks != num_nodes:
            raise UsageError(
                f"--multinode: expected one launcher a node, found {tasks} on {num_nodes} nodes. "
                f"Start it by srun -N{num_nodes} --ntasks-per-node=1"
            )
    if num_nodes < 1:
        raise UsageError(f"--nnodes: expected the number of nodes, 1 or more, found {num_nodes}")
    if not 0 <= rank < num_nodes:
        raise UsageError(f"--node-rank: expected 0 to {num_nodes - 1}, as there are {num_nodes} nodes, found {rank}")
    return NodeIdentity(rank, _names(num_nodes, rank, env) if by_slurm else numbered(num_nodes))


def numbered(num_nodes: int) -> tuple[str, ...]:
    """What nodes are called that have no names: n0, n1 …"""
    return tuple(f"n{index}" for index in range(num_nodes))


def expanded(text: str) -> list[str]:
    """The names in one of Slurm's node lists.

    >>> expanded("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", part):
            ends = [plain] if plain else [one for piece in ranges.split(",") for one in _range(piece)]
            found = [name + end for name in found for end in ends]
            if len(found) > _MOST_NAMES:
                raise UsageError(f"SLURM_STEP_NODELIST: expected at most {_MOST_NAMES} nodes, found more")
        names += found
    return names


def await_head(run: Path, timeout_s: float, pause: Callable[[float], None] = time.sleep) -> HeadAddress:
    """Wait until the head has written where it is; `pause` may raise to end that."""
    end_s = time.monotonic() + timeout_s
    while (head := HeadAddress.read(run)) is None:
        if time.monotonic() >= end_s:
            where = "it is empty or of something else" if run.is_dir() else "there is no such folder"
            raise UsageError(
                f"--out {run}: no {HEAD_FILE} after {timeout_s:g} s ({where}). Does node 0 run, and do all nodes share "
                "this folder?"
            )
        pause(0.05)
    return head


def _range(piece: str) -> list[str]:
    first, _, last = piece.partition("-")
    if not last:
        return [first]
    if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < _MOST_NAMES):
        raise UsageError(f"SLURM_STEP_NODELIST: expected a range as 08-10, found {piece!r}")
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def _names(num_nodes: int, rank: int, env: Mapping[str, str]) -> tuple[str, ...]:
    """Slurm's names, if they are certain: one for each node, in the order of the launchers."""
    found = expanded(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "")
    is_certain = len(set(found)) == len(found) == num_nodes and env.get("SLURMD_NODENAME") == found[rank]
    return tuple(found) if is_certain else numbered(num_nodes)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}: expected a number, found {text!r}") from None
