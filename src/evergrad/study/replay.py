"""One trial again, alone: the same faults from the same checkpoint, and so the same bits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.errors import UnknownTensor, UsageError
from evergrad.records import Json
from evergrad.study.folder import JournalEntry, StudyFolder
from evergrad.study.trials import Observation, Trial

_COMPARED = ("end", "reason", "steps", "metrics", "losses", "distances", "magnitudes", "nonfinite_at", "nonfinite_in",
             "extreme_at", "extreme_in", "digest", "mismatches", "injected", "changed", "spread", "alarms")  # fmt: skip
_UNSEEN = ("losses", "distances", "magnitudes", "reason", "nonfinite_in", "extreme_in", "spread", "alarms")
_FIRST = re.compile(r"^rank \d+: ")
"""Of ranks that all fail, which one is heard first is chance."""


@dataclass(frozen=True, slots=True)
class TrialReplay:
    """A trial as it was and as it is."""

    trial: Trial
    was: Observation
    now: Observation
    hits: list[Mapping[str, Json]]
    """What was done to which bits, by `rank` and in `words`; nothing for a program of the user's own."""

    @property
    def same(self) -> bool:
        """Whether everything that was seen is the same, the final weights to the last bit."""
        return all(before == now for _, before, now in self._pairs())

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """What a person wants to see: name, then, now."""
        for name, before, now in self._pairs():
            if name not in _UNSEEN:
                yield name, _text(before), _text(now)

    def to_json(self) -> dict[str, Json]:
        """Both observations, and the faults."""
        return {
            "trial": self.trial.to_json(),
            "was": self.was.to_json(),
            "now": self.now.to_json(),
            "hits": [dict(hit) for hit in self.hits],
            "same": self.same,
        }

    def _pairs(self) -> Iterator[tuple[str, Json, Json]]:
        before, now = self.was.to_json(), self.now.to_json()
        for told in (before, now):
            told["reason"] = _FIRST.sub("", str(told["reason"]))
        for name in _COMPARED:
            yield name, before.get(name), now.get(name)


def replay_trial(folder: Path, wanted: str) -> TrialReplay:
    """Run the trial of that id, or of the only id that begins so, in this process."""
    entry = _find(folder, wanted)
    import torch

    from evergrad.study.tasks import perform
    from evergrad.study.trials import replay_work

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have: sums depend on it
    try:
        told: dict[str, Any] = perform(folder, replay_work(entry.trial))
    finally:
        torch.set_num_threads(threads)
    hits = told.pop("hits", [])
    return TrialReplay(entry.trial, entry.observation, Observation.from_json(told), hits)


def _find(folder: Path, wanted: str) -> JournalEntry:
    """The trial as the plan has it: what a journal says is to be run is never run."""
    study = StudyFolder(folder)
    plan, entries = study.plan(), study.journal_contents().entries
    found: dict[str, JournalEntry] = {}
    names = []
    for trial in (cell.trial(number) for cell in plan.cells for number in range(cell.trainings)):
        entry = entries.get(trial.id)
        if entry is not None:
            names.append(trial.id)
            if wanted and trial.id.startswith(wanted):
                found[trial.id] = JournalEntry(trial, entry.observation, entry.golden)
    if not found:
        raise UnknownTensor(wanted, names, where=str(folder), what="trial")
    if len(found) > 1:
        raise UsageError(f"{folder}: {len(found)} trials begin with {wanted!r}: give more of its id")
    return next(iter(found.values()))


def _text(value: Json) -> str:
    if isinstance(value, list):
        return ", ".join(f"{one:.4f}" if isinstance(one, float) else str(one) for one in value)
    return "–" if value is None or value == "" else str(value)
