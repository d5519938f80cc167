"""What the coordinator decides, on the timeline, and for people in a line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evergrad.recovery.heartbeat import innermost
from evergrad.recovery.launch.status import Relay
from evergrad.timeline import Recorder
from evergrad.wording import counted

_TOGETHER = "is on node "


class Announcer:
    """Takes the coordinator's events; from any thread."""

    def __init__(self, recorder: Recorder, relay: Relay, label_of: Callable[[int], str], strategy: str) -> None:
        """`label_of` is what people call a process, by its uid."""
        self._recorder, self._relay, self._label_of, self._strategy = recorder, relay, label_of, strategy
        self._deaths: dict[int, tuple[str, str]] = {}
        self.inexact = ""
        """Why the job is not what it would have been without failures, as far as its plans tell."""
        self.ended_spares: dict[int, str] = {}
        """Spares that ended while the job went on, and how, as in "spare 2 …"."""

    def foretell(self, uid: int, rank: int | None, how: str) -> None:
        """This process is about to be lost: where many are at once, a plan may come before the last of their deaths."""
        self._deaths[uid] = self._label_of(uid) if rank is None else f"rank {rank}", how

    def tell(self, event: str, /, **fields: Any) -> None:
        """Something has happened."""
        self._recorder.record(event, **fields)
        if event == "death":
            self._note_death(fields)
        elif event == "spare_ended":
            self._note_spare(fields, "ended its script")
        elif event == "plan":
            self._announce(fields)

    def _note_death(self, fields: dict[str, Any]) -> None:
        who = self._label_of(fields["uid"]) if fields["rank"] is None else f"rank {fields['rank']}"
        how = fields["how"] if "stack" in fields else f"died ({fields['how']})"
        self._deaths[fields["uid"]] = who, how
        if fields["rank"] is None:
            self._note_spare(fields, how, is_said=not fields.get("stack"))
        if fields.get("stack"):
            self._relay.say(f"{who} {fields['how']}; it was last seen in\n{innermost(fields['stack'])}")

    def _note_spare(self, fields: dict[str, Any], how: str, *, is_said: bool = True) -> None:
        """A process without a rank is gone, and takes nobody's place any more."""
        uid, when = fields["uid"], "before it called eg.join"
        if fields["joined"]:
            when = "while it waited" if fields["waited"] else "before its first job.batches"
        self.ended_spares[uid] = f"{self._label_of(uid)} {how} {when}"
        if is_said:
            self._relay.say(f"{self.ended_spares[uid]}: it takes no rank's place. See logs/{uid}.log")

    def _announce(self, fields: dict[str, Any]) -> None:
        generation, ranks = fields["generation"], counted(len(fields["members"]), "rank")
        joined = [f"{self._label_of(uid)} joins" for uid in fields["joiners"]]
        if fields["dead"] or fields["left"] or fields["ended"]:
            left = [f"{self._label_of(uid)} has left" for uid in fields["left"]]
            left += [f"{self._label_of(uid)} has ended its script before the others" for uid in fields["ended"]]
            how = "from the newest checkpoint" if fields["restart"] else self._strategy
            what = ", ".join(self._deaths_of(fields["dead"]) + left + joined)
            self._relay.say(f"{what}: generation {generation} goes on with {ranks} ({how})")
        elif joined:
            self._relay.say(f"{', '.join(joined)}: generation {generation} goes on with {ranks}")
        if not fields["exact"] and not self.inexact:
            self.inexact = f"generation {generation} went on with {ranks}, by {self._strategy}"
            if fields["ended"]:
                ended = ", ".join(map(self._label_of, fields["ended"]))
                self.inexact += f": {ended} had ended the script before the others"

    def _deaths_of(self, uids: list[int]) -> list[str]:
        """One text for each way to be lost: a node that is gone has many ranks."""
        found: dict[tuple[str, int], list[str]] = {}
        for uid in uids:
            who, how = self._deaths.get(uid, (f"process {uid}", "died"))
            found.setdefault((how, -1 if how.startswith(_TOGETHER) else uid), []).append(who)
        return [
            f"{', '.join(whos)} {how if len(whos) == 1 else how.replace('is', 'are', 1)}"
            for (how, _), whos in found.items()
        ]
