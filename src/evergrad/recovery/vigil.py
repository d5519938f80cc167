"""Who is to be taken for dead although it lives, and who is only late: decided from what can be seen of each process.

A process counts as lost when it is stopped or cut off from the store for `silent_s`, or when nothing has been heard of
it, or others have been waiting for it, for `hung_s`. It is reported, with its stack, when others have waited `late_s`
for it. A rank that keeps up, but takes much longer for its part of each step than the others do, is a straggler.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from evergrad.errors import UsageError
from evergrad.recovery.pulse import Vital

_WINDOW_S = 5.0
_FEWEST_WAITS = 10


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for whom."""

    silent_s: float = 1.0
    """A process that is stopped, or cut off, is lost after so long."""
    late_s: float = 30.0
    """A rank that others wait for is reported after so long."""
    hung_s: float = 600.0
    """It is lost after so long; 0: never."""
    straggler: float = 3.0
    """A rank that takes so many times as long for its part of a step as the others is a straggler; 0: none is."""
    replaces_stragglers: bool = False
    """Whether a straggler is lost, rather than only reported."""

    def __post_init__(self) -> None:
        for option, value in (("--silent", self.silent_s), ("--late", self.late_s)):
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{option}: expected a number of seconds above 0, found {value!r}")
        if not (math.isfinite(self.hung_s) and self.hung_s >= 0):
            raise UsageError(f"--hung: expected a number of seconds, 0 for never, found {self.hung_s!r}")
        if not (math.isfinite(self.straggler) and (self.straggler == 0 or self.straggler > 1)):
            raise UsageError(f"--straggler: expected a factor above 1, 0 for none, found {self.straggler!r}")

    @property
    def beat_s(self) -> float:
        """How often a process beats."""
        return min(0.25, self.silent_s / 4)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something is wrong with a process."""

    uid: int
    kind: Literal["stopped", "cut off", "hung", "late", "straggler", "all wait"]
    why: str
    """As in "rank 2 …"."""
    is_lost: bool


class Vigil:
    """Judges the processes of a job again and again; each thing is found once."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._said: set[tuple[int, str, int]] = set()
        self._windows: dict[int, tuple[float, float, int]] = {}
        """Of each member at the beginning of the window: when that was, how long it had waited, how often."""
        self._generation = -1

    def judge(
        self, vitals: Mapping[int, Vital], members: Collection[int], generation: int, now_s: float
    ) -> list[Finding]:
        """What is wrong now, and was not before; `vitals` are those of processes that are not out."""
        found = []
        for vital in vitals.values():
            if vital.beats and (finding := self._alone(vital)) is not None:
                found.append(finding)
        gone = {finding.uid for finding in found}
        present = {uid: vitals[uid] for uid in members if uid in vitals and uid not in gone and vitals[uid].beats}
        if generation != self._generation:
            self._generation = generation
            self._windows = {}
        if not gone:
            found += self._late(present, len(members))
            found += self._straggling(present, now_s)
        return [finding for finding in found if finding.is_lost or self._is_new(finding, generation)]

    def _is_new(self, finding: Finding, generation: int) -> bool:
        key = finding.uid, finding.kind, generation
        is_new = key not in self._said
        self._said.add(key)
        return is_new

    def _alone(self, vital: Vital) -> Finding | None:
        """What can be said of a process without knowing the others."""
        patience = self._patience
        if vital.silent_s >= patience.silent_s and vital.is_stopped:
            return Finding(vital.uid, "stopped", f"has been stopped for {vital.silent_s:.1f} s", True)
        # Counted in its own beats too: on a machine with too much to do, both the answer and the beats are late.
        asked_s = min(vital.asks_s, vital.asks_beats * patience.beat_s)
        if asked_s >= patience.silent_s and not vital.is_stopped:
            return Finding(vital.uid, "cut off", f"cannot reach the store for {vital.asks_s:.1f} s", True)
        if patience.hung_s and vital.silent_s >= patience.hung_s:
            return Finding(vital.uid, "hung", f"has shown no sign of life for {vital.silent_s:.0f} s", True)
        return None

    def _late(self, present: Mapping[int, Vital], num_members: int) -> list[Finding]:
        longest = max((vital.waits_s for vital in present.values()), default=0.0)
        patience = self._patience
        is_lost = 0 < patience.hung_s <= longest
        if longest < patience.late_s and not is_lost:
            return []
        late = [vital.uid for vital in present.values() if not vital.waits_s]
        kind: Literal["hung", "late"] = "hung" if is_lost else "late"
        if late:
            why = f"has kept the others waiting for {longest:.1f} s"
            return [Finding(uid, kind, why, is_lost) for uid in late]
        shortest = min(vital.waits_s for vital in present.values())
        if patience.hung_s and shortest >= patience.hung_s and len(present) == num_members:
            return [Finding(-1, "all wait", f"all ranks have been waiting for each other for {shortest:.0f} s", False)]
        return []

    def _straggling(self, present: Mapping[int, Vital], now_s: float) -> list[Finding]:
        """Of the time since the window's beginning, a straggler waits little, and the others wait for it."""
        factor = self._patience.straggler
        if not factor or len(present) < 2:
            return []
        if self._windows.keys() != present.keys():
            self._begin_window(present, now_s)
            return []
        begun_s = next(iter(self._windows.values()))[0]
        waits = min(vital.waits - self._windows[uid][2] for uid, vital in present.items())
        if now_s - begun_s < _WINDOW_S or waits < _FEWEST_WAITS:
            return []
        length = now_s - begun_s
        busy = {uid: max(1e-6, length - (vital.waited_s - self._windows[uid][1])) for uid, vital in present.items()}
        self._begin_window(present, now_s)
        found = []
        for uid, own in busy.items():
            others = statistics.median(value for other, value in busy.items() if other != uid)
            if own >= factor * others:
                why = f"takes {own / others:.1f} times as long for its part of a step as the others"
                found.append(Finding(uid, "straggler", why, self._patience.replaces_stragglers))
        return found if len(found) == 1 else []

    def _begin_window(self, present: Mapping[int, Vital], now_s: float) -> None:
        self._windows = {uid: (now_s, vital.waited_s, vital.waits) for uid, vital in present.items()}
