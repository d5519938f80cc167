"""Which version was trained from which: within an attempt, across restarts, and across jobs.

A version comes from the one before it in its attempt; the first of an attempt comes from what the attempt was
restored from, which may be another job's. That job's catalogue is followed if it can be reached. A version that is
named as a parent and known no more is a stub: a node of which only the name is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Literal
from xml.sax.saxutils import escape

from evergrad.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError
from evergrad.records import Json

Key = tuple[str, Version]
"""A job, and one of its versions."""

_MAX_JOBS = 100


@dataclass(frozen=True, slots=True)
class LineageNode:
    """A version in the graph."""

    job: str
    version: Version
    parent: Key | None
    entry: CatalogueEntry | None = None
    """What is known of it; None for a stub."""

    @property
    def key(self) -> Key:
        """What edges call it."""
        return self.job, self.version

    @property
    def appearance(self) -> Literal["restorable", "gone", "unknown"]:
        """How it is drawn: filled, hollow, or dashed because nobody could say."""
        if self.entry is None or self.entry.state == "unknown":
            return "unknown"
        return "restorable" if self.entry.restorable else "gone"

    @property
    def pinned(self) -> bool:
        """Whether retention leaves it alone."""
        return self.entry is not None and self.entry.pinned

    @property
    def tags(self) -> tuple[str, ...]:
        """The names that people gave it."""
        return self.entry.tags if self.entry is not None else ()


@dataclass(frozen=True, slots=True)
class Lineage:
    """The versions of a job and what they came from: a forest, each node before its parent, newest first."""

    job: str
    nodes: tuple[LineageNode, ...]
    notes: tuple[str, ...] = ()
    """What could not be followed, and why."""
    index: Mapping[Key, LineageNode] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {node.key: node for node in self.nodes})

    def edges(self) -> Iterator[tuple[LineageNode, LineageNode]]:
        """Each node that has one, with its parent."""
        for node in self.nodes:
            if node.parent is not None:
                yield node, self.index[node.parent]

    def newest(self, nodes: int, lanes: int) -> Lineage:
        """At most so many versions, the newest, of at most so many attempts; lines from older ones are cut."""
        kept: dict[Key, LineageNode] = {}
        seen: set[tuple[str, int]] = set()
        for node in self.nodes[:nodes]:
            lane = node.job, node.version.attempt
            if lane in seen or len(seen) < lanes:
                seen.add(lane)
                kept[node.key] = node
        cut = (node if node.parent in kept else replace(node, parent=None) for node in kept.values())
        return Lineage(self.job, tuple(cut), self.notes)

    def to_json(self) -> dict[str, Json]:
        """Nodes and edges, as `evergrad checkpoints lineage --json` prints them."""
        nodes: list[Json] = []
        for node in self.nodes:
            row: dict[str, Json] = {"id": _id(node.key), "job": node.job, "version": node.version.name}
            row |= {"step": node.version.step, "attempt": node.version.attempt, "known": node.entry is not None}
            if node.entry is not None:
                row |= {"state": node.entry.state, "pinned": node.pinned, "tags": list(node.tags)}
                row |= {"time": node.entry.time, "tiers": list(node.entry.tiers)}
            nodes.append(row)
        edges: list[Json] = [{"from": _id(parent.key), "to": _id(child.key)} for child, parent in self.edges()]
        return {"job": self.job, "nodes": nodes, "edges": edges, "notes": list(self.notes)}


def trace_lineage(catalogue: Catalogue) -> Lineage:
    """The lineage of a job: all its versions, and of other jobs those that it descends from."""
    own = _nodes_of(catalogue, catalogue.entries())
    nodes: dict[Key, LineageNode] = {node.key: node for node in own}
    notes: list[str] = []
    wanted = _foreign(catalogue, own)
    jobs: dict[str, tuple[Catalogue, list[LineageNode]] | None] = {catalogue.location.job: (catalogue, own)}
    while wanted:
        (job, version), source = wanted.popitem()
        if job not in jobs:
            jobs[job] = _follow(job, source, notes) if len(jobs) < _MAX_JOBS else None
        reached = jobs[job]
        if reached is None:
            nodes.setdefault((job, version), LineageNode(job, version, None))
            continue
        other, theirs = reached
        line = _ancestors((job, version), {node.key: node for node in theirs})
        nodes |= {node.key: node for node in line}
        wanted |= {key: place for key, place in _foreign(other, line).items() if key not in nodes}
    for node in list(nodes.values()):  # a parent that nobody remembers
        if node.parent is not None and node.parent not in nodes:
            nodes[node.parent] = LineageNode(*node.parent, None)
    return Lineage(catalogue.location.job, tuple(_newest_first(nodes, catalogue.location.job)), tuple(notes))


def _nodes_of(catalogue: Catalogue, entries: list[CatalogueEntry]) -> list[LineageNode]:
    job = catalogue.location.job
    return [LineageNode(job, entry.version, _key(entry.parent, job), entry) for entry in entries]


def _key(parent: str | None, job: str) -> Key | None:
    if parent is None:
        return None
    other, slash, name = parent.rpartition("/")
    version = Version.parse(name)
    return None if version is None else (other if slash else job, version)


def _foreign(catalogue: Catalogue, nodes: list[LineageNode]) -> dict[Key, str | None]:
    """The versions of other jobs that these come from, and where those jobs are."""
    found: dict[Key, str | None] = {}
    for node in nodes:
        if node.parent is not None and node.parent[0] != node.job:
            source = catalogue.location.attempts.get(node.version.attempt, {}).get("source")
            found[node.parent] = source if isinstance(source, str) and source else None
    return found


def _follow(job: str, source: str | None, notes: list[str]) -> tuple[Catalogue, list[LineageNode]] | None:
    """Another job's catalogue, if it is where it was, and still that job's."""
    if source is None:
        notes.append(f"job {job}: not recorded where it is")
        return None
    try:
        catalogue = Catalogue(source)
        if catalogue.location.job != job:
            notes.append(f"job {job}: {catalogue.label} is job {catalogue.location.job} now")
            return None
        return catalogue, _nodes_of(catalogue, catalogue.entries())
    except (EvergradError, OSError) as error:
        notes.append(f"job {job}: {error}")
        return None


def _ancestors(key: Key, known: Mapping[Key, LineageNode]) -> list[LineageNode]:
    """A version and what it came from, within its own job."""
    line: dict[Key, LineageNode] = {}
    at: Key | None = key
    while at is not None and at[0] == key[0] and at not in line:
        node = known.get(at) or LineageNode(*at, None)
        line[at] = node
        at = node.parent
    return list(line.values())


def _newest_first(nodes: Mapping[Key, LineageNode], own: str) -> Iterator[LineageNode]:
    """Children before parents; among those that could be next, this job's first, and the newest of them."""
    children = Counter(node.parent for node in nodes.values())

    def order(key: Key) -> tuple[bool, str, int, int]:
        job, version = key
        return job != own, job, -version.attempt, -version.step

    ready = [(order(key), index, key) for index, key in enumerate(nodes) if not children[key]]
    heapify(ready)
    left = dict(nodes)
    while left:
        # Records that contradict each other may lead in a circle: it is cut.
        key = heappop(ready)[2] if ready else min(left, key=order)
        node = left.pop(key, None)
        if node is None:
            continue
        if node.parent is not None and node.parent not in left:
            node = replace(node, parent=None)
        yield node
        if node.parent is not None:
            children[node.parent] -= 1
            if not children[node.parent]:
                heappush(ready, (order(node.parent), len(nodes), node.parent))


