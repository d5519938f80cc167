"""Writers that were made and not used yet: how a stager learns the step."""

from __future__ import annotations

import weakref
from typing import Protocol

from evergrad.checkpoint import Checkpointer


class Announced(Protocol):
    """A writer that waits to be used."""

    @property
    def step(self) -> int | None:
        """The step that it writes; None if that is not known yet."""
        ...

    def take(self) -> int:
        """Use it: its step, or an error if it has none."""
        ...


_waiting: weakref.WeakKeyDictionary[Checkpointer, list[weakref.ref[Announced]]] = weakref.WeakKeyDictionary()


def announce(checkpointer: Checkpointer, writer: Announced) -> None:
    """A writer was made."""
    taken(checkpointer, writer)
    _waiting.setdefault(checkpointer, []).append(weakref.ref(writer))


def taken(checkpointer: Checkpointer, writer: Announced) -> None:
    """It is being used."""
    _waiting[checkpointer] = [ref for ref in _waiting.get(checkpointer, ()) if ref() not in (None, writer)]


def waiting(checkpointer: Checkpointer) -> list[Announced]:
    """Those that still live, in the order in which they were made."""
    return [writer for ref in _waiting.get(checkpointer, ()) if (writer := ref()) is not None]
