"""A lineage as an SVG picture: time runs to the right, one lane an attempt, drawn without any library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from evergrad.checkpoint.catalogue.lineage import Key, Lineage, Node

_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
_INK, _SOFT, _LINE, _BAND, _RING = "#1c2733", "#6b7785", "#9aa5b1", "#f4f6f8", "#d9822b"
_LANES = ("#2563a8", "#2e8b57", "#8a4fbe", "#b8472f", "#0f8b8d", "#96751a")
_TOP, _RIGHT, _LANE = 92, 48, 58
_PITCH = (9.0, 92.0)
_WIDTH = 1000  # that a picture with few versions aims at


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything is."""

    lanes: dict[tuple[str, int], int]
    columns: dict[Key, int]
    pitch: float
    left: float

    def x(self, key: Key) -> float:
        return self.left + (self.columns[key] + 0.5) * self.pitch

    def y(self, key: Key) -> float:
        return _TOP + (self.lanes[key[0], key[1].attempt] + 0.5) * _LANE

    @property
    def radius(self) -> float:
        return max(3.2, min(7.0, self.pitch * 0.36))

    @property
    def width(self) -> float:
        return max(self.left + (max(self.columns.values(), default=0) + 1) * self.pitch + _RIGHT, 720)

    @property
    def height(self) -> float:
        return _TOP + max(len(self.lanes), 1) * _LANE + 62


def draw_svg(lineage: Lineage) -> str:
    """The picture: filled can be restored, hollow is gone, a ring is pinned, labels are steps and tags."""
    plan = _plan(lineage)
    width, height = round(plan.width), round(plan.height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'{_FONT} font-size="12" fill="{_INK}">',
        f"<title>Lineage of {_text(lineage.job)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="24" y="36" font-size="19" font-weight="600">Lineage of {_text(lineage.job)}</text>',
        f'<text x="24" y="58" fill="{_SOFT}">{_text(_summary(lineage))}</text>',
        *_lanes(lineage, plan),
        *(_edge(child, parent, plan) for child, parent in lineage.edges()),
        *(_mark(node, plan) for node in lineage.nodes),
        *_labels(lineage, plan),
        *_legend(plan),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _plan(lineage: Lineage) -> _Plan:
    columns: dict[Key, int] = {}
    for node in reversed(lineage.nodes):  # parents come first
        columns[node.key] = columns[node.parent] + 1 if node.parent in columns and node.parent is not None else 0
    jobs = list(dict.fromkeys(node.job for node in reversed(lineage.nodes)))
    lanes = sorted({(node.job, node.version.attempt) for node in lineage.nodes}, key=lambda it: (jobs.index(it[0]), it))
    count = max(columns.values(), default=0) + 1
    left = 40 + 7.2 * max((len(_lane_name(lineage, *lane)) for lane in lanes), default=0)
    pitch = max(_PITCH[0], min(_PITCH[1], (_WIDTH - left - _RIGHT) / count))
    return _Plan({lane: index for index, lane in enumerate(lanes)}, columns, pitch, left)


def _summary(lineage: Lineage) -> str:
    own = [node for node in lineage.nodes if node.job == lineage.job]
    attempts = len({node.version.attempt for node in own})
    told = [
        _count(len(own), "version"),
        f"{sum(node.look == 'restorable' for node in own)} can be restored",
        f"{sum(node.pinned for node in own)} pinned",
        _count(attempts, "attempt"),
    ]
    others = len({node.job for node in lineage.nodes} - {lineage.job})
    return " · ".join(told + ([f"descends from {_count(others, 'other job')}"] if others else []))


def _lane_name(lineage: Lineage, job: str, attempt: int) -> str:
    return f"attempt {attempt}" if job == lineage.job else f"{_short(job)} · attempt {attempt}"


def _lanes(lineage: Lineage, plan: _Plan) -> Iterator[str]:
    for (job, attempt), index in plan.lanes.items():
        top = _TOP + index * _LANE
        if index % 2 == 0:
            yield f'<rect x="12" y="{top}" width="{plan.width - 24:.0f}" height="{_LANE}" rx="6" fill="{_BAND}"/>'
        name, colour = _text(_lane_name(lineage, job, attempt)), _colour(plan, job, attempt)
        yield f'<text x="24" y="{top + _LANE / 2 + 4:.0f}" fill="{colour}" font-weight="600">{name}</text>'


def _edge(child: Node, parent: Node, plan: _Plan) -> str:
    (x1, y1), (x2, y2) = ((plan.x(node.key), plan.y(node.key)) for node in (parent, child))
    colour = _colour(plan, child.job, child.version.attempt)
    middle = (x1 + x2) / 2
    curve = f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    if y1 != y2:
        curve = f"M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {x1:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    return f'<path d="{curve}" fill="none" stroke="{colour}" stroke-opacity="0.55" stroke-width="1.8"/>'


def _mark(node: Node, plan: _Plan) -> str:
    x, y, r = plan.x(node.key), plan.y(node.key), plan.radius
    colour = _colour(plan, node.job, node.version.attempt)
    dash = ' stroke-dasharray="2 2"' if node.look == "unknown" else ""
    ring = ""
    if node.pinned:
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r + 3:.1f}" fill="none" stroke="{_RING}" stroke-width="2"/>'
    fill = colour if node.look == "restorable" else "#ffffff"
    dot = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{fill}" '
        f'stroke="{colour if node.look != "unknown" else _LINE}" stroke-width="1.6"{dash}/>'
    )
    return f"<g><title>{_text(_hover(node))}</title>{ring}{dot}</g>"


