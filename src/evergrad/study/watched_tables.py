"""The table of a study that asks for more than outcomes: how far faults spread, what guards saw, what saving costs."""

from __future__ import annotations

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Results

WATCHED = ("costs", "spread", "guards")


def watched_kind(results: Results) -> str:
    """Which of `WATCHED` this study is first of all about; empty: outcomes are what it asks for."""
    return next(iter(watched_kinds(results)), "")


def watched_kinds(results: Results) -> list[str]:
    """Of `WATCHED`, those that there is something to show of."""
    seen = [one for cell in results.cells for one in cell.seen]
    there = {
        "guards": any(one.alarms for one in seen),
        "spread": any(one.spread for one in seen),
        "costs": any(one.costs and not one.alarms for one in seen),  # what guards cost is in their own table
    }
    return [kind for kind, is_there in there.items() if is_there]


def watched_to_json(results: Results) -> dict[str, Json]:
    """Every table of these, a mapping a row; a number with what stands in brackets behind it."""
    found: dict[str, Json] = {}
    for kind in watched_kinds(results):
        table = watched_table(results, kind)
        found[kind] = [dict(zip(table.headers, map(_plain, row), strict=True)) for row in table.rows]
    return found


def watched_table(results: Results, kind: str) -> Table:
    """The table of that kind; `UsageError` if the study has nothing to put into it."""
    found = watched_kinds(results)
    if kind not in found:
        told = f"it has {' and '.join(found)}" if found else "its trials were not asked for more than outcomes"
        raise UsageError(f"study {results.study}: no table of {kind}: {told}")
    if kind == "guards":
        from evergrad.study.guard_tables import guard_table

        return guard_table(results)
    if kind == "spread":
        from evergrad.study.spread_tables import spread_table

        return spread_table(results)
    from evergrad.study.cost_tables import cost_table

    return cost_table(results)


def _plain(entry: Entry) -> Json:
    if not isinstance(entry, Quantity):
        return entry
    return {"value": entry.value, "low": entry.low, "high": entry.high}
