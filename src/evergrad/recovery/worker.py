"""This process among the others: which generation it is in, its group, and how it gets into the next one.

A worker is one of three kinds: `ElasticWorker`, started by `evergrad run`, continues after losses; `StaticWorker`,
under torchrun and its like, ends with the first loss for someone else to start again; `SingleWorker` is alone.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from types import FrameType

from evergrad._wire import Forged, Secret
from evergrad.errors import RankLost, UsageError
from evergrad.recovery.heartbeat import HeartbeatPage, HeartbeatThreads
from evergrad.recovery.membership import EpochBoundary, MembershipPlan, StoreKeys, SurvivorReport
from evergrad.recovery.nccl_group import Transport
from evergrad.recovery.process_group import Group, GroupBroken, SingleRankGroup
from evergrad.recovery.store import PREFIX, StoreClient
from evergrad.wording import first_line

FORMING_TIMEOUT = timedelta(minutes=30)
"""How long a group may take to form, and a collective of it to end: somebody else knows sooner who is gone."""


class Worker(ABC):
    """Who is there, and how to talk to them."""

    uid: int
    plan: MembershipPlan
    survives: bool
    """Whether the job goes on, in this process, when a rank is lost."""

    @property
    def is_change_requested(self) -> bool:
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

    def await_boundary(self, here: EpochBoundary) -> None:  # noqa: B027 (a crew that ends with its first loss needs none)
        """Wait for all ranks where an epoch begins or ends; `GroupBroken` if one is lost meanwhile.

        `UsageError` if another rank takes this point for one of another kind.
        """

    @abstractmethod
    def group(self) -> Group:
        """The group of the present generation, formed when it is first asked for; `GroupBroken` if it cannot be."""

    @abstractmethod
    def next_plan(self, report: SurvivorReport) -> MembershipPlan:
        """Tell what was seen of the broken generation, and get into the next one."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Twice is fine."""


class SingleWorker(Worker):
    """Nobody else, ever."""

    survives = False

    def __init__(self) -> None:
        self.uid, self.plan, self._group = 0, MembershipPlan(0, (0,)), SingleRankGroup()

    def group(self) -> Group:
        """Nobody."""
        return self._group

    def next_plan(self, report: SurvivorReport) -> MembershipPlan:
        """Never needed."""
        raise AssertionError("a group of one does not break")

    def close(self) -> None:
        """Nothing to leave."""


class StaticWorker(Worker):
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
        self.uid, self.plan = rank, MembershipPlan(0, tuple(range(world_size)))
        self._client = StoreClient(host, port, secret=None, prefix=f"{PREFIX}/{attempt}", hosts=hosts)
        self._group: Group | None = None
        self._transport = transport

    def group(self) -> Group:
        """All ranks that were started."""
        if self._group is None:
            self._group = SingleRankGroup() if self.world_size == 1 else self._form()
        return self._group

    def next_plan(self, report: SurvivorReport) -> MembershipPlan:
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
        return form(self._client.meeting("group"), self.rank, self.world_size, host=host, timeout=FORMING_TIMEOUT)


# A process that `evergrad run` has launched: after a loss it goes on, in the generation that the coordinator decides.
#
#     await_call (a spare) ─┐
#     begin (a rank) ───────┴▶ group ──broken──▶ next_plan: report, wait for the plan ──▶ group …
#
# The coordinator tells it through the store; a thread of its own, the watch, hears at once that a generation has
# broken, and interrupts whoever waits in the group for someone who will never come.

_GLANCE_S = 0.05
_STUCK = 70
_EQUALLY = (
    "Every rank has to take equally many batches of an epoch, and to call job.step equally often. To leave an epoch "
    "early or to skip a batch, decide by what all ranks have alike, such as job.batch_index or job.applied: a counter "
    "of the script counts a step twice that is done again, and begins at 0 on a rank that joins"
)


