"""What became of every unit of an epoch: used, lost, dropped, or not yet used.

One byte a unit, written when a step has been applied and never before: a step that is rolled back leaves no trace.
The books do not ask how units were dealt. They are told which places of the dealt sequence went into a step, and count
for themselves, so that they can contradict the dealing.

    >>> books = Books(5)
    >>> books.enter(0, 6)  # five units for two ranks: unit 0 comes again as padding
    >>> print(books.summary())
    5 units: 5 used once, 0 lost, 0 dropped, 0 unused; 1 padding, 0 idle, 0 twice
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.errors import StateError
from evergrad.records import Json

SCHEMA_VERSION = 1
_UNUSED, _USED, _LOST, _DROPPED = range(4)


@dataclass(frozen=True, slots=True)
class Balance:
    """The books of an epoch in numbers. Every unit is in one of `used_once`, `lost`, `dropped`, `unused`."""

    units: int
    uses: int
    """Units in all shares that went into applied steps, repeats included."""
    used_once: int
    padding: int
    """Further uses, which padding explains."""
    idle: int
    """Shares of weight 0, run by ranks that had none in a ragged step; not uses."""
    lost: int
    """Units whose gradients went with a rank (forward recovery)."""
    dropped: int
    """Units that the loader leaves out at the end of an epoch."""
    unused: int
    twice: int
    """Uses that nothing explains."""

    @property
    def is_balanced(self) -> bool:
        """Whether everything that was used is accounted for."""
        placed = self.used_once + self.lost + self.dropped + self.unused
        return self.twice == 0 and placed == self.units and self.uses == self.used_once + self.padding

    @property
    def is_complete(self) -> bool:
        """Whether, besides, nothing is left to use."""
        return self.is_balanced and self.unused == 0

    def __str__(self) -> str:
        return (
            f"{self.units} units: {self.used_once} used once, {self.lost} lost, {self.dropped} dropped, "
            f"{self.unused} unused; {self.padding} padding, {self.idle} idle, {self.twice} twice"
        )

    def to_json(self) -> dict[str, Json]:
        """As a row of plain values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, row: str | bytes | Mapping[str, Any]) -> Balance:
        """Back from a row, or from its text."""
        fields: dict[str, Any] = dict(json.loads(row) if isinstance(row, str | bytes) else row)
        version = fields.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise StateError(f"the books of an epoch: expected schema_version {SCHEMA_VERSION}, found {version!r}")
        return cls(**fields)


class Books:
    """The books of one epoch of `units`, of which all from `dropped_from` on are never dealt."""

    def __init__(self, units: int, dropped_from: int | None = None) -> None:
        self._marks: npt.NDArray[np.uint8] = np.zeros(units, np.uint8)
        if dropped_from is not None:
            self._marks[dropped_from:] = _DROPPED
        self._uses = self._padding = self._idle = self._twice = 0

    def enter(self, first: int, stop: int, *, lost: npt.NDArray[np.bool_] | None = None, idle: int = 0) -> None:
        """Places first..stop-1 of the dealt sequence went into an applied step; those that `lost` marks did not.

        A place is a unit's number, and from `units` on the units come again from the beginning, as padding.
        """
        units = len(self._marks)
        whole = min(stop, units) - min(first, units)
        own, repeats = self._marks[min(first, units) : min(stop, units)], np.arange(max(first, units), stop)
        if lost is None:
            self._uses += stop - first
            self._twice += int(np.count_nonzero(own != _UNUSED))
            own[:] = _USED
        else:
            gone, used = lost[:whole], ~lost[:whole]
            self._uses += int(np.count_nonzero(~lost))
            self._twice += int(np.count_nonzero(own[used] != _UNUSED))
            own[used] = _USED
            own[gone & (own == _UNUSED)] = _LOST
            repeats = repeats[~lost[whole:]]
        self._idle += idle
        if len(repeats):
            # The repeat of a unit that was lost is the unit's one use; padding is what comes on top of that.
            again = np.unique(repeats % units)
            first_uses = again[(self._marks[again] == _UNUSED) | (self._marks[again] == _LOST)]
            self._marks[first_uses] = _USED
            self._padding += len(repeats) - len(first_uses)

    def repeat(self, count: int) -> None:
        """A unit that has just been entered was used so many times more, so that it is not alone in its batch."""
        self._uses += count
        self._padding += count

    def summary(self) -> Balance:
        """The books in numbers, as of now."""
        found = [int(np.count_nonzero(self._marks == mark)) for mark in range(4)]
        return Balance(
            units=len(self._marks),
            uses=self._uses,
            used_once=found[_USED],
            padding=self._padding,
            idle=self._idle,
            lost=found[_LOST],
            dropped=found[_DROPPED],
            unused=found[_UNUSED],
            twice=self._twice,
        )

    def state_dict(self) -> dict[str, object]:
        """All of it, in one array and plain numbers."""
        return {
            "marks": self._marks.copy(),
            "uses": self._uses,
            "padding": self._padding,
            "idle": self._idle,
            "twice": self._twice,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the saved books; `StateError` if they are none."""
        try:
            marks = np.array(state["marks"], np.uint8)
            uses, padding, idle, twice = (int(state[key]) for key in ("uses", "padding", "idle", "twice"))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the books of an epoch: {type(error).__name__}: {error}") from None
        if marks.ndim != 1 or (len(marks) and marks.max() > _DROPPED):
            raise StateError(f"the books of an epoch: expected one mark from 0 to {_DROPPED} a unit, found others")
        self._marks, self._uses, self._padding, self._idle, self._twice = marks, uses, padding, idle, twice
