"""Pictures of a job's versions: which tier holds which, what came from what, and how large they are."""

from __future__ import annotations

import time
from calendar import timegm
from typing import Any

from evergrad.checkpoint.catalogue.lineage import Key, Node
from evergrad.checkpoint.catalogue.records import CatalogueEntry
from evergrad.report.blocks import Figure
from evergrad.report.checkpoints_reading import JobVersions
from evergrad.report.checkpoints_words import size
from evergrad.report.palette import PALETTE, series_colour
from evergrad.report.run_figures import harmless

_VERSIONS = 300  # drawn, the newest
_NODES = 600
_LANES = 40


def tiers_figure(seen: JobVersions) -> Figure | None:
    """A column a version, in the order of saves; a row a tier."""
    shown = list(reversed(seen.entries[:_VERSIONS]))
    if not shown:
        return None
    rows = ["saved", *seen.tiers]
    kinds: dict[str, list[tuple[int, str, str]]] = {}
    for column, entry in enumerate(shown):
        kinds.setdefault("gone" if entry.retired else "known", []).append((column, "saved", _hover(entry)))
        if entry.pinned or entry.tags:
            kinds.setdefault("kept", []).append((column, "saved", _hover(entry)))
        for kind in seen.tiers:
            holding = seen.holdings.get((entry.version, kind))
            if holding is None:
                continue
            bad = any(verdict.verdict == "failed" and verdict.tier == kind for verdict in entry.verdicts)
            is_whole = 0 < entry.world_size <= holding.ranks
            written = f"<br>last record written {_clock(holding.written_s)}" if holding.written_s is not None else ""
            hover = f"{_hover(entry)}<br>{kind}: shards of {holding.ranks} of {entry.world_size or '?'} ranks{written}"
            name = "damaged" if bad else "whole" if is_whole else "in part"
            kinds.setdefault(name, []).append((column, kind, hover))
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "known": ("saved", {"symbol": "circle", "size": 9, "color": PALETTE["muted"]}),
        "gone": ("gone from every tier", {"symbol": "circle-open", "size": 9, "color": PALETTE["muted"]}),
        "kept": ("pinned or tagged", {"symbol": "diamond-open", "size": 17, "color": PALETTE["warn"]}),
        "whole": ("whole", {"symbol": "square", "size": 13, "color": PALETTE["ok"]}),
        "in part": ("in part", {"symbol": "square-open", "size": 13, "color": PALETTE["warn"], "line": {"width": 2}}),
        "damaged": ("damaged, when last checked", {"symbol": "x", "size": 13, "color": PALETTE["bad"]}),
    }  # fmt: skip
    traces = [_scatter(name, kinds[kind], marker) for kind, (name, marker) in looks.items() if kind in kinds]
    every = max(1, len(shown) // 12)
    ticks = list(range(0, len(shown), every))
    caption = "Versions in the order of their saves, and which tier holds them now."
    if len(shown) < len(seen.entries):
        caption += f" The newest {len(shown)} of {len(seen.entries):,}."
    layout = {
        "xaxis": {
            "title": {"text": "step" + (", and attempt after the dot" if seen.attempts > 1 else "")},
            "tickvals": ticks,
            "ticktext": [_tick(shown[index], seen.attempts) for index in ticks],
            "range": [-0.7, len(shown) - 0.3],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1],
                  "range": [-0.6, len(rows) - 0.4]},
        "hovermode": "closest",
    }  # fmt: skip
    return Figure("versions-and-tiers", traces, layout, caption, 150 + 44 * len(rows))


