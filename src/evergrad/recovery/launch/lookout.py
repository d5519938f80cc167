"""Who lives and is not there all the same: looks at what processes show of themselves, and tells the coordinator."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from evergrad.recovery.launch.crowd import Crowd
from evergrad.recovery.launch.settings import LaunchSettings
from evergrad.recovery.launch.status import Relay
from evergrad.recovery.pulse import innermost
from evergrad.recovery.vigil import Finding, Vigil
from evergrad.timeline import Recorder

if TYPE_CHECKING:
    from evergrad.recovery.coordinator import Coordinator

__all__ = ["Lookout"]


class Lookout:
    """Watches all processes of a job; in the launcher's main thread."""

    def __init__(
        self,
        settings: LaunchSettings,
        crowd: Crowd,
        relay: Relay,
        recorder: Recorder,
        *,
        label_of: Callable[[int], str],
        forsake: Callable[[int], None],
    ) -> None:
        """`forsake` is told of a process that is lost and that nobody kills."""
        self._settings, self._crowd, self._relay, self._recorder = settings, crowd, relay, recorder
        self._label_of, self._forsake = label_of, forsake
        self._vigil = Vigil(settings.patience)
        self._next_s = 0.0
        self._last_s = time.monotonic()

    def look(self, coordinator: Coordinator | None) -> None:
        """Once a beat, while the job goes on."""
        now = time.monotonic()
        if coordinator is None or coordinator.outcome is not None or now < self._next_s:
            return
        patience, last_s, self._last_s = self._settings.patience, self._last_s, now
        self._next_s = now + patience.beat_s
        if now - last_s > max(1.0, 4 * patience.beat_s):
            # It is this process that was not there, and with it the store: let everyone show itself first.
            self._next_s = now + patience.silent_s + 1.0
            self._last_s = self._next_s
            return
        generation, members = coordinator.membership
        vitals = {uid: vital for uid, vital in self._crowd.vitals().items() if not coordinator.is_out(uid)}
        for finding in self._vigil.judge(vitals, members, generation, now):
            self._act_on(finding, coordinator)

    def _act_on(self, finding: Finding, coordinator: Coordinator) -> None:
        uid, why, label = finding.uid, finding.why, self._label_of(finding.uid)
        if finding.kind == "all wait":
            self._recorder.record("all wait", generation=coordinator.generation, why=why)
            coordinator.interrupt(why)
            return
        stack = self._crowd.stack(uid)
        if not finding.is_lost:
            rank = coordinator.rank_of(uid)
            who = label if rank is None else f"rank {rank}"
            generation = coordinator.generation
            self._recorder.record(finding.kind, uid=uid, rank=rank, why=why, stack=stack, generation=generation)
            self._relay.say(f"{who} {why}; it is in\n{innermost(stack)}")
            return
        coordinator.lost(uid, why, stack=stack)
        if self._settings.keep_stopped:
            pid = next((child.pid for child in self._crowd.living if child.uid == uid), 0)
            self._relay.say(f"{label} (process {pid}) is left as it is: if it goes on it ends by itself")
            self._forsake(uid)
        else:
            self._crowd.send(signal.SIGKILL, {uid})