def _labels(lineage: Lineage, plan: _Plan) -> Iterator[str]:
    """Steps below, tags above; where they would meet, those that matter most stay: ends, pinned ones, then a few."""
    by_lane: dict[tuple[str, int], list[Node]] = {}
    for node in reversed(lineage.nodes):
        by_lane.setdefault((node.job, node.version.attempt), []).append(node)
    for lane, nodes in by_lane.items():
        taken = _crossed(lineage, plan, plan.lanes[lane])
        above: list[tuple[float, float]] = []
        ends = (nodes[0], nodes[-1])
        for node in sorted(nodes, key=lambda it: (not it.pinned, it not in ends, plan.columns[it.key])):
            x, y, step = plan.x(node.key), plan.y(node.key), str(node.version.step)
            if _fits(taken, x, 7.0 * len(step) + 10):
                weight = ' font-weight="600"' if node.pinned else f' fill="{_SOFT}"'
                yield (
                    f'<text x="{x:.1f}" y="{y + plan.radius + 16:.1f}" font-size="11" '
                    f'text-anchor="middle"{weight}>{step}</text>'
                )
            tag = _short(", ".join(node.tags))
            if tag and _fits(above, x, 6.6 * len(tag) + 10):
                yield (
                    f'<text x="{x:.1f}" y="{y - plan.radius - 8:.1f}" font-size="11" font-weight="600" '
                    f'text-anchor="middle" fill="{_RING}">{_text(tag)}</text>'
                )


def _crossed(lineage: Lineage, plan: _Plan, lane: int) -> list[tuple[float, float]]:
    """Where lines to other lanes pass through the row of labels of this one."""
    spans = []
    for child, parent in lineage.edges():
        lanes = sorted(plan.lanes[node.job, node.version.attempt] for node in (child, parent))
        if lanes[0] <= lane < lanes[1]:
            x = plan.x(parent.key) + (plan.x(child.key) - plan.x(parent.key)) / 4
            spans.append((x - 3, x + 3))
    return spans


def _fits(taken: list[tuple[float, float]], x: float, width: float) -> bool:
    begin, end = x - width / 2, x + width / 2
    if any(begin < right and left < end for left, right in taken):
        return False
    taken.append((begin, end))
    return True


def _legend(plan: _Plan) -> Iterator[str]:
    y = plan.height - 28
    x = 30.0
    kinds = [("restorable", "can be restored"), ("gone", "retired"), ("unknown", "not known here"), ("ring", "pinned")]
    for kind, words in kinds:
        dash = ' stroke-dasharray="2 2"' if kind == "unknown" else ""
        fill = _SOFT if kind in ("restorable", "ring") else "#ffffff"
        if kind == "ring":
            yield f'<circle cx="{x}" cy="{y}" r="8.5" fill="none" stroke="{_RING}" stroke-width="2"/>'
        yield f'<circle cx="{x}" cy="{y}" r="5.5" fill="{fill}" stroke="{_SOFT}" stroke-width="1.6"{dash}/>'
        yield f'<text x="{x + 14}" y="{y + 4}" fill="{_SOFT}">{words}</text>'
        x += 14 + 6.6 * len(words) + 30
    yield f'<text x="{x}" y="{y + 4}" fill="{_SOFT}">numbers are steps</text>'


def _hover(node: Node) -> str:
    told = [node.version.name, f"job {node.job}"]
    if node.entry is not None:
        told += [node.entry.state, node.entry.time, ", ".join(node.entry.tiers), ", ".join(node.tags)]
    return " · ".join(filter(None, told))


def _colour(plan: _Plan, job: str, attempt: int) -> str:
    return _LANES[plan.lanes[job, attempt] % len(_LANES)]


def _short(text: str, limit: int = 28) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _text(text: str) -> str:
    """A text that no reader takes for markup; what XML cannot hold is left out."""
    return escape("".join(char for char in text if char.isprintable()))