def sizes_figure(seen: JobVersions) -> Figure | None:
    """The size of each version, when it was saved."""
    known = [(saved, entry) for entry in seen.entries if (saved := saved_s(entry)) is not None][:_VERSIONS]
    if len({saved for saved, _ in known}) < 2:
        return None
    points = [(_stamp(saved), entry.size_bytes / 1e6, _hover(entry)) for saved, entry in reversed(known)]
    trace = _scatter("size", points, {"size": 7, "color": PALETTE["faulty"]})
    trace |= {"mode": "lines+markers", "line": {"width": 1, "dash": "dot", "color": PALETTE["faulty"]}}
    layout = {
        "xaxis": {"title": {"text": "saved, UTC"}, "type": "date"},
        "yaxis": {"title": {"text": "size of all shards, MB"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    return Figure("sizes", [trace], layout, "How large each version is, and when it was captured, to the second.", 300)


def lineage_figure(seen: JobVersions) -> Figure | None:
    """A lane an attempt, steps to the right; lines lead from what a version was trained from."""
    nodes = seen.lineage.nodes[:_NODES]
    lanes = sorted({(node.job != seen.job, node.job, node.version.attempt) for node in nodes})[:_LANES]
    if len(nodes) < 2:
        return None
    names = {(job, attempt): _lane(job if is_other else "", attempt) for is_other, job, attempt in lanes}
    drawn: dict[Key, Node] = {node.key: node for node in nodes if (node.job, node.version.attempt) in names}
    traces = []
    order = list(names)
    for index, lane in enumerate(order):
        x: list[int | None] = []
        y: list[str | None] = []
        for node in drawn.values():
            if (node.job, node.version.attempt) == lane and node.parent in drawn:
                above = drawn[node.parent]
                x += [above.version.step, node.version.step, None]
                y += [names[above.job, above.version.attempt], names[lane], None]
        if x:
            traces.append({"type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip", "showlegend": False,
                           "line": {"width": 1.8, "color": series_colour(index)}})  # fmt: skip
    looks: dict[str, tuple[str, str, str]] = {
        "restorable": ("can be restored", "circle", PALETTE["ok"]),
        "gone": ("gone", "circle-open", PALETTE["muted"]),
        "unknown": ("not known here", "circle-open-dot", PALETTE["muted"]),
    }
    for look, (name, symbol, colour) in looks.items():
        points = [_point(node, names) for node in drawn.values() if node.look == look]
        if points:
            traces.append(_scatter(name, points, {"symbol": symbol, "size": 11, "color": colour, "line": {"width": 2}}))
    pinned = [_point(node, names) for node in drawn.values() if node.pinned or node.tags]
    if pinned:
        marker = {"symbol": "diamond-open", "size": 19, "color": PALETTE["warn"], "line": {"width": 2}}
        trace = _scatter("pinned or tagged", pinned, marker)
        tags = [", ".join(node.tags) for node in drawn.values() if node.pinned or node.tags]
        trace |= {"mode": "markers+text", "text": [harmless(tag[:28]) for tag in tags], "textposition": "top center"}
        traces.append(trace)
    caption = "What each version was trained from: within its attempt, across restarts, across jobs."
    if len(drawn) < len(seen.lineage.nodes):
        caption += f" {len(drawn)} of {len(seen.lineage.nodes):,} versions are drawn, the newest."
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": [names[lane] for lane in order][::-1],
                  "range": [-0.7, len(order) - 0.3]},
        "hovermode": "closest",
    }  # fmt: skip
    return Figure("lineage", traces, layout, caption, 150 + 56 * len(order))


def saved_s(entry: CatalogueEntry) -> float | None:
    """When it was captured, in seconds since 1970; None if that is not on record."""
    try:
        return float(timegm(time.strptime(entry.time, "%Y-%m-%dT%H:%M:%SZ")))
    except (ValueError, OverflowError):
        return None


def _scatter(name: str, points: list[Any], marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point[0] for point in points],
        "y": [point[1] for point in points],
        "hovertext": [point[2] for point in points],
        "hoverinfo": "text",
        "marker": marker,
        "cliponaxis": False,
    }


def _point(node: Node, names: dict[tuple[str, int], str]) -> tuple[int, str, str]:
    told = _hover(node.entry) if node.entry is not None else f"<b>{node.version.name}</b><br>not known here"
    return node.version.step, names[node.job, node.version.attempt], told


def _hover(entry: CatalogueEntry) -> str:
    told = [
        f"<b>{entry.version.name}</b>",
        harmless(", ".join(entry.tags)) or ("pinned" if entry.pinned else ""),
        f"{entry.state}, {size(entry.size_bytes)}, {entry.world_size or '?'} ranks",
        harmless(f"saved {entry.time}"),
    ]
    return "<br>".join(filter(None, told))


def _tick(entry: CatalogueEntry, attempts: int) -> str:
    return f"{entry.version.step}·{entry.version.attempt}" if attempts > 1 else str(entry.version.step)


def _lane(job: str, attempt: int) -> str:
    short = job if len(job) <= 24 else f"{job[:23]}…"
    return harmless(f"{short}, attempt {attempt}" if job else f"attempt {attempt}")


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _clock(seconds: float) -> str:
    return f"{_stamp(seconds)} UTC"
