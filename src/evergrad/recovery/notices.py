"""The store as the coordinator sees it: what ranks have told, and what they are told.

It only ever looks into the store and never waits in it: a wait that ends without result fills the terminal with torch's
warnings. Every call may raise `Forged`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from evergrad.recovery.membership import Fingerprint, Keys, Plan, Report
from evergrad.recovery.stores import Sealed

_LEAVE = -1


class Notices:
    """Of one job, by generation and uid."""

    def __init__(self, store: Sealed) -> None:
        self._store = store

    def ask(self) -> None:
        """Ask anything, and return when there is an answer."""
        self._store.store.check([Keys.fatal])

    def fatal(self) -> str | None:
        """Why nobody shall go on, if a rank says so."""
        return self._store.find(Keys.fatal)

    def misuse(self) -> str | None:
        """Which calls the script leaves out, if a rank says so when it has finished."""
        return self._store.find(Keys.misuse)

    def progress(self) -> int:
        """How many steps were applied, as far as ranks have told."""
        progress = self._store.find(Keys.progress)
        return 0 if progress is None else int(json.loads(progress).get("step", 0))

    def has_joined(self, uid: int) -> bool:
        """Whether this process has called `eg.join`."""
        return self._store.has(Keys.joined(uid))

    def has_waited(self, uid: int) -> bool:
        """Return True if this process has come to its first `job.batches` as a spare."""
        return self._store.has(Keys.waiting(uid))

    def has_checkpointer(self, uid: int) -> bool:
        """Whether it has joined with something to restart from."""
        joined = self._store.find(Keys.joined(uid))
        return joined is not None and bool(json.loads(joined).get("checkpointer"))

    def can_be_called(self, uid: int) -> bool:
        """Whether this spare waits, and nobody has called it."""
        return self._store.has(Keys.waiting(uid)) and not self._store.has(Keys.called(uid))

    def is_broken(self, plan: Plan) -> bool:
        """Whether somebody knows that this generation is over."""
        return self._store.has(Keys.broken(plan.generation))

    def reason(self, plan: Plan) -> str:
        """Why it is over, as the first who knew said; empty if nobody has."""
        return str(json.loads(self._broken(plan)).get("reason", ""))

    def report(self, plan: Plan, uid: int) -> Report | None:
        """What a survivor saw of it, once it has told."""
        text = self._store.find(Keys.report(plan.generation, uid))
        return None if text is None else Report.from_json(text)

    def diverged(self) -> str:
        """The first difference between ranks after a process joined, unless it has been healed since."""
        return self._store.find(Keys.diverged) or ""

    def fingerprint(self, uid: int) -> Fingerprint | None:
        """The fingerprint of what a process has trained, once it has ended its training."""
        text = self._store.find(Keys.fingerprint(uid))
        return None if text is None else Fingerprint.from_json(text)

    def publish(self, plan: Plan) -> None:
        """Say what the next generation is."""
        self._store.set(Keys.plan(plan.generation), plan.to_json())

    def break_off(self, plan: Plan, uid: int, reason: str) -> None:
        """Say that a generation is over because of a member, or of nobody (-1); unless that is known already."""
        text = json.dumps({"uid": uid, "reason": reason})
        self._store.claim(Keys.broken(plan.generation), text)
        self._wake(plan, text)

    def spread_break(self, plan: Plan) -> None:
        """Let all members know of what one of them has said."""
        self._wake(plan, self._broken(plan))

    def ask_for_change(self, plan: Plan, waiting: Sequence[int]) -> None:
        """Ask everyone to stop before the next step: these wait to be let in."""
        self._store.set(Keys.change(plan.generation), json.dumps({"uids": list(waiting)}))

    def note_end(self, uid: int) -> None:
        """Tell those who wait for this process between two epochs that it has ended its script."""
        self._store.set(Keys.ended(uid), "1")

    def call(self, uid: int, generation: int) -> None:
        """Call a spare into a generation."""
        self._store.set(Keys.called(uid), str(generation))

    def dismiss(self, uid: int) -> None:
        """Let a spare leave: the job has ended without a need for it."""
        self._store.set(Keys.called(uid), str(_LEAVE))

    def forbid(self, message: str) -> None:
        """Let nobody go on."""
        self._store.set(Keys.fatal, message)  # whatever is there: it may not be ours

    def _broken(self, plan: Plan) -> str:
        return self._store.find(Keys.broken(plan.generation)) or "{}"

    def _wake(self, plan: Plan, text: str) -> None:
        """Every member that may be waiting for someone who will never come."""
        self._store.set_all({Keys.news(uid, plan.generation): text for uid in plan.members})