def _id(key: Key) -> str:
    return f"{key[0]}/{key[1].name}"


# A lineage as lines of text, newest first, as `git log --graph` draws history.


def draw(lineage: Lineage) -> Iterator[tuple[str, LineageNode | None]]:
    """The rows of the graph: the drawing, and the version that the row is of, or None where lines only meet."""
    waiting: list[Key] = []  # what each column leads down to
    for node in lineage.nodes:
        columns = [index for index, key in enumerate(waiting) if key == node.key]
        if len(columns) > 1:  # several came from this one
            yield _joining(waiting, columns), None
            for index in reversed(columns[1:]):
                del waiting[index]
        if not columns:
            waiting.append(node.key)
        place = columns[0] if columns else len(waiting) - 1
        yield " ".join(mark(node) if index == place else "│" for index in range(len(waiting))), node
        if node.parent is None:
            del waiting[place]
        else:
            waiting[place] = node.parent


def mark(node: LineageNode) -> str:
    """Filled: can be restored; hollow: gone; dashed: only its name is known. With a ring: pinned."""
    if node.appearance == "unknown":
        return "◌"
    if node.appearance == "restorable":
        return "◉" if node.pinned else "●"
    return "◎" if node.pinned else "○"


def _joining(waiting: list[Key], columns: list[int]) -> str:
    first, last = columns[0], columns[-1]
    cells = []
    for index in range(len(waiting)):
        if index < first or index > last:
            cells.append("│ ")
        elif index == first:
            cells.append("├─")
        elif index == last:
            cells.append("╯ ")
        elif index in columns:
            cells.append("┴─")
        else:
            cells.append("┼─")
    return "".join(cells).rstrip()


