"""Digests combined: tensor → module → role → root. Ranks compare the root, and descend only where it differs.

    root ── model ───── model/layer4.0.conv1 ── model/layer4.0.conv1.weight
         └─ optimizer ─ optimizer/state/0 ───── optimizer/state/0/exp_avg

Names are part of every digest above them, so a tensor that one rank has and another lacks is a difference, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from evergrad.recovery.guard.digests import digest_bytes
from evergrad.recovery.transport import Group

SIZE = 16
"""Bytes of a digest."""


@dataclass(slots=True)
class DigestTree:
    """The digests of one rank, at every level."""

    leaves: dict[str, bytes]
    modules: dict[str, bytes] = field(init=False)
    roles: dict[str, bytes] = field(init=False)
    root: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.modules = _combined({path: (module_of(path), digest) for path, digest in self.leaves.items()})
        self.roles = _combined({path: (role_of(path), digest) for path, digest in self.modules.items()})
        self.root = _combined({path: ("", digest) for path, digest in self.roles.items()}).get("", bytes(SIZE))

    @property
    def names(self) -> bytes:
        """The digest of all paths."""
        return digest_bytes("\n".join(sorted(self.leaves)).encode("utf-8", "surrogatepass"))

    def find(self, group: Group) -> dict[str, list[bytes]]:
        """The leaves in which ranks differ, with every rank's digest; all ranks have the same paths.

        Every rank calls it, and gets the same.
        """
        wrong = differing(group, self.roles, sorted(self.roles))
        wrong = differing(group, self.modules, [path for path in sorted(self.modules) if role_of(path) in wrong])
        return differing(group, self.leaves, [path for path in sorted(self.leaves) if module_of(path) in wrong])


def differing(group: Group, digests: Mapping[str, bytes], paths: Sequence[str]) -> dict[str, list[bytes]]:
    """Of these paths those in which ranks differ, with every rank's digest."""
    rows = gather_digests(group, b"".join(digests[path] for path in paths))
    found = {}
    for number, path in enumerate(paths):
        column = [row[number * SIZE : (number + 1) * SIZE] for row in rows]
        if len(set(column)) > 1:
            found[path] = column
    return found


def gather_digests(group: Group, mine: bytes) -> list[bytes]:
    """What every rank has, by rank; as many bytes on each."""
    rows = torch.zeros(group.size, len(mine), dtype=torch.uint8)
    if not mine:
        return [b""] * group.size
    rows[group.rank] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    group.all_reduce(rows).wait()  # nobody else writes this row: the sum is the row
    return [row.numpy().tobytes() for row in rows]


def gather_json(group: Group, mine: Any) -> list[Any]:
    """What every rank says, by rank; of any length."""
    text = json.dumps(mine).encode()
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(text)
    group.all_reduce(sizes).wait()
    longest = int(sizes.max())
    rows = gather_digests(group, text.ljust(longest))
    return [json.loads(row[:size]) for row, size in zip(rows, sizes.tolist(), strict=True)]


def module_of(path: str) -> str:
    """The path of what a tensor belongs to.

    >>> module_of("model/layer4.0.conv1.weight"), module_of("optimizer/state/0/exp_avg"), module_of("model/scale")
    ('model/layer4.0.conv1', 'optimizer/state/0', 'model')
    """
    parent, _, last = path.rpartition("/")
    prefix, _, _ = last.rpartition(".")
    return f"{parent}/{prefix}" if prefix else parent


def role_of(path: str) -> str:
    """The first word of a path."""
    return path.partition("/")[0]


def _combined(below: Mapping[str, tuple[str, bytes]]) -> dict[str, bytes]:
    """The digest of each parent, from its children's paths and digests."""
    texts: dict[str, list[bytes]] = {}
    for path, (parent, digest) in sorted(below.items()):
        texts.setdefault(parent, []).append(path.encode("utf-8", "surrogatepass") + b"\0" + digest)
    return {parent: digest_bytes(b"".join(parts)) for parent, parts in texts.items()}
