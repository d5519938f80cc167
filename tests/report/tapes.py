"""Timelines made by hand: a clock, and the events of a job that loses ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evergrad.timeline import Event

__all__ = ["Tape"]


class Tape:
    """Events in the order in which they are told, each so many milliseconds after the one before."""

    def __init__(self, ranks: int = 4, spares: int = 1, **settings: Any) -> None:
        self.events: list[Event] = []
        self._mono, self.members, self.generation = 100.0, list(range(ranks)), 0
        known = {"num_ranks": ranks, "num_spares": spares, "is_spread": False, "strategy": "rollback"} | settings
        self.tell("launcher", "launcher_started", 0, command="python train.py", settings=known, pid=1)
        for uid in range(ranks + spares):
            self.start(uid, f"rank {uid}" if uid < ranks else f"spare {uid}")
        self.plan(500)

    def tell(self, who: str, event: str, after_ms: float = 1, **fields: Any) -> None:
        """Something happens."""
        self._mono += after_ms / 1000
        self.events.append(Event(1.7e9 + self._mono, self._mono, who, event, fields))

    def start(self, uid: int, label: str) -> None:
        """A process starts."""
        self.tell("launcher", "process_started", 1, uid=uid, label=label, pid=1000 + uid, node="n0")

    def plan(self, after_ms: float = 10, **fields: Any) -> None:
        """The present generation begins."""
        empty: dict[str, Any] = {"joiners": [], "dead": [], "left": [], "verdicts": {}, "exact": True}
        known = {"strategy": "rollback", "restart": False} | empty | fields
        self.tell("launcher", "plan", after_ms, generation=self.generation, members=list(self.members), **known)

    def kill(self, rank: int, step: int, *, injected: bool = True, after_ms: float = 1000) -> int:
        """A rank dies, the others report; its uid."""
        uid = self.members[rank]
        self.tell(f"uid {uid}", "kill_injected" if injected else "unrelated", after_ms, ranks=[rank], uids=[uid])
        for other in self.members:
            if other != uid:
                self.tell(f"uid {other}", "report", 10, generation=self.generation, step=step, kind="step")
        self.tell(
            "launcher", "generation_broken", 1, generation=self.generation, reason=f"rank {rank} ended with SIGKILL"
        )
        self.tell("launcher", "process_lost", 1, uid=uid, rank=rank, code=-9, generation=self.generation, how="SIGKILL")
        self.tell("launcher", "process_exited", 1, uid=uid, label="", code=-9)
        return uid

    def replace(self, rank: int, by: int, **fields: Any) -> None:
        """A spare takes the rank's place: the next plan."""
        dead, self.members[rank], self.generation = self.members[rank], by, self.generation + 1
        known = {"joiners": [by], "dead": [dead], "verdicts": {"redo": len(self.members) - 1}} | fields
        self.plan(20, **known)

    def go_on(self, step: int, after_ms: float = 70) -> None:
        """Every survivor applies a step."""
        for number, uid in enumerate(self.members):
            wait = after_ms if number == 0 else 1
            self.tell(f"uid {uid}", "recovered", wait, step=step, generation=self.generation, seconds=0.1)

    def end(
        self,
        steps: int,
        outcome: str = "finished",
        message: str = "all ranks have finished",
        **compared: Any,
    ) -> None:
        """The job is over."""
        for uid in self.members:
            self.tell("launcher", "process_exited", 1, uid=uid, label="", code=0)
        self.tell(
            "launcher", f"job_{outcome.replace('-', '_')}", 1, message=message, generation=self.generation, step=steps
        )
        self.tell(
            "launcher", "launcher_ended", 1, outcome=outcome, exit_code=0, message=message, steps=steps, **compared
        )

    def write(self, folder: Path) -> Path:
        """The folder of such a run."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.jsonl").write_text("".join(event.to_json() + "\n" for event in self.events))
        (folder / "run.json").write_text(json.dumps({"schema_version": 1, "host": "elsewhere"}))
        return folder
