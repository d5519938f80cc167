"""This process among the others: which generation it is in, its group, and how it gets into the next one.

A crew is one of three kinds: `Launched` by `evergrad run`, which goes on after losses, in `launched`; `Static`, under
torchrun and its like, which ends with the first loss for someone else to start again; `Solo`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta

from evergrad.errors import RankLost
from evergrad.recovery.membership import Boundary, Plan, Report
from evergrad.recovery.nccl import Transport
from evergrad.recovery.stores import PREFIX, StoreClient
from evergrad.recovery.transport import Alone, Group

FORMING = timedelta(minutes=30)
"""How long a group may take to form, and a collective of it to end: somebody else knows sooner who is gone."""


class Crew(ABC):
    """Who is there, and how to talk to them."""

    uid: int
    plan: Plan
    survives: bool
    """Whether the job goes on, in this process, when a rank is lost."""

    @property
    def wants_change(self) -> bool:
        """Whether everyone is to stop before the next step: somebody waits to join."""
        return False

    def is_current(self) -> bool:
        """Whether the generation that this rank is in is the present one: nothing may be written in an old one."""
        return True

    @property
    def rank(self) -> int:
        """This process's rank in the present generation."""
        rank = self.plan.rank_of(self.uid)
        assert rank is not None, "this process is not in the present generation"
        return rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.plan.world_size

    def meet(self, here: Boundary) -> None:  # noqa: B027 (a crew that ends with its first loss needs none)
        """Wait for all ranks where an epoch begins or ends; `GroupBroken` if one is lost meanwhile.

        `UsageError` if another rank takes this point for one of another kind.
        """

    @abstractmethod
    def group(self) -> Group:
        """The group of the present generation, formed when it is first asked for; `GroupBroken` if it cannot be."""

    @abstractmethod
    def next_plan(self, report: Report) -> Plan:
        """Tell what was seen of the broken generation, and get into the next one."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Twice is fine."""


class Solo(Crew):
    """Nobody else, ever."""

    survives = False

    def __init__(self) -> None:
        self.uid, self.plan, self._group = 0, Plan(0, (0,)), Alone()

    def group(self) -> Group:
        """Nobody."""
        return self._group

    def next_plan(self, report: Report) -> Plan:
        """Never needed."""
        raise AssertionError("a group of one does not break")

    def close(self) -> None:
        """Nothing to leave."""


class Static(Crew):
    """As many ranks as someone else has started. A loss ends all of them; whoever started them starts them again."""

    survives = False

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        attempt: str,
        *,
        hosts: bool,
        transport: Transport = Transport(),  # noqa: B008 (frozen)
    ) -> None:
        """Meet at a store: someone else's, or where there is none the one that this rank `hosts`."""
        self.uid, self.plan = rank, Plan(0, tuple(range(world_size)))
        self._client = StoreClient(host, port, secret=None, prefix=f"{PREFIX}/{attempt}", hosts=hosts)
        self._group: Group | None = None
        self._transport = transport

    def group(self) -> Group:
        """All ranks that were started."""
        if self._group is None:
            self._group = Alone() if self.world_size == 1 else self._form()
        return self._group

    def next_plan(self, report: Report) -> Plan:
        """There is none."""
        raise RankLost(
            f"rank {self.rank} of {self.world_size}: another rank was lost at step {report.step} ({report.reason}). "
            "Here only a restart helps: torchrun does that with --max-restarts; under 'evergrad run' survivors go on."
        )

    def close(self) -> None:
        """Let go of the group."""
        if self._group is not None:
            self._group.close()

    def _form(self) -> Group:
        form, host = self._transport.former(), self._client.host
        return form(self._client.meeting("group"), self.rank, self.world_size, host=host, timeout=FORMING)
