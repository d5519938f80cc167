"""A new spare for each process that is gone, where that is wanted and may help."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from evergrad.recovery.launch.placing import Places
from evergrad.recovery.launch.settings import LaunchSettings, Place
from evergrad.recovery.launch.status import Relay
from evergrad.recovery.membership import Keys

if TYPE_CHECKING:
    from evergrad.recovery.coordinator import Coordinator
    from evergrad.recovery.store import Sealed

_DEATHS_IN_PLACE = 3


class Respawning:
    """For the main thread of the launcher."""

    def __init__(
        self,
        settings: LaunchSettings,
        places: Places,
        relay: Relay,
        *,
        is_here: Callable[[int], bool],
        start: Callable[[Place], None],
    ) -> None:
        """`is_here` tells whether processes can be started on a node; `start` starts one."""
        self._settings, self._places, self._relay = settings, places, relay
        self._is_here, self._start = is_here, start
        self._replaced: set[int] = set()
        self._died_at: dict[tuple[int, int], tuple[int, int]] = {}
        """By node and device: the step at which processes there died, and how often."""

    def replace(self, uid: int, coordinator: Coordinator, store: Sealed) -> None:
        """A process is gone, while the job goes on: start a spare, unless one was started for it already.

        Not for one that never joined, or for who dies at the same step again.
        """
        is_new = uid not in self._replaced  # one that was lost may end later
        self._replaced.add(uid)
        if not is_new or not self._settings.respawn or coordinator.outcome is not None:
            return
        before = self._places[uid]
        if not store.has(Keys.joined(uid)):
            self._relay.say(f"{before.label} is not started again: it ended before it joined the job")
            return
        step = coordinator.step
        times = self._count(before, step)
        if times >= _DEATHS_IN_PLACE:
            self._relay.say(f"{before.label} is not started again: {times} died in its place at step {step}")
            return
        if not self._is_here(before.node):  # it may come back, and bring its own
            return
        place = self._places.add(before.node, before.device)
        coordinator.started(place.uid)
        self._start(place)

    def _count(self, place: Place, step: int) -> int:
        """How many have died in this place at this step, one after the other."""
        where = place.node, place.device
        last, times = self._died_at.get(where, (-1, 0))
        times = times + 1 if last == step else 1
        self._died_at[where] = step, times
        return times
