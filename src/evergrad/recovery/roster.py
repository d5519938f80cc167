"""Every process of a job as its coordinator counts them: who lives, who is out, and what became of those."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from evergrad.recovery.membership import Plan


@dataclass(slots=True)
class Roster:
    """By uid; it only grows. Whoever changes it, or reads more than one thing of it, holds the coordinator's lock."""

    uids: list[int] = field(default_factory=list)
    """All that were ever started, in order."""
    codes: dict[int, int] = field(default_factory=dict)
    """Of those who are out: 0 has finished, anything else is dead (negative: the signal)."""
    hows: dict[int, str] = field(default_factory=dict)
    """What became of them, as in "rank 2 …"."""
    left: set[int] = field(default_factory=set)
    """Those who have left in good order, before the job's end."""

    def copy(self) -> Roster:
        """As it is now."""
        return Roster(list(self.uids), dict(self.codes), dict(self.hows), set(self.left))

    def count_out(self, uid: int, code: int, how: str) -> bool:
        """Note that a process is out; whether that is news."""
        if uid in self.codes:
            return False
        self.codes[uid], self.hows[uid] = code, how
        return True

    def spares(self, members: Collection[int]) -> list[int]:
        """Those who live and are not among these members, in order."""
        return [uid for uid in list(self.uids) if uid not in members and uid not in self.codes]

    def finished(self, members: Collection[int]) -> set[int]:
        """Of these members, those who have finished."""
        return {uid for uid in members if self.codes.get(uid) == 0}

    def dead(self, members: Collection[int]) -> set[int]:
        """Of these members, those who are dead."""
        return {uid for uid in members if self.codes.get(uid, 0) != 0}

    def have_all(self, members: Collection[int], code: int) -> bool:
        """Whether all of these are out, with this code."""
        return all(self.codes.get(uid) == code for uid in members)

    def fate(self, plan: Plan, uid: int) -> str:
        """What became of a process, by the rank that it had."""
        return f"rank {plan.rank_of(uid)} {self.hows[uid]}"

    def fates(self, plan: Plan, uids: Collection[int]) -> str:
        """The same of several."""
        return ", ".join(self.fate(plan, uid) for uid in sorted(uids))