class ElasticWorker(Worker):
    """Under `evergrad run`: its coordinator decides who is in the next generation, and tells it through the store."""

    survives = True

    def __init__(
        self,
        host: str,
        port: int,
        uid: int,
        *,
        secret: Secret | None,
        tell: Callable[..., None],
        page: HeartbeatPage | None = None,
        beat_s: float = 0.25,
        transport: Transport = Transport(),  # noqa: B008 (frozen)
    ) -> None:
        """Connect. Before `begin` or `await_call` this process is in no generation."""
        self.uid = uid
        self.client = StoreClient(host, port, secret=secret)
        self._record_event, self._transport = tell, transport
        self._group: Group | None = None
        self._broken: str | None = None
        self.plan = MembershipPlan(-1, ())
        self._news: tuple[int, str] = (-2, "")
        """Which generation has broken, and why, as the watch's thread heard it."""
        self._is_closed = False
        self._group_of = -1
        self._changing = -2
        self.read_position: Callable[[], tuple[int, int, int]] = lambda: (-1, -1, -1)
        """The rank's position: its epoch, the next point, the next step. Read by another thread."""
        self._meeting: tuple[int, int] | None = None
        """Generation and point of the last boundary to which this rank has come."""
        self._mistake: str | None = None
        """The mistake of the script for which this rank has broken its generation, to be raised by the main thread."""
        self.reported: Callable[[], None] = lambda: None
        """Called when this rank has told what it saw of a broken generation, before it waits for the next one."""
        self._watch = _BreakListener(uid, self.client.reconnect(), self._on_break)
        self._page = page
        self._heartbeat = (
            HeartbeatThreads(page, beat_s, self._ask(self.client.reconnect())) if page is not None else None
        )
        if self._heartbeat is not None:
            self._heartbeat.start()

    @property
    def is_change_requested(self) -> bool:
        """Whether the launcher wants everyone to stop before the next step."""
        return self._changing == self.plan.generation

    def enter_generation(self, generation: int) -> None:
        """Be a member of this generation from its beginning on."""
        self._read_plan(generation)

    def await_spares(self) -> None:
        """Wait until those spares wait that nobody shall begin without."""
        for uid in filter(None, os.environ.get("EVERGRAD_WAIT_FOR_SPARES", "").split(",")):
            self.client.wait(StoreKeys.waiting(int(uid)))

    def await_call(self, meanwhile: Callable[[], None] = lambda: None) -> MembershipPlan | None:
        """Wait to be called into a generation; None if the job has ended without a need for this process.

        `meanwhile` is done once others know that this process waits.
        """
        self.client.set(StoreKeys.waiting(self.uid), "1")
        meanwhile()
        generation = int(self.client.get(StoreKeys.called(self.uid)))
        if generation < 0:
            return None
        self._read_plan(generation)
        return self.plan

    def group(self) -> Group:
        """The group of the present generation."""
        self._check()
        if self._group is None:
            self._group_of = self.plan.generation
            self._group = SingleRankGroup() if self.world_size == 1 else self._form()
            self._check()  # it may have broken while it was made
        return self._group

    def next_plan(self, report: SurvivorReport) -> MembershipPlan:
        """Leave the broken generation, say what was seen of it, and wait for the next one."""
        generation = self.plan.generation
        self._close_group(report.reason)
        if self._mistake is not None:
            raise UsageError(self._mistake)
        if not self.client.has(StoreKeys.broken(generation)):
            self.client.set(StoreKeys.broken(generation), json.dumps({"uid": self.uid, "reason": report.reason}))
        self.client.set(StoreKeys.report(generation, self.uid), report.to_json())
        self.reported()
        self._read_plan(generation + 1)
        return self.plan

    def is_current(self) -> bool:
        """Whether there is no generation after this one yet."""
        return not self.client.has(StoreKeys.plan(self.plan.generation + 1))

    def await_boundary(self, here: EpochBoundary) -> None:
        """Wait for all ranks, by the store and not in the group.

        A rank that is in a step instead would take a collective of the group for one of its step: gloo then waits for
        ever, ends the process, or adds up what does not belong together.
        """
        if self.world_size == 1:
            return
        self._check()
        self._meeting = here.generation, here.point
        text, members = here.to_json(), self.plan.members
        self.client.set_all({StoreKeys.at_boundary(self.uid): text, StoreKeys.boundary: text})
        with self._waiting():
            if here.rank:
                self._await_at(StoreKeys.boundary_met, here, members[0])
                return
            for uid in members[1:]:
                other = self._await_at(StoreKeys.at_boundary(uid), here, uid)
                if other.kind is not here.kind:
                    raise UsageError(f"job.batches: {here}, and {other}. {_EQUALLY}")
            self.client.set(StoreKeys.boundary_met, text)

    def _await_at(self, key: str, here: EpochBoundary, uid: int) -> EpochBoundary:
        """Wait until this key names the boundary; `GroupBroken` if the generation breaks, or this process ends."""
        pause = _GLANCE_S / 100
        longest = min(_GLANCE_S * 4, max(_GLANCE_S / 10, _GLANCE_S / 50 * self.world_size))  # all ranks ask one store
        while True:
            has_ended = self.client.has(StoreKeys.ended(uid))  # before the look: what it told before its end counts
            found = self.client.find(key)
            if found is not None and (told := EpochBoundary.from_json(found)).is_at(here):
                return told
            self._check()
            if has_ended:
                raise GroupBroken(f"rank {self.plan.rank_of(uid)} has ended its script")
            if pause == longest and self.client.has(StoreKeys.fatal):
                raise GroupBroken("the job ends")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _look_for_boundary(self, client: StoreClient) -> None:
        """Break this generation off if another rank waits at a boundary that this one cannot come to.

        That one waits by the store until all have come. So it takes no part in a collective that it has not begun: a
        rank that has begun one more before it comes there waits for ever.
        """
        generation, group = self.plan.generation, self._group
        if group is None or self._group_of != generation or (found := client.find(StoreKeys.boundary)) is None:
            return
        other, num_begun = EpochBoundary.from_json(found), group.num_begun
        # The main thread goes on meanwhile, so the order counts: the collective was begun at this point or before it,
        # and a boundary at this point that the rank has come to is not hidden by a later one.
        meeting = self._meeting
        epoch, point, step = self.read_position()
        if (other.generation, other.point) != (generation, point) or num_begun <= other.num_begun:
            return
        if meeting != (generation, point) and self._mistake is None:
            self._mistake = (
                f"job.batches: rank {group.rank} is at step {step}, of epoch {epoch}, and {other}. {_EQUALLY}"
            )
            group.interrupt("another rank is not in this step")

    def leave_group(self) -> None:
        """Let go of the group: this process is about to be another one, of the same number."""
        self._stop_heartbeat()
        self._close_group("begins anew")

    def close(self) -> None:
        """Leave: the group first, so that nobody waits for this rank."""
        if self._is_closed:
            return
        self._is_closed = True
        self._close_group("closed")
        self._stop_heartbeat()
        self._watch.close(self.client)

    def _ask(self, client: StoreClient) -> Callable[[], None]:
        """What the pulse's thread asks of the store, over a connection of its own."""

        def ask() -> None:
            generation = self.plan.generation
            try:
                if client.find(StoreKeys.change(generation)) is not None:
                    self._changing = generation
                self._look_for_boundary(client)
            except Forged as error:
                client.set(StoreKeys.fatal, str(error))

        return ask

    def _stop_heartbeat(self) -> None:
        """From now on nothing can be said of this process: who has closed may take its time to end."""
        if self._heartbeat is not None and self._page is not None:
            self._heartbeat.close()
            self._page.forget()

    def _give_up(self) -> None:
        """This process cannot leave its broken generation. It ends, so that nobody waits for it."""
        self._record_event(
            "process_stuck", generation=self.plan.generation, reason="gloo waits for a connection that is gone"
        )
        os._exit(_STUCK)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._page is None else self._page.waiting()

    def _check(self) -> None:
        if (why := self._why_broken()) is not None:
            raise GroupBroken(why)

    def _why_broken(self) -> str | None:
        generation, reason = self._news
        return self._broken or (reason if generation == self.plan.generation else None)

    def _read_plan(self, generation: int) -> None:
        try:
            with self._waiting():
                plan = MembershipPlan.from_json(self.client.get(StoreKeys.plan(generation)))
        except Forged as error:
            self.client.set(StoreKeys.fatal, str(error))
            raise
        if plan.rank_of(self.uid) is None and self.uid not in plan.left:
            raise RankLost(
                f"process {self.uid} was taken for dead, and generation {generation} goes on without it: it ends here, "
                "and nothing that it has done since counts"
            )
        self.plan, self._broken = plan, None
        self._watch.follow(generation)

    def _on_break(self, generation: int, reason: str) -> None:
        """The watch's thread: the generation broke, and this rank may be waiting for someone who will never come."""
        self._news = generation, reason or "it broke"
        group, of = self._group, self._group_of
        if group is not None and of == generation:
            group.interrupt(reason)

    def _close_group(self, reason: str) -> None:
        self._broken = self._why_broken() or reason
        group, self._group = self._group, None
        if group is not None:
            group.interrupt(self._broken)
            group.close()

    def _form(self) -> Group:
        """Meet the others. A thread does it, and is left behind if the generation breaks meanwhile."""
        client = self.client
        made: list[Group] = []
        failed: list[str] = []
        refused: list[UsageError] = []
        over = threading.Event()
        rank, size, generation = self.rank, self.world_size, self.plan.generation
        form = self._transport.former()

        def meet() -> None:
            try:
                store = client.meeting(f"group/{generation}")
                host, waiting = client.host, self._waiting
                made.append(
                    form(store, rank, size, host=host, timeout=FORMING_TIMEOUT, waiting=waiting, stuck=self._give_up)
                )
            except UsageError as error:
                refused.append(error)
            except (RuntimeError, Forged, GroupBroken) as error:
                failed.append(first_line(error, 160))
            over.set()

        threading.Thread(target=meet, name=f"evergrad-form-{generation}", daemon=True).start()
        with self._waiting():
            while not over.wait(_GLANCE_S):
                if (why := self._why_broken()) is not None:
                    # The thread waits in this connection, for one who will never come. Connecting may be slow where
                    # addresses are looked up: only then is another one made.
                    client.cut()
                    self.client = client.reconnect()
                    raise GroupBroken(why)
        if refused:  # in every generation it would be the same
            client.set(StoreKeys.fatal, str(refused[0]))
            raise refused[0]
        if not made:
            raise GroupBroken(self._why_broken() or failed[0])
        return made[0]


