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

from evergrad.checkpoint.catalogue.records import Catalogue, CatalogueEntry
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError
from evergrad.records import Json

Key = tuple[str, Version]
"""A job, and one of its versions."""

_MAX_JOBS = 100


@dataclass(frozen=True, slots=True)
class Node:
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
    def look(self) -> Literal["restorable", "gone", "unknown"]:
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
    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    """What could not be followed, and why."""
    index: Mapping[Key, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", {node.key: node for node in self.nodes})

    def edges(self) -> Iterator[tuple[Node, Node]]:
        """Each node that has one, with its parent."""
        for node in self.nodes:
            if node.parent is not None:
                yield node, self.index[node.parent]

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


def trace(catalogue: Catalogue) -> Lineage:
    """The lineage of a job: all its versions, and of other jobs those that it descends from."""
    own = _nodes_of(catalogue, catalogue.entries())
    nodes: dict[Key, Node] = {node.key: node for node in own}
    notes: list[str] = []
    wanted = _foreign(catalogue, own)
    jobs: dict[str, tuple[Catalogue, list[Node]] | None] = {catalogue.home.job: (catalogue, own)}
    while wanted:
        (job, version), source = wanted.popitem()
        if job not in jobs:
            jobs[job] = _follow(job, source, notes) if len(jobs) < _MAX_JOBS else None
        reached = jobs[job]
        if reached is None:
            nodes.setdefault((job, version), Node(job, version, None))
            continue
        other, theirs = reached
        line = _ancestors((job, version), {node.key: node for node in theirs})
        nodes |= {node.key: node for node in line}
        wanted |= {key: place for key, place in _foreign(other, line).items() if key not in nodes}
    for node in list(nodes.values()):  # a parent that nobody remembers
        if node.parent is not None and node.parent not in nodes:
            nodes[node.parent] = Node(*node.parent, None)
    return Lineage(catalogue.home.job, tuple(_newest_first(nodes, catalogue.home.job)), tuple(notes))


def _nodes_of(catalogue: Catalogue, entries: list[CatalogueEntry]) -> list[Node]:
    job = catalogue.home.job
    return [Node(job, entry.version, _key(entry.parent, job), entry) for entry in entries]


def _key(parent: str | None, job: str) -> Key | None:
    if parent is None:
        return None
    other, slash, name = parent.rpartition("/")
    version = Version.parse(name)
    return None if version is None else (other if slash else job, version)


def _foreign(catalogue: Catalogue, nodes: list[Node]) -> dict[Key, str | None]:
    """The versions of other jobs that these come from, and where those jobs are."""
    found: dict[Key, str | None] = {}
    for node in nodes:
        if node.parent is not None and node.parent[0] != node.job:
            source = catalogue.home.attempts.get(node.version.attempt, {}).get("source")
            found[node.parent] = source if isinstance(source, str) and source else None
    return found


def _follow(job: str, source: str | None, notes: list[str]) -> tuple[Catalogue, list[Node]] | None:
    """Another job's catalogue, if it is where it was, and still that job's."""
    if source is None:
        notes.append(f"job {job}: not recorded where it is")
        return None
    try:
        catalogue = Catalogue(source)
        if catalogue.home.job != job:
            notes.append(f"job {job}: {catalogue.label} is job {catalogue.home.job} now")
            return None
        return catalogue, _nodes_of(catalogue, catalogue.entries())
    except (EvergradError, OSError) as error:
        notes.append(f"job {job}: {error}")
        return None


def _ancestors(key: Key, known: Mapping[Key, Node]) -> list[Node]:
    """A version and what it came from, within its own job."""
    line: dict[Key, Node] = {}
    at: Key | None = key
    while at is not None and at[0] == key[0] and at not in line:
        node = known.get(at) or Node(*at, None)
        line[at] = node
        at = node.parent
    return list(line.values())


def _newest_first(nodes: Mapping[Key, Node], own: str) -> Iterator[Node]:
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
