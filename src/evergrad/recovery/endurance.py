"""How often a job tries again before it is given up: what comes back every time is no accident."""

from __future__ import annotations

from collections import Counter

from evergrad.recovery.membership import Plan

_FUTILE = 20
"""So many generations in a row that lose nobody and come to no point are enough."""
_RETURNS = 5
"""So often a job goes back to the same version."""


class Endurance:
    """One job's."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts = self._futile = 0
        self._returns: Counter[str] = Counter()

    @property
    def no_restart(self) -> str:
        """Why the job is not relaunched once more; empty if it may be."""
        used = self._restarts >= self._max_restarts
        return f"{self._restarts} of {self._max_restarts} were used" if used else ""

    def restarted(self) -> None:
        """The job is relaunched."""
        self._restarts += 1

    def objection(self, before: Plan, after: Plan) -> str:
        """What speaks against going on from one plan to the next, which counts as tried; empty if nothing does."""
        if after.dead or after.left or after.joiners or after.point > before.point:
            self._futile = 0
        else:
            self._futile += 1
            if self._futile >= _FUTILE:
                return f"{self._futile} generations in a row came to no point; the last"
        if after.version:
            self._returns[after.version] += 1
            if self._returns[after.version] > _RETURNS:
                return f"the job has gone back {_RETURNS} times to {after.version}, and its ranks differ again"
        return ""