class _BreakListener:
    """A thread that waits for a generation to break, and says so at once."""

    def __init__(self, uid: int, client: StoreClient, heard: Callable[[int, str], None]) -> None:
        self._uid, self._client, self._heard = uid, client, heard
        self._generation = -1
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def follow(self, generation: int) -> None:
        with self._changed:
            self._generation = generation
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evergrad-watch", daemon=True)
            self._thread.start()

    def close(self, client: StoreClient) -> None:
        """End the thread, which waits in a connection of its own."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is None:
            return
        with suppress(RuntimeError):  # the launcher, and its store, may be gone
            client.set(StoreKeys.news(self._uid, self._generation), "{}")
        # It must be gone before the interpreter is: a thread that comes back from C++ then would abort it.
        self._thread.join(5)

    def _run(self) -> None:
        seen = -1
        while True:
            with self._changed:
                while self._generation == seen and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                seen = self._generation
            try:
                why = json.loads(self._client.get(StoreKeys.news(self._uid, seen)))
            except Forged as error:
                self._client.set(StoreKeys.fatal, str(error))
                self._heard(seen, str(error))
                return
            except RuntimeError as error:
                if not self._is_closed:
                    self._heard(seen, f"the store is gone: {first_line(error)}")
                return
            if not self._is_closed:
                self._heard(seen, str(why.get("reason", "")))


# SIGTERM, the notice of a preemption: heeded between two steps, so that a rank leaves with its work done.
#
# The script keeps a handler of its own, if it has one. Where a rank waits for a decision of the launcher it could not
# heed the notice: there the signal does what it always did, and ends the process.


class SigtermHandler:
    """Whether this process has been asked to leave."""

    def __init__(self, asked: Callable[[int], None]) -> None:
        """`asked` is called with the signal's number, in the main thread."""
        self._asked = asked
        self._watches = False

    def install(self) -> None:
        """Heed the signal from now on; nothing happens where somebody else does, or outside of the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._watches and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._watches = True
            signal.signal(signal.SIGTERM, self._handle)
            _reset_sigterm_in_forks()

    def close(self) -> None:
        """Heed it no more. Twice is fine."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._watches and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._watches = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside of this the signal ends the process, as it does by default."""
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and self._watches and signal.getsignal(signal.SIGTERM) == self._handle):
            yield
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked(number)


@cache
def _reset_sigterm_in_forks() -> None:
    """What the script forks (a data loader's workers) was never asked to leave with its work done: it just ends.

    The signal is held back around a fork: Python forgets, in the child, one that comes in the midst of it.
    """

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def become_ordinary() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(getattr(handler, "__self__", None), SigtermHandler):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=become_ordinary)
