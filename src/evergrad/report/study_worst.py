"""The worst trials of a study: a NaN after the fewest flips, or the worst final metric; with replays."""

from __future__ import annotations

import heapq
import shlex
from pathlib import Path

from evergrad.report.blocks import Block, Cell, Column, Commands, DataTable, Prose
from evergrad.report.study_data import StudyData, TrialData, place_text
from evergrad.study.outcomes import Outcome

_EACH = 5


def worst_trials(data: StudyData) -> list[TrialData]:
    """N-EV first, the fewest flips and the earliest first; then the worst final metrics; a few of each."""
    nev = heapq.nsmallest(_EACH, (one for one in data.trials() if one.outcome is Outcome.NEV), key=_nev_key)
    lost = [one for one in data.trials() if one.outcome in (Outcome.FAILED, Outcome.DEGRADED, Outcome.CHANGED)]
    lost = [one for one in lost if one.outcome is Outcome.FAILED or (one.drop or 0) > 0]
    return [*nev, *heapq.nsmallest(_EACH, lost, key=_drop_key)]


def worst_blocks(data: StudyData) -> list[Block]:
    """The table of them, and the commands that run each again."""
    found = worst_trials(data)
    if not found:
        return []
    columns = [
        Column("trial"),
        Column("cell"),
        Column("outcome", help="nev: a NaN, an infinity or an extreme value was seen"),
        Column("first seen", "number", "after which step a NaN, an infinity or an extreme value; 0: at the restart"),
        Column("in"),
        Column("at restart", "number", "the metric before the first step"),
        Column("final", "number", "the last metric on record"),
        Column("worse by", "number", "how much worse than the golden run's final metric this one is"),
    ]  # fmt: skip
    # Programs of users' own have no replay of bits, but the same command runs them again.
    lines = [(f"{one.outcome.value}: {place_text(one.trial.axes)}", replay_line(data.folder, one)) for one in found]
    told = (
        f"Up to {_EACH} with N-EV, those with the fewest flips first, and up to {_EACH} whose "
        "final metric is worse than the golden run's by most."
    )
    return [Prose(told), DataTable(columns, [_row(one) for one in found]), Commands(lines)]


def replay_line(folder: Path, one: TrialData) -> str:
    """The command that runs a trial again."""
    return f"evergrad study replay {shlex.quote(str(folder))} {one.trial.id}"


def _row(one: TrialData) -> list[Cell]:
    at = [step for step in (one.seen.nonfinite_at, one.seen.extreme_at) if step is not None]
    first = min(at, default=None)
    where = (one.seen.nonfinite_in if first == one.seen.nonfinite_at else one.seen.extreme_in) if at else ""
    metrics = one.seen.metrics
    finished = bool(metrics) and (len(metrics) > 1 or one.seen.steps == 0)
    return [
        Cell(one.trial.id),
        Cell(place_text(one.trial.axes)),
        Cell(one.outcome.value),
        Cell("–", None, "muted") if first is None else Cell(str(first), first),
        Cell(where or "–", where or None),
        _number(metrics[0] if metrics else None),
        _number(metrics[-1] if finished else None),
        _number(one.drop if finished else None),
    ]


def _number(value: float | None) -> Cell:
    return Cell("–", None, "muted") if value is None else Cell(f"{value:.4f}", value)


def _nev_key(one: TrialData) -> tuple[int, int, str]:
    at = [step for step in (one.seen.nonfinite_at, one.seen.extreme_at) if step is not None]
    return one.trial.flips, min(at, default=0), one.trial.id


def _drop_key(one: TrialData) -> tuple[float, str]:
    return -(one.drop if one.drop is not None else float("inf")), one.trial.id
