"""The step under way: the batches that the script has been given for it, to be given again if it is redone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from evergrad.recovery.own import Randomness


@dataclass(slots=True)
class Given:
    """A batch, and the generators as they were when it was given."""

    batch: Any
    randomness: Randomness | None


@dataclass(slots=True)
class Window:
    """One batch, or several where gradients are accumulated."""

    given: list[Given] = field(default_factory=list)
    again: deque[Given] = field(default_factory=deque)
    """Batches of a step that is redone, which come before any others."""
    reduced: int = 0
    """How many of the batches given have been reduced."""
    forwarded: int = 0
    """The number of batches given when the wrapped model last ran forward with gradients."""
    is_doomed: bool = False
    """Whether the step has to be done again."""

    def __len__(self) -> int:
        return len(self.given)

    def __bool__(self) -> bool:
        return bool(self.given)

    def give(self, batch: Any, *, redoable: bool) -> Given:
        """One more batch for the script."""
        self.given.append(Given(batch, Randomness() if redoable else None))
        return self.given[-1]

    def give_again(self) -> Given | None:
        """The next batch of a step that is redone, with the generators as they were then; None if none is left."""
        if not self.again:
            return None
        given = self.again.popleft()
        assert given.randomness is not None, "batches come again where generators were noted"
        given.randomness.put_back()
        self.given.append(given)
        return given

    def redo(self) -> None:
        """All of its batches come again."""
        self.again = deque([*self.given, *self.again])
        self.clear()

    def note_forward(self, *_: object) -> None:
        """Note that the wrapped model runs forward; a hook of it."""
        if torch.is_grad_enabled():
            self.forwarded = len(self.given)

    def clear(self) -> None:
        """The step is over."""
        self.given.clear()
        self.reduced = self.forwarded = 0
        self.is_doomed = False
