"""Who lives and is not there all the same: looks at what processes show of themselves, and tells the coordinator."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from evergrad.recovery.heartbeat import Finding, Vigil, Vital, innermost
from evergrad.recovery.launch.crowd import Crowd
from evergrad.recovery.launch.settings import LaunchSettings
from evergrad.recovery.launch.status import Relay
from evergrad.timeline import Recorder

if TYPE_CHECKING:
    from evergrad.recovery.coordinator import Coordinator

_BEATS = 2
"""For so many of its own beats a process waits for an answer before the store is put to the test, and then again."""


class Questions:
    """The store's part in what processes ask of it: who waits for an answer is cut off only if the store gives answers.

    The store is in the launcher's process. On a machine with too much to do it gets no processor for a while, and then
    nobody has an answer. It answers in order: once it has answered us, it has answered whatever had reached it before.
    """

    def __init__(self) -> None:
        self._tested: dict[int, tuple[int, int]] = {}
        """By uid, the beat at which a process asked, and its beat when the store was known to answer after that."""

    def unanswered(self, vitals: Mapping[int, Vital], test: Callable[[], None]) -> dict[int, Vital]:
        """The same, but that nobody waits for an answer that the store may owe; `test` returns when it has answered."""
        has_tested, found = False, dict(vitals)
        for uid, vital in vitals.items():
            asked_at = vital.beats - vital.asks_beats
            known_at, beats = self._tested.get(uid, (-1, 0))
            if not vital.asks_s or (known_at == asked_at and vital.beats - beats >= _BEATS):
                continue
            found[uid] = replace(vital, asks_s=0.0, asks_beats=0)
            if known_at != asked_at and vital.asks_beats >= _BEATS:
                if not has_tested:
                    test()
                    has_tested = True
                self._tested[uid] = asked_at, vital.beats
        return found


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
        self._vigil, self._questions = Vigil(settings.patience), Questions()
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
        vitals = self._questions.unanswered(vitals, coordinator.await_store)
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
