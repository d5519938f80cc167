"""What the launcher's status line knows of the job: a few times a second, by one rank."""

from __future__ import annotations

import json
import time

from evergrad.recovery.course import Course
from evergrad.recovery.crew import Crew
from evergrad.recovery.launched import Launched
from evergrad.recovery.membership import Keys

_EVERY_S = 0.2


class Progress:
    """Tells how far the job is, seldom enough to cost nothing."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self, course: Course, crew: Crew, *, at_once: bool = False) -> None:
        """A step was applied; or an epoch has ended, which is said at once."""
        if not isinstance(crew, Launched) or crew.rank != 0:
            return
        now = time.monotonic()
        if at_once or now >= self._next:
            self._next = now + _EVERY_S
            known = {"step": course.step, "epoch": course.epoch, "generation": crew.plan.generation}
            crew.client.set(Keys.progress, json.dumps(known | {"world_size": crew.world_size}))
