"""Numbers out of what a program prints: JSON lines by key, any other lines by a pattern.

A number is a number: `true`, `"0.9"`, `1_000` and `null` are none. NaN and infinities are, as Python's `json` writes
them, as texts (`"nan"`, `"-Infinity"`), or as a pattern finds them.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from evergrad.errors import UsageError
from evergrad.study.trials import Rules, Series
from evergrad.training.settings import PATTERN
from evergrad.wording import shown

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_NO_NUMBER = re.compile(r"[+-]?(?:nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_MOST = 200


class Source:
    """Where a number is in a line: under a key, or where a pattern's first group is.

    >>> Source("metric", r"pattern:acc (\\S+)").read("epoch 2: acc 0.91", None)
    0.91
    """

    def __init__(self, name: str, setting: str) -> None:
        """`name` is the setting's own, for errors; an empty one is never found."""
        self._key, self._pattern = setting, None
        if setting.startswith(PATTERN):
            text = setting.removeprefix(PATTERN)
            try:
                self._pattern = re.compile(text)
            except (re.error, OverflowError, RecursionError) as error:
                raise UsageError(f"{name}: {shown(text)} is not a regular expression: {error}") from None
            if not self._pattern.groups:
                raise UsageError(
                    f"{name}: expected a regular expression whose first group is the number, such as "
                    f"'pattern:accuracy (\\S+)', found no group in {shown(text)}"
                )

    def __str__(self) -> str:
        return f"pattern {shown(self._pattern.pattern)}" if self._pattern else f"key {shown(self._key)}"

    def read(self, line: str, record: dict[str, Any] | None) -> float | None:
        """The number that is in a line, or in the object that the line is; None if there is none."""
        if self._pattern is not None:
            found = self._pattern.search(line)
            return None if found is None else _number(found[1])
        value = None if record is None else record.get(self._key)
        if isinstance(value, str):
            return float(value) if _NO_NUMBER.fullmatch(value.strip()) else None
        if type(value) not in (int, float):
            return None
        assert value is not None
        try:
            return float(value)
        except OverflowError:  # 400 digits, without a point
            return math.inf if value > 0 else -math.inf


class Kept:
    """The numbers of one kind in order: all, or evenly thinned to a few hundred once there are many."""

    def __init__(self) -> None:
        self.count, self._every, self._last = 0, 1, 0.0
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """One more."""
        if self.count % self._every == 0:
            self._values.append(value)
            if len(self._values) > _MOST:
                self._values, self._every = self._values[::2], self._every * 2
        self.count, self._last = self.count + 1, value

    def series(self) -> Series:
        """Every so-manyth."""
        return Series(self._every, tuple(self._values))

    def ends(self) -> tuple[float, ...]:
        """The same, and always the last one."""
        left_out = self.count and (self.count - 1) % self._every
        return (*self._values, self._last) if left_out else tuple(self._values)


class Readings:
    """What has been read so far from a program's lines.

    A step is a loss that was printed; as long as there is none, a metric.
    """

    def __init__(self, metric: str, loss: str, rules: Rules) -> None:
        self.metrics, self.losses = Kept(), Kept()
        self.nonfinite: tuple[int | None, str] = (None, "")
        self.extreme: tuple[int | None, str] = (None, "")
        self.reason = ""
        """The rule by which enough has been seen."""
        self._metric, self._loss, self._rules = Source("metric", metric), Source("loss", loss), rules

    @property
    def steps(self) -> int:
        """How many there were."""
        return self.losses.count or self.metrics.count

    def heed(self, line: str) -> bool:
        """Read one line; whether a rule says that this is enough."""
        record = _record(line)
        for source, kept, where in ((self._loss, self.losses, "loss"), (self._metric, self.metrics, "metric")):
            value = source.read(line, record)
            if value is not None:
                kept.add(value)
                if not math.isfinite(value):
                    self.note("non-finite", where, self.steps)
                elif abs(value) > self._rules.extreme:
                    self.note("extreme", where, self.steps)
        return bool(self.reason)

    def note(self, kind: str, where: str, step: int) -> None:
        """That something `non-finite` or `extreme` was seen; the first counts."""
        if kind == "non-finite" and self.nonfinite[0] is None:
            self.nonfinite = (step, where)
        elif kind == "extreme" and self.extreme[0] is None:
            self.extreme = (step, where)
        if kind in self._rules.abandon and not self.reason:
            self.reason = f"{kind} {where} after step {step}"


def _record(line: str) -> dict[str, Any] | None:
    """The object that a line is, if it is one."""
    text = line.strip()
    if not (text.startswith("{") and text.endswith("}")):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _number(text: str | None) -> float | None:
    stripped = (text or "").strip()
    known = _NUMBER.fullmatch(stripped) or _NO_NUMBER.fullmatch(stripped)
    return float(stripped) if known else None
