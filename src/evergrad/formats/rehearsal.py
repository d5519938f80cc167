"""What an alteration would do to the bytes of files, found out without doing it.

Within `rehearsal()`, `Checkpoint.xor` changes nothing: every byte that it would change, tensors' and checksums', is
noted. Whoever rehearsed can so write down what is going to happen, durably, before it happens.

What has no place of its own in a file (compressed members, filtered HDF5 chunks) cannot be rehearsed:
`NeedsRewrite` says so, and such a file has to be altered in a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt


class NeedsRewrite(Exception):
    """What was to be altered has no place of its own in the file. Never leaves this package and `injection`."""


@dataclass(slots=True)
class Changes:
    """What would happen to one file."""

    rows: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = field(default_factory=list)
    """Elements: their addresses, and for each a row of bytes to XOR from there on."""
    puts: dict[int, bytes] = field(default_factory=dict)
    """Checksums that follow: offset → what would stand there."""


@dataclass(slots=True)
class Rehearsal:
    """What would happen to each file, in the order in which they were touched."""

    files: dict[Path, Changes] = field(default_factory=dict)
    stale: bool = False
    """Whether checksums are going to be left as they are: what only a checksum ties together then has a place."""

    def of(self, path: Path) -> Changes:
        """The changes of one file."""
        return self.files.setdefault(path, Changes())


_CURRENT: ContextVar[Rehearsal | None] = ContextVar("evergrad-rehearsal", default=None)


@contextmanager
def rehearsal(*, stale: bool = False) -> Iterator[Rehearsal]:
    """Checkpoints that are opened and altered in this block are not altered: what would happen is noted."""
    noted = Rehearsal(stale=stale)
    token = _CURRENT.set(noted)
    try:
        yield noted
    finally:
        _CURRENT.reset(token)


def rehearsing() -> Rehearsal | None:
    """The rehearsal that is under way, if one is."""
    return _CURRENT.get()
