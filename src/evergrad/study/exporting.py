"""A study as files: tables in every form, the trials one by one, the results, the plan."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from evergrad.errors import FileAccessError, reason
from evergrad.formats.durable import replacing
from evergrad.study.folder import StudyFolder
from evergrad.study.rendering import defused, written
from evergrad.study.tables import comparisons_table, published_table, results_to_json, summary_table
from evergrad.study.tally import results_of, tally_of
from evergrad.study.watched_tables import watched_kinds, watched_table

_ENDINGS = {"csv": "csv", "markdown": "md", "latex": "tex"}
_COLUMNS = (
    "trial", "repetition", "seed", "fault", "flips", "where", "layer", "outcome", "end", "reason", "steps",
    "metric_at_restart", "final_metric", "nonfinite_at", "nonfinite_in", "extreme_at", "extreme_in", "mismatches",
    "injected", "changed", "final_distance", "seconds",
)  # fmt: skip


def export_study(folder: Path, to: Path) -> list[Path]:
    """Write everything to a folder; returns the files. Files of an earlier export are replaced, each at once."""
    results = results_of(folder)
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileAccessError(to, f"cannot be made: {reason(error)}") from error
    texts: dict[str, str] = {}
    made = {"summary": summary_table(results), "published": published_table(results)}
    made["comparisons"] = comparisons_table(results)
    for kind in watched_kinds(results):
        made[kind] = watched_table(results, kind)
    for name, table in made.items():
        texts |= {f"{name}.{ending}": written(table, form) for form, ending in _ENDINGS.items()}
    texts["results.json"] = json.dumps(results_to_json(results), indent=1, allow_nan=False) + "\n"
    texts["trials.csv"] = _trials(folder)
    texts["plan.toml"] = StudyFolder(folder).plan().text
    files = []
    for name, text in texts.items():
        with replacing(to / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        files.append(to / name)
    return files


def _trials(folder: Path) -> str:
    """One row a trial, with its axes first."""
    tally, _ = tally_of(folder, brief=False)
    text = io.StringIO()
    axes = [name for name in tally.plan.axes if name not in _COLUMNS]
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*axes, *_COLUMNS])
    for cell in tally.cells:
        for number in cell.counted():
            trial, seen = cell.entries[number].trial, cell.entries[number].observation
            row = (
                trial.id, number, trial.seed, trial.fault, trial.flips, trial.where, trial.layer,
                cell.outcomes[number].value, seen.end.value, seen.reason, seen.steps,
                seen.metrics[0] if seen.metrics else "", seen.metrics[-1] if seen.metrics else "",
                _or_empty(seen.nonfinite_at), seen.nonfinite_in, _or_empty(seen.extreme_at), seen.extreme_in,
                _or_empty(seen.mismatches), seen.injected, seen.changed,
                seen.distances.values[-1] if seen.distances.values else "", f"{seen.seconds:.4f}",
            )  # fmt: skip
            out.writerow([*(_plain(trial.axes.get(name, "")) for name in axes), *map(_plain, row)])
    return text.getvalue()


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value


def _plain(value: object) -> object:
    return defused(value) if isinstance(value, str) else value