# A lineage as an SVG picture: time runs to the right, one lane an attempt, drawn without any library. Colours are
# attributes, which every viewer knows; the classes are for a page that shows the picture in its own theme.

_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
_INK, _SOFT, _LINE, _BAND, _RING = "#1c2733", "#6b7785", "#9aa5b1", "#f4f6f8", "#d9822b"
_LANES = ("#2f7fc4", "#2e8b57", "#9a62cf", "#cf5a3d", "#0f8b8d", "#96751a")  # seen on white and on black
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
        f'class="lineage" role="img" {_FONT} font-size="12" fill="{_INK}">',
        f"<title>Lineage of {_text(lineage.job)}</title>",
        f'<rect class="back" width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="24" y="36" font-size="19" font-weight="600">Lineage of {_text(lineage.job)}</text>',
        f'<text class="soft" x="24" y="58" fill="{_SOFT}">{_text(_summary(lineage))}</text>',
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
        f"{sum(node.appearance == 'restorable' for node in own)} can be restored",
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
            band = f'x="12" y="{top}" width="{plan.width - 24:.0f}" height="{_LANE}"'
            yield f'<rect class="band" {band} rx="6" fill="{_BAND}"/>'
        name, colour = _text(_lane_name(lineage, job, attempt)), _colour(plan, job, attempt)
        yield f'<text x="24" y="{top + _LANE / 2 + 4:.0f}" fill="{colour}" font-weight="600">{name}</text>'


def _edge(child: LineageNode, parent: LineageNode, plan: _Plan) -> str:
    (x1, y1), (x2, y2) = ((plan.x(node.key), plan.y(node.key)) for node in (parent, child))
    colour = _colour(plan, child.job, child.version.attempt)
    middle = (x1 + x2) / 2
    curve = f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    if y1 != y2:
        curve = f"M{x1:.1f} {y1:.1f}C{middle:.1f} {y1:.1f} {x1:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    return f'<path d="{curve}" fill="none" stroke="{colour}" stroke-opacity="0.55" stroke-width="1.8"/>'


def _mark(node: LineageNode, plan: _Plan) -> str:
    x, y, r = plan.x(node.key), plan.y(node.key), plan.radius
    colour = _colour(plan, node.job, node.version.attempt)
    dash = ' stroke-dasharray="2 2"' if node.appearance == "unknown" else ""
    ring = ""
    if node.pinned:
        ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r + 3:.1f}" fill="none" stroke="{_RING}" stroke-width="2"/>'
    fill = f'fill="{colour}"' if node.appearance == "restorable" else 'class="back" fill="#ffffff"'
    dot = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" {fill} '
        f'stroke="{colour if node.appearance != "unknown" else _LINE}" stroke-width="1.6"{dash}/>'
    )
    return f"<g><title>{_text(_hover(node))}</title>{ring}{dot}</g>"


def _labels(lineage: Lineage, plan: _Plan) -> Iterator[str]:
    """Steps below, tags above; where they would meet, those that matter most stay: ends, pinned ones, then a few."""
    by_lane: dict[tuple[str, int], list[LineageNode]] = {}
    for node in reversed(lineage.nodes):
        by_lane.setdefault((node.job, node.version.attempt), []).append(node)
    for lane, nodes in by_lane.items():
        taken = _crossed(lineage, plan, plan.lanes[lane])
        above: list[tuple[float, float]] = []
        ends = (nodes[0], nodes[-1])
        for node in sorted(nodes, key=lambda it: (not it.pinned, it not in ends, plan.columns[it.key])):
            x, y, step = plan.x(node.key), plan.y(node.key), str(node.version.step)
            if _fits(taken, x, 7.0 * len(step) + 10):
                weight = ' font-weight="600"' if node.pinned else f' class="soft" fill="{_SOFT}"'
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
        fill = f'fill="{_SOFT}"' if kind in ("restorable", "ring") else 'class="back" fill="#ffffff"'
        if kind == "ring":
            yield f'<circle cx="{x}" cy="{y}" r="8.5" fill="none" stroke="{_RING}" stroke-width="2"/>'
        yield f'<circle cx="{x}" cy="{y}" r="5.5" {fill} stroke="{_SOFT}" stroke-width="1.6"{dash}/>'
        yield f'<text class="soft" x="{x + 14}" y="{y + 4}" fill="{_SOFT}">{words}</text>'
        x += 14 + 6.6 * len(words) + 30
    yield f'<text class="soft" x="{x}" y="{y + 4}" fill="{_SOFT}">numbers are steps</text>'


def _hover(node: LineageNode) -> str:
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
