"""The coordinator with a real store, and threads that play the ranks."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from evergrad.errors import UsageError
from evergrad.recovery import coordinator
from evergrad.recovery.coordinator import Coordinator, JobOutcome, SpawnRequest
from evergrad.recovery.membership import MembershipPlan, PointKind, StoreKeys, SurvivorReport, Verdict
from evergrad.recovery.store import StoreClient

SOON_S = 20.0
_numbers = itertools.count()
REDO, RETRY, REPAIR, PROCEED, RESTART = (
    Verdict.REDO,
    Verdict.RETRY,
    Verdict.REPAIR,
    Verdict.PROCEED,
    Verdict.RESTART,
)


class Job:
    """A store, a coordinator, and the ranks' side of both."""

    def __init__(self, store: StoreClient, num_ranks: int, spares: int = 0, **settings: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.told = threading.Condition()
        self.coordinator = Coordinator(store.host, store.port, num_ranks=num_ranks, tell=self._tell, **settings)
        self.store = store
        self.uids = list(range(num_ranks + spares))

    def _tell(self, event: str, /, **fields: Any) -> None:
        json.dumps(fields)  # it goes into a file of JSON lines
        with self.told:
            self.events.append((event, fields))
            self.told.notify_all()

    def begin(self, *, joined: bool = True, checkpointer: bool = False) -> MembershipPlan:
        for uid in self.uids if joined else ():
            self.store.set(StoreKeys.joined(uid), json.dumps({"pid": 1, "checkpointer": checkpointer}))
        self.coordinator.begin(self.uids)
        return self.plan(0)

    def plan(self, generation: int) -> MembershipPlan:
        """What a rank does: wait for the plan."""
        return MembershipPlan.from_json(_bounded(lambda: self.store.get(StoreKeys.plan(generation))))

    def report(self, plan: MembershipPlan, uid: int, point: int, kind: PointKind = PointKind.STEP, **more: Any) -> None:
        rank = plan.rank_of(uid)
        assert rank is not None
        report = SurvivorReport(uid, rank, plan.generation, point, kind, step=point, **more)
        self.store.set(StoreKeys.report(plan.generation, uid), report.to_json())

    def all_report(
        self, plan: MembershipPlan, *gone: int, point: int = 3, kind: PointKind = PointKind.STEP, **more: Any
    ) -> None:
        for uid in plan.members:
            if uid not in gone:
                self.report(plan, uid, point, kind, **more)

    def break_by_rank(self, plan: MembershipPlan, reason: str) -> None:
        self.store.set(StoreKeys.broken(plan.generation), json.dumps({"uid": plan.members[0], "reason": reason}))

    def called(self, uid: int) -> int:
        return int(_bounded(lambda: self.store.get(StoreKeys.called(uid))))

    def event(self, name: str) -> dict[str, Any]:
        """The first event of this name, once it has been told."""
        with self.told:
            assert self.told.wait_for(lambda: any(event == name for event, _ in self.events), SOON_S), self.events
            return next(fields for event, fields in self.events if event == name)

    def outcome(self) -> JobOutcome:
        found = self.coordinator.wait(SOON_S)
        assert found is not None, self.events
        return found

    def finish(self, plan: MembershipPlan) -> JobOutcome:
        for uid in plan.members:
            self.coordinator.process_exited(uid, 0)
        return self.outcome()


def _bounded(read: Callable[[], str]) -> str:
    """What a wait in the store brings: a test's own time limit could not end it."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert found, "nothing came"
    return found[0]


@pytest.fixture(scope="module")
def client() -> Iterator[StoreClient]:
    """A connection as ranks have it. Each costs a look at who the other end is, which some machines are slow to say."""
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = StoreClient("127.0.0.1", server.port, secret=None)
    yield client
    client.cut()


@pytest.fixture
def jobs(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    """Makes the job of a test; the names of its keys are its own."""
    made: list[Job] = []
    prefix = f"job-{next(_numbers)}"
    monkeypatch.setattr(coordinator, "PREFIX", f"{coordinator.PREFIX}/{prefix}")

    def make(num_ranks: int, spares: int = 0, **settings: Any) -> Job:
        own = copy.copy(client)
        own.store = PrefixStore(prefix, client.store)
        made.append(Job(own, num_ranks, spares, **settings))
        return made[-1]

    yield make
    for job in made:
        job.coordinator.close()
        job.coordinator.close()
    assert "coordinator" not in {thread.name for thread in threading.enumerate()}


@contextmanager
def spawning(first_uid: int) -> Iterator[tuple[list[SpawnRequest], Callable[[SpawnRequest], int]]]:
    asked: list[SpawnRequest] = []

    def spawn(request: SpawnRequest) -> int:
        asked.append(request)
        return first_uid + len(asked) - 1

    yield asked, spawn


def test_the_first_processes_are_the_ranks(jobs: Callable[..., Job]) -> None:
    job = jobs(3, spares=2)
    plan = job.begin()
    assert (plan.generation, plan.members, plan.source, plan.point) == (0, (0, 1, 2), None, 0)
    assert (job.coordinator.generation, job.coordinator.alive, job.coordinator.spares) == (0, 3, 2)
    assert job.coordinator.outcome is None
    assert job.coordinator.wait(0) is None


def test_all_finish_and_spares_are_sent_home(jobs: Callable[..., Job]) -> None:
    job = jobs(2, spares=1)
    plan = job.begin()
    job.store.set(StoreKeys.progress, json.dumps({"step": 41}))
    assert job.store.has(StoreKeys.progress)  # an answer: the coordinator, who has another connection, sees it too
    outcome = job.finish(plan)
    assert (outcome.kind, outcome.exit_code, outcome.failures_survived) == ("finished", 0, 0)
    assert job.called(2) == -1
    assert job.event("job_finished")["step"] == job.coordinator.step == 41
    job.coordinator.add_spare(9)  # too late
    assert job.called(9) == -1


def test_after_a_death_the_others_redo_the_step(jobs: Callable[..., Job]) -> None:
    job = jobs(3)
    first = job.begin()
    job.coordinator.process_exited(1, -9)
    # Survivors learn of it by this key: it is there when `exited` returns.
    assert json.loads(job.store.find(StoreKeys.broken(0)) or "") == {"uid": 1, "reason": "rank 1 ended with SIGKILL"}
    job.all_report(first, 1)
    plan = job.plan(1)
    assert (plan.members, plan.verdicts, plan.dead) == ((0, 2), {0: REDO, 2: REDO}, (1,))
    outcome = job.finish(plan)
    assert (outcome.kind, outcome.failures_survived) == ("finished", 1)
    assert job.event("process_lost") == {"uid": 1, "rank": 1, "code": -9, "how": "SIGKILL", "generation": 0}
    assert job.event("generation_broken")["reason"] == "rank 1 ended with SIGKILL"
    told = [fields for event, fields in job.events if event == "plan"]
    assert told[1]["verdicts"] == {"redo": 2}
    assert (told[0]["exact"], told[1]["exact"], told[1]["strategy"]) == (True, False, "rollback")
    assert job.coordinator.step == 3


def test_two_may_die_at_once(jobs: Callable[..., Job]) -> None:
    job = jobs(4)
    first = job.begin()
    threads = [threading.Thread(target=job.coordinator.process_exited, args=(uid, -9)) for uid in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    job.all_report(first, 0, 2)
    plan = job.plan(1)
    assert (plan.members, plan.dead) == ((1, 3), (0, 2))
    assert job.finish(plan).failures_survived == 2


def test_one_may_die_after_its_report(jobs: Callable[..., Job]) -> None:
    job = jobs(3)
    first = job.begin()
    job.coordinator.process_exited(0, -9)
    job.report(first, 1, 4)
    job.coordinator.process_exited(1, 1)
    job.report(first, 2, 3)
    plan = job.plan(1)
    assert (plan.members, plan.point) == ((2,), 3)


def test_a_death_while_the_next_generation_forms_breaks_that_one_too(jobs: Callable[..., Job]) -> None:
    job = jobs(3)
    first = job.begin()
    job.coordinator.process_exited(0, -9)
    job.all_report(first, 0)
    second = job.plan(1)
    job.coordinator.process_exited(1, -9)
    job.all_report(second, 1)
    plan = job.plan(2)
    assert (plan.members, plan.dead, plan.point) == ((2,), (1,), 3)
    assert job.finish(plan).failures_survived == 2


def test_one_that_dies_while_the_plan_is_written_is_not_forgotten(
    jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(3)
    decided = coordinator.decide

    def slowly(*args: Any, **known: Any) -> Any:
        plan = decided(*args, **known)
        if not args[0].generation:
            job.coordinator.process_exited(1, -9)
        return plan

    monkeypatch.setattr(coordinator, "decide", slowly)
    first = job.begin()
    job.coordinator.process_exited(0, -9)
    job.all_report(first, 0)
    second = job.plan(1)
    assert second.members == (1, 2)
    job.all_report(second, 1)
    assert job.plan(2).members == (2,)


def test_a_waiting_spare_is_called(jobs: Callable[..., Job]) -> None:
    job = jobs(3, spares=3)
    first = job.begin()
    job.store.set(StoreKeys.waiting(4), "1")  # 3 is not ready yet, 5 is dead
    job.store.set(StoreKeys.waiting(5), "1")
    job.coordinator.process_exited(5, 1)
    job.coordinator.process_exited(1, -9)
    job.all_report(first, 1)
    assert job.called(4) == 1
    plan = job.plan(1)
    assert (plan.members, plan.joiners, plan.source, plan.keepers) == ((0, 4, 2), (4,), 0, {4: 2})
    assert job.finish(plan).kind == "finished"
    assert job.called(3) == -1
    assert [fields["exact"] for event, fields in job.events if event == "plan"] == [True, True]


def test_a_spare_started_later_is_called_too(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    first = job.begin()
    job.coordinator.add_spare(7)
    job.store.set(StoreKeys.waiting(7), "1")
    job.coordinator.process_exited(0, -9)
    job.all_report(first, 0)
    assert job.plan(1).members == (7, 1)


def test_in_forward_recovery_the_spare_comes_in_before_the_next_step(jobs: Callable[..., Job]) -> None:
    job = jobs(3, spares=1, strategy="forward")
    first = job.begin()
    job.store.set(StoreKeys.waiting(3), "1")
    job.coordinator.process_exited(1, -9)
    job.report(first, 0, 3, done=(0, 1), buckets=3)
    job.report(first, 2, 3, done=(1,), buckets=3)
    repair = job.plan(1)
    assert (repair.members, repair.todo, repair.calls) == ((0, 2), (0, 2), (3,))
    assert not job.store.has(StoreKeys.called(3))
    job.break_by_rank(repair, "spares are let in")
    job.all_report(repair, point=4, kind=PointKind.JOIN)
    plan = job.plan(2)
    assert (plan.members, plan.joiners, plan.verdicts) == ((0, 3, 2), (3,), {0: RETRY, 2: RETRY})
    assert job.called(3) == 2
    assert job.finish(plan).failures_survived == 1


def test_a_generation_that_broke_by_itself_is_made_again(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    first = job.begin()
    job.break_by_rank(first, "connection reset")
    job.all_report(first)
    plan = job.plan(1)
    assert (plan.members, plan.dead) == ((0, 1), ())
    assert job.event("generation_broken")["reason"] == "connection reset"
    assert job.finish(plan).failures_survived == 0


def test_a_job_that_comes_to_no_point_ends(jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_MAX_FUTILE_GENERATIONS", 3)
    job = jobs(2)
    plan = job.begin()
    for generation in range(3):
        job.break_by_rank(plan, "no route to host")
        job.all_report(plan, point=0, kind=PointKind.BEGIN)
        if generation < 2:
            plan = job.plan(generation + 1)
    assert job.outcome().kind == "failed"
    assert "3 generations in a row came to no point; the last: no route to host" in job.outcome().message


def test_when_one_has_finished_the_others_may(jobs: Callable[..., Job]) -> None:
    job = jobs(3)
    first = job.begin()
    job.coordinator.process_exited(0, 0)
    job.coordinator.process_exited(1, -9)
    job.report(first, 2, 9, PointKind.END)
    plan = job.plan(1)
    assert (plan.members, plan.verdicts) == ((2,), {2: PROCEED})
    outcome = job.finish(plan)
    assert (outcome.kind, outcome.failures_survived) == ("finished", 1)


def test_a_rank_that_fails_when_the_others_have_finished_fails_the_job(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    job.begin()
    job.coordinator.process_exited(1, 0)
    job.coordinator.process_exited(0, 3)  # it could not save the result, say
    assert (job.outcome().kind, job.outcome().exit_code) == ("failed", 1)
    assert job.outcome().message == "rank 0 ended with exit code 3; the others finished without it"


def test_too_few_ranks_end_the_job_and_everyone_is_told(jobs: Callable[..., Job]) -> None:
    job = jobs(3, spares=1, min_ranks=3)
    first = job.begin()
    job.coordinator.process_exited(1, -9)
    job.all_report(first, 1)
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code) == ("too-few", 4)
    assert outcome.message == (
        "too few ranks: 2 of 3 left, no spare waiting, 3 needed (rank 1 ended with SIGKILL). "
        "No restart: no process can be started. "
        "Start it again with more spares or a lower --min-ranks; with a checkpointer it goes on where it saved."
    )
    assert job.event("job_too_few")["message"] == outcome.message
    assert job.store.find(StoreKeys.fatal) == outcome.message
    assert job.called(3) == -1


def test_where_every_rank_ends_by_itself_the_script_has_failed(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    job.begin()
    job.coordinator.process_exited(0, 1)
    job.coordinator.process_exited(1, 1)
    assert (job.outcome().kind, job.outcome().exit_code) == ("failed", 1)
    assert "rank 0 ended with exit code 1, rank 1 ended with exit code 1" in job.outcome().message


@pytest.mark.parametrize("exits", [True, False])
def test_a_fatal_message_ends_the_job(jobs: Callable[..., Job], exits: bool) -> None:
    job = jobs(2, spares=1)
    job.begin()
    job.store.set(StoreKeys.fatal, "batch_size: expected 1 or more, found 0")
    if exits:
        job.coordinator.process_exited(0, 1)
    assert job.outcome() == JobOutcome("fatal", "batch_size: expected 1 or more, found 0", 2, 0)
    assert job.called(2) == -1


def test_after_a_fatal_message_nobody_is_told_to_go_on(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    first = job.begin()
    job.all_report(first)
    job.store.set(StoreKeys.fatal, "the ranks' models differ")
    job.break_by_rank(first, "rank 0 gave up")
    assert job.outcome().kind == "fatal"
    job.coordinator.close()
    assert not job.store.has(StoreKeys.plan(1))


def test_a_rank_that_dies_before_it_joins_ends_the_job(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    job.begin(joined=False)
    job.coordinator.process_exited(0, 0)  # a script that knows nothing of us may finish
    job.coordinator.process_exited(1, 3)
    assert (job.outcome().kind, job.outcome().exit_code) == ("failed", 1)
    assert job.outcome().message == "rank 1 ended with exit code 3 before it joined: see what it printed"


def test_a_rank_that_leaves_without_joining_is_not_waited_for(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    first = job.begin(joined=False)
    job.coordinator.process_exited(0, 0)
    job.store.set(StoreKeys.joined(1), json.dumps({"pid": 1}))
    assert json.loads(_bounded(lambda: job.store.get(StoreKeys.broken(0))))["uid"] == 0
    job.report(first, 1, 0, PointKind.BEGIN)
    plan = job.plan(1)
    assert (plan.members, plan.verdicts, plan.dead) == ((1,), {1: RETRY}, ())


def test_a_relaunch_starts_what_is_missing(jobs: Callable[..., Job]) -> None:
    with spawning(50) as (asked, spawn):
        job = jobs(4, spares=1, min_ranks=3, spawn=spawn)
        first = job.begin(checkpointer=True)
        job.store.set(StoreKeys.waiting(4), "1")
        for uid in (0, 1, 3):
            job.coordinator.process_exited(uid, -9)
        job.report(first, 2, 6)
        plan = job.plan(1)
    assert (plan.relaunch, plan.restart, plan.source, plan.point) == (True, True, None, 6)
    assert (plan.members, plan.joiners) == ((4, 50, 2, 51), (4, 50, 51))
    assert (plan.verdicts, plan.dead) == ({2: RESTART}, (0, 1, 3))
    assert asked == [SpawnRequest(1, 1, 1), SpawnRequest(3, 1, 3)]
    assert [job.called(uid) for uid in (4, 50, 51)] == [1, 1, 1]
    assert job.coordinator.alive == 4
    assert [fields["uid"] for event, fields in job.events if event == "process_spawned"] == [50, 51]
    assert job.finish(plan).failures_survived == 3


def test_a_relaunch_is_back_at_the_number_of_ranks_it_began_with(jobs: Callable[..., Job]) -> None:
    with spawning(50) as (asked, spawn):
        job = jobs(3, min_ranks=2, spawn=spawn)
        first = job.begin(checkpointer=True)
        job.coordinator.process_exited(0, -9)
        job.all_report(first, 0)
        second = job.plan(1)
        assert second.members == (1, 2)
        job.coordinator.process_exited(1, -9)
        job.all_report(second, 1)
        plan = job.plan(2)
    assert plan.members == (50, 2, 51)
    assert asked == [SpawnRequest(0, 2, 1), SpawnRequest(2, 2, None)]


def test_one_that_dies_as_soon_as_it_is_spawned_breaks_the_relaunch(jobs: Callable[..., Job]) -> None:
    made: list[Job] = []

    def spawn(request: SpawnRequest) -> int:
        made[0].coordinator.process_exited(50, 1)  # reaped before the launcher has come back from starting it
        return 50

    job = jobs(3, min_ranks=2, spawn=spawn, max_restarts=1)
    made.append(job)
    first = job.begin(checkpointer=True)
    job.coordinator.process_exited(0, -9)
    job.coordinator.process_exited(1, -9)
    job.report(first, 2, 6)
    second = job.plan(1)
    assert second.relaunch
    assert json.loads(_bounded(lambda: job.store.get(StoreKeys.broken(1))))["uid"] == 50


def test_restarts_come_to_an_end(jobs: Callable[..., Job]) -> None:
    with spawning(50) as (asked, spawn):
        job = jobs(1, spawn=spawn, max_restarts=2)
        job.begin(checkpointer=True)
        for uid, generation in ((0, 1), (50, 2), (51, 3)):
            job.coordinator.process_exited(uid, -9)
            if generation < 3:
                assert job.plan(generation).members == (49 + generation,)
    assert job.outcome().kind == "too-few"
    assert "No restart: 2 of 2 were used." in job.outcome().message
    assert len(asked) == 2


def test_without_a_checkpointer_nothing_is_relaunched(jobs: Callable[..., Job]) -> None:
    with spawning(50) as (asked, spawn):
        job = jobs(2, min_ranks=2, spawn=spawn)
        first = job.begin()
        job.coordinator.process_exited(0, -9)
        job.all_report(first, 0)
        assert "No restart: there is no checkpointer to restart from." in job.outcome().message
    assert not asked


def test_a_launcher_that_cannot_start_a_process_ends_the_job(jobs: Callable[..., Job]) -> None:
    def spawn(request: SpawnRequest) -> int:
        raise OSError("no more processes")

    job = jobs(1, spawn=spawn)
    job.begin(checkpointer=True)
    job.coordinator.process_exited(0, -9)
    assert job.outcome().kind == "failed"
    assert job.outcome().message == "the coordinator cannot go on: OSError: no more processes"


def test_a_survivor_that_is_late_is_named_once_and_waited_for(
    jobs: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_LATE_S", 0.0)
    job = jobs(3)
    first = job.begin()
    job.coordinator.process_exited(0, -9)
    job.report(first, 1, 3)
    assert 2 in job.event("reports_late")["uids"]
    with job.told:
        assert not job.told.wait_for(lambda: sum(event == "reports_late" for event, _ in job.events) > 1, 0.05)
    job.report(first, 2, 3)
    assert job.plan(1).members == (1, 2)


def test_restarting_ranks_take_spares_along(jobs: Callable[..., Job]) -> None:
    job = jobs(2, spares=1, strategy="restart")
    first = job.begin()
    job.store.set(StoreKeys.waiting(2), "1")
    job.coordinator.process_exited(0, -9)
    job.all_report(first, 0)
    plan = job.plan(1)
    assert (plan.members, plan.verdicts, plan.source, plan.restart) == ((2, 1), {1: RESTART}, None, True)


def test_an_exit_is_told_once_and_not_after_the_end(jobs: Callable[..., Job]) -> None:
    job = jobs(2)
    first = job.begin()
    job.coordinator.process_exited(0, -9)
    job.coordinator.process_exited(0, -9)
    job.all_report(first, 0)
    job.finish(job.plan(1))
    job.coordinator.close()
    job.coordinator.process_exited(99, -15)
    assert [fields["uid"] for event, fields in job.events if event == "process_lost"] == [0]
    assert job.outcome().kind == "finished"


def test_wrong_settings_are_refused(jobs: Callable[..., Job]) -> None:
    with pytest.raises(UsageError, match=r"strategy: expected one of rollback, forward, restart, found 'back'"):
        jobs(2, strategy="back")
    with pytest.raises(UsageError, match=r"min_ranks: expected 1 to 2, the number of ranks, found 3"):
        jobs(2, min_ranks=3)


class Counted(int):
    """A uid that counts how often it is compared or hashed."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return int.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        Counted.looks += 1
        return int.__hash__(self)


def _counts_spares(job: Job) -> None:
    assert (job.coordinator.alive, job.coordinator.spares) == (len(job.uids) // 2, len(job.uids) // 2)


def _lets_all_finish(job: Job) -> None:
    for uid in job.coordinator.membership[1]:
        job.coordinator.process_exited(uid, 0)
    assert job.outcome().kind == "finished"


def _loses_half_at_once(job: Job) -> None:
    plan = job.coordinator.membership[1]
    for uid in plan[: len(plan) // 2]:
        job.coordinator.process_exited(uid, -9)


@pytest.mark.parametrize("does", [_counts_spares, _lets_all_finish, _loses_half_at_once])
def test_the_work_is_a_few_comparisons_a_rank(
    jobs: Callable[..., Job], does: Callable[[Job], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: with as many comparisons for each rank as there are ranks it would be quadratic."""
    monkeypatch.setattr(Coordinator, "_run", lambda self: None)  # its thread looks as often as there is time for it
    told: list[int] = []
    job = jobs(200, spares=200)
    notices = job.coordinator._store
    monkeypatch.setattr(notices, "break_generation", lambda plan, uid, reason: told.append(uid))
    monkeypatch.setattr(notices, "has_joined", lambda uid: True)
    job.uids = [Counted(uid) for uid in job.uids]
    job.coordinator.begin(job.uids)
    Counted.looks = 0
    does(job)
    assert Counted.looks <= 40 * len(job.uids), Counted.looks
    assert told == ([0] if does is _loses_half_at_once else []), "members are told once that their generation is over"
