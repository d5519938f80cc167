"""Where every process of a job was started, from the first to those that took others' places."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from evergrad.recovery.launch.settings import Place


class Places:
    """By uid; it only grows. Uids are given here, to whichever thread asks."""

    def __init__(self, first: Iterable[Place]) -> None:
        self._places = list(first)
        self._lock = threading.Lock()

    def __getitem__(self, uid: int) -> Place:
        return self._places[uid]

    def __iter__(self) -> Iterator[Place]:
        return iter(list(self._places))

    @property
    def nodes(self) -> list[int]:
        """The node of each."""
        return [place.node for place in self]

    def add(self, node: int, device: int, rank: int | None = None) -> Place:
        """One more."""
        with self._lock:
            place = Place(len(self._places), node, device, rank)
            self._places.append(place)
        return place

    def label_of(self, uid: int) -> str:
        """What people call it."""
        return self._places[uid].label

    def instead_of(self, before: Place, is_here: Callable[[int], bool], living: Iterable[int]) -> tuple[int, int]:
        """Node and device for one that takes another's place: the same, unless that node is gone.

        Then the node on which the fewest of the `living` are, and there the device after theirs.
        """
        if is_here(before.node):
            return before.node, before.device
        here = [node for node in sorted({*self.nodes}) if is_here(node)]
        on_node = Counter(self._places[uid].node for uid in living)
        node = min(here, key=lambda one: on_node[one])
        return node, on_node[node]
