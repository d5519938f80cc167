"""The columns of a study's tables: what each says of a cell, and what its name means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from evergrad.study.outcomes import Outcome
from evergrad.study.rendering import Quantity
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import (
    coefficient_of_variation,
    mean,
    paired_interval,
    proportion_interval,
    standard_deviation,
)

Column: TypeAlias = "Callable[[Cell, Results], Quantity | None]"

COUNTED = {
    "N-EV": Outcome.NEV,
    "TF": Outcome.FAILED,
    "AccR": Outcome.DEGRADED,
    "changed": Outcome.CHANGED,
    "identical": Outcome.IDENTICAL,
    "unknown": Outcome.UNKNOWN,
}

MEANINGS = {
    "trainings": "with a verdict; rates are over those whose outcome is known",
    "due": "trainings that the plan asks for",
    "N-EV": "a NaN, an infinity or an extreme value was seen in state, loss or outputs",
    "NaN": "of N-EV, those in which a NaN or an infinity was seen; the others have extreme values alone",
    "TF": "stayed finite and crashed, never finished, or ended at chance level",
    "AccR": "finished, with a metric worse than the golden run's by more than the margin",
    "changed": "finished with another result than the golden run, and none of the outcomes before this one",
    "identical": "finished with the golden run's result",
    "unknown": "the worker was lost; in no rate",
    "RWC": "result with change, every known outcome but identical",
    "mismatch %": "test samples of which the restored model says something else than the golden one, mean of trainings",
    "AvgI-Acc": "mean metric at the first evaluation after the restart, where it is finite",
    "ACC": "mean final metric of trainings that finish finite",
    "STD": "standard deviation of the final metric, by n - 1",
    "CV %": "STD in % of ACC",
    "ΔACC": "mean of final metric less the golden run's, with an interval by bootstrap",
}


def nev_rate(cell: Cell, results: Results) -> Quantity | None:
    """The rate of N-EV in %, with the cell's own interval."""
    return _rate(cell, cell.counts[Outcome.NEV], cell.interval)


def rwc_rate(cell: Cell, results: Results) -> Quantity | None:
    """The rate of results with change in %."""
    return _counted_rate(cell, cell.changed_result, results)


def _failed(cell: Cell, results: Results) -> Quantity | None:
    return _counted_rate(cell, cell.counts[Outcome.FAILED], results)


def _degraded(cell: Cell, results: Results) -> Quantity | None:
    return _counted_rate(cell, cell.counts[Outcome.DEGRADED], results)


def _counted_rate(cell: Cell, count: int, results: Results) -> Quantity | None:
    return _rate(cell, count, proportion_interval(count, cell.known, results.confidence, results.interval))


def _rate(cell: Cell, count: int, interval: tuple[float, float]) -> Quantity | None:
    return Quantity(100 * count / cell.known, 1, 100 * interval[0], 100 * interval[1]) if cell.known else None


def _mismatch(cell: Cell, results: Results) -> Quantity | None:
    return _with_interval([100 * part for part in cell.mismatches], results, 2)


def start(cell: Cell, results: Results) -> Quantity | None:
    """The mean metric at the restart."""
    return _quantity(mean([number for number in cell.starts if math.isfinite(number)]))


def _accuracy(cell: Cell, results: Results) -> Quantity | None:
    return _quantity(mean(cell.finals))


def _spread(cell: Cell, results: Results) -> Quantity | None:
    return _quantity(standard_deviation(cell.finals))


def _variation(cell: Cell, results: Results) -> Quantity | None:
    part = coefficient_of_variation(cell.finals)
    return None if part is None else Quantity(100 * part, 2)


def change(cell: Cell, results: Results) -> Quantity | None:
    """The mean of what the fault did to the final metric, against the golden run."""
    if not math.isfinite(cell.golden):
        return None
    return _with_interval([final - cell.golden for final in cell.finals], results, 4)


def _with_interval(values: Sequence[float], results: Results, digits: int) -> Quantity | None:
    middle = mean(values)
    if middle is None:
        return None
    low, high = paired_interval(values, results.confidence) if len(values) > 1 else (None, None)
    return Quantity(middle, digits, low, high)


def _quantity(value: float | None) -> Quantity | None:
    return None if value is None else Quantity(value, 4)


# Shown where any cell has a value: inference has mismatches, and a command may measure nothing.
ACCURACIES: dict[str, Column] = {
    "mismatch %": _mismatch,
    "AvgI-Acc": start,
    "ACC": _accuracy,
    "STD": _spread,
    "CV %": _variation,
    "ΔACC": change,
}

# What can be shown in the published shape, by the name to ask for it.
PUBLISHED: dict[str, tuple[str, Column]] = {
    "nev": ("N-EV %", nev_rate),
    "rwc": ("RWC %", rwc_rate),
    "failed": ("TF %", _failed),
    "degraded": ("AccR %", _degraded),
    "mismatch": ("mismatch %", _mismatch),
    "start": ("AvgI-Acc", start),
    "final": ("ACC", _accuracy),
    "change": ("ΔACC", change),
}
