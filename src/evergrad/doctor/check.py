"""One thing that was looked at: what was found, whether it will do, and what to do if not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evergrad.records import Json

VERDICTS = ("failed", "degraded", "unknown", "ok")
"""The worst first. Degraded: it works, and something can be done for more. Unjudged is not passed: that is unknown."""


@dataclass(frozen=True)
class Check:
    """A line of the doctor's; `facts` are the same in numbers, for programs."""

    name: str
    verdict: str
    found: str
    todo: str = ""
    facts: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS, self.verdict

    def to_json(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": self.found,
            "todo": self.todo,
            "facts": dict(self.facts),
        }


def checked(name: str, look: Callable[[], Check | Iterable[Check]]) -> Iterator[Check]:
    """What a look has found. One that could not end says so, and the others go on: a doctor does not faint.

    >>> [check.found for check in checked("disk", lambda: 1 / 0)]
    ['the check itself failed (ZeroDivisionError: division by zero)']
    """
    try:
        found = look()
        yield from [found] if isinstance(found, Check) else found
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        yield Check(name, "unknown", f"the check itself failed ({what[:200]})")


def worst(checks: Iterable[Check]) -> str:
    """The verdict of all of them together.

    >>> worst([Check("a", "ok", ""), Check("b", "unknown", "")])
    'unknown'
    """
    found = {check.verdict for check in checks}
    return next((verdict for verdict in VERDICTS if verdict in found), "ok")
