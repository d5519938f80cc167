"""What was promised, against what was measured; and what it is that takes the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness import Report, Sample, seconds
from benchmarks.recovery.figure import CASE
from benchmarks.recovery.logs import PHASES

__all__ = ["bars", "limits"]

BEYOND_S = 0.1
TIMES_FASTER = 20
PROMISED = ("rollback", "forward", "rollback, spare", "forward, spare")
"""Those that go on without a checkpoint: two steps and a tenth of a second."""
MOST_COST = 1.03


def bars(report: Report, samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """A line a promise; none for what was not measured."""
    return [*_two_steps(samples), *_faster(report), *_cost(report)]


def _two_steps(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    notes = []
    for name in PROMISED:
        runs = samples.get(name, ())
        if not runs:
            continue
        within = sum(run["beyond_s"] <= BEYOND_S for run in runs)
        beyond = _median([run["beyond_s"] for run in runs])
        met = "met" if beyond <= BEYOND_S else "not met"
        notes.append(
            f"Bar, {name}: SIGKILL → last survivor's next step ≤ 2 steps + 100 ms: "
            f"2 steps {'+' if beyond >= 0 else '−'} {seconds(abs(beyond))} (median; the median survivor is back in "
            f"{seconds(_median([run['median_s'] for run in runs]))}), "
            f"{within} of {len(runs)} kills within: {met}."
        )
    return notes


def _faster(report: Report) -> list[str]:
    theirs = report.median(CASE, "torchrun restart", "time_s")
    notes = []
    for name in PROMISED if theirs is not None else ():
        ours = report.median(CASE, name, "time_s")
        if ours is None or theirs is None:
            continue
        ratio = theirs / ours
        met = "met" if ratio >= TIMES_FASTER else "not met"
        notes.append(
            f"Bar, {name}: ≥ {TIMES_FASTER} × faster than torchrun restart ({seconds(theirs)}): "
            f"{seconds(ours)}, {ratio:.0f} × faster: {met}."
        )
    return notes


def _cost(report: Report) -> list[str]:
    notes = []
    for case in dict.fromkeys(row.case for row in report.rows if row.case.startswith("no failure")):
        ratios = {row.contender: row.measures["paired"] for row in report.rows if row.case == case}
        ours = ratios["evergrad"].median
        control = [b / a - 1 for a, b in zip(ratios["DDP"].values, ratios["DDP again"].values, strict=True)]
        noise = f"the same DDP twice: {_median(control):+.1%}, {min(control):+.1%} to {max(control):+.1%}"
        view = ours / ratios["DDP, bucket view"].median
        if not case.endswith("forward"):
            # Unjudged is not passed: where two equal ones differ by more, nothing can be told of the difference.
            is_noisy = abs(_median(control)) > MOST_COST - 1
            met = "not judged, the noise is larger" if is_noisy else "met" if ours <= MOST_COST else "not met"
            head, tail = f"Bar, {case}: ≤ 3 % over default DDP", f": {met}"
        else:
            head, tail = f"{case}: over default DDP", ""
        notes.append(
            f"{head}: {ours - 1:+.1%}{tail} (against gradient_as_bucket_view {view - 1:+.1%}; {noise}; "
            f"{len(ratios['evergrad'].values)} rounds)."
        )
    return notes


def limits(report: Report) -> list[str]:
    """The largest parts of a recovery."""
    notes = []
    for name in PROMISED:
        case = f"parts: {name}"
        parts = {phase: report.median(case, phase, "time_s") for phase in PHASES}
        known = {phase: part for phase, part in parts.items() if part is not None}
        if known:
            first, second, *_ = sorted(known, key=lambda phase: -known[phase])
            notes.append(
                f"What limits {name}: '{first}' takes {seconds(known[first])}, '{second}' {seconds(known[second])}, "
                f"of {seconds(sum(known.values()))} (medians)."
            )
    return notes


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
