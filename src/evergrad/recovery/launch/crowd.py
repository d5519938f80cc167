"""The processes of a job, wherever they run: here (`household`), on other nodes (`nodes`), or both (`Everyone`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence

from evergrad.recovery.heartbeat import Vital
from evergrad.recovery.launch.processes import Child
from evergrad.recovery.launch.settings import Place


class Crowd(ABC):
    """Some processes of a job. For the main thread of the launcher; nothing here waits."""

    @property
    @abstractmethod
    def living(self) -> list[Child]:
        """Those that run, as far as is known, by uid."""

    @abstractmethod
    def start(self, place: Place, generation: int | None, nodes: Sequence[int], *, forked: bool = False) -> None:
        """Start one more; `nodes` is the node of every process so far, by uid. `UsageError` if that is impossible."""

    @abstractmethod
    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """Send every living process, or these, a signal; SIGKILL also to what it has started in its group."""

    @abstractmethod
    def vitals(self) -> dict[int, Vital]:
        """What living processes show of themselves, by uid."""

    @abstractmethod
    def stack(self, uid: int) -> str:
        """Where the script of a process was when it was last heard of; empty if nobody knows."""


class Everyone(Crowd):
    """Those on this node and those on the others."""

    def __init__(self, here: Crowd, elsewhere: Callable[[], Crowd | None], node: int) -> None:
        """`elsewhere` may come later: nothing runs on other nodes before."""
        self._here, self._elsewhere, self._node = here, elsewhere, node

    @property
    def living(self) -> list[Child]:
        """By uid."""
        return sorted((child for part in self._parts() for child in part.living), key=lambda child: child.uid)

    def start(self, place: Place, generation: int | None, nodes: Sequence[int], *, forked: bool = False) -> None:
        """Where its place is."""
        part = self._here if place.node == self._node else self._elsewhere()
        assert part is not None, f"{place.label} is to start on node {place.node}, and there is no way to it yet"
        part.start(place, generation, nodes, forked=forked)

    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """To all of them, everywhere."""
        for part in self._parts():
            part.send(number, uids)

    def vitals(self) -> dict[int, Vital]:
        """Of all."""
        return {uid: vital for part in self._parts() for uid, vital in part.vitals().items()}

    def stack(self, uid: int) -> str:
        """Of whoever knows."""
        return next((stack for part in self._parts() if (stack := part.stack(uid))), "")

    def _parts(self) -> list[Crowd]:
        elsewhere = self._elsewhere()
        return [self._here] if elsewhere is None else [self._here, elsewhere]
