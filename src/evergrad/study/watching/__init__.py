"""What else may be looked at in every step of a trial: watchers that see everything and alter nothing.

contract.py   what a watcher is, and how its ranks learn from each other
spread.py     how far a fault has come: over elements, layers and ranks
guards.py     which guards speak up, when, and what they cost · passive.py the guards, as they can be asked
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from evergrad.study.watching.contract import Watcher, Watchers

if TYPE_CHECKING:
    from evergrad.study.observing import Course
    from evergrad.study.trials import Rules
    from evergrad.training.mechanisms.session import Session

__all__ = ["make_watchers"]


def make_watchers(session: Session, rules: Rules, course: Course, steps: int) -> Watchers:
    """The watchers that the rules ask for, of a training that will take so many steps; on each of its ranks alike."""
    found: list[Watcher] = []
    if "spread" in rules.watch:
        from evergrad.study.watching.spread import Spread

        found.append(Spread(session, course, steps))
    if "guards" in rules.watch:
        from evergrad.study.watching.guards import Guards

        found.append(Guards(session, course))
    return Watchers(found)
