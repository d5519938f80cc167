"""What each kind of failure does to a process: real signals, real slowness; and failures that come at a time."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from evergrad.errors import UsageError
from evergrad.recovery.failures.injector import FailureTrigger, ProcessFailureEffects, Slowdown, job_clock
from evergrad.recovery.failures.schedule import Failure, Failures, Phase

MEMBERS, NODES = (10, 11), ("n0", "n0")

VICTIM = """
import signal, sys
from evergrad.recovery.failures.injector import ProcessFailureEffects
from evergrad.recovery.failures.schedule import Failures, Phase
from evergrad.recovery.failures.injector import FailureTrigger
others = [(10 + place, int(pid)) for place, pid in enumerate(sys.argv[2:])]
import os
acts = ProcessFailureEffects(lambda event, **fields: print(event, fields, flush=True),
                find=(lambda ranks: [(others + [(11, os.getpid())])[rank] for rank in ranks]) if others else None)
trigger = FailureTrigger(Failures.parse([sys.argv[1]]), claim={}.setdefault, acts=acts)
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
signal.signal(signal.SIGCONT, lambda *_: print("goes on", flush=True))
trigger.reach(Phase.BACKWARD, step=0, generation=0, rank=1, members=(10, 11), nodes=("n0", "n0"))
print("after", flush=True)
sys.stdin.read()
"""
IDLE = """
import signal, sys
signal.signal(signal.SIGCONT, lambda *_: print("goes on", flush=True))
print("there", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def line(child: subprocess.Popen[str]) -> str:
    out: IO[str] | None = child.stdout
    assert out is not None
    return out.readline().strip()


def await_stop(child: subprocess.Popen[str]) -> None:
    """Wait until a process is stopped, and has not been seen to be."""
    found = os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert found is not None
    assert found.si_code == os.CLD_STOPPED


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def state(child: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def open_files(pid: int) -> set[str]:
    """What a process holds open, without the libraries and tables that its loader reads for a moment."""
    found = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(one))
    return {one for one in found if not one.startswith(("/usr/", "/lib", "/etc/ld.so"))}


# Signals


def test_a_stopped_rank_stands_still_and_whoever_wakes_it_up_is_nothing_of_it() -> None:
    with process(VICTIM, "stop rank=1 step=0 for=600") as victim:
        assert line(victim) == "stop_injected {'ranks': [1], 'uids': [], 'for_s': 600.0}"
        await_stop(victim)
        assert state(victim) == "T"
        (waker,) = children(victim.pid)
        try:
            assert os.getsid(waker) == waker, "whoever ends the rank's session leaves it alone"
            until(lambda: open_files(waker) == {"/dev/null"})  # its shell reads its libraries first
        finally:
            os.killpg(waker, signal.SIGKILL)


def test_a_stopped_rank_goes_on_when_its_time_is_over() -> None:
    with process(VICTIM, "stop rank=1 step=0 for=0.2") as victim:
        assert line(victim) == "stop_injected {'ranks': [1], 'uids': [], 'for_s': 0.2}"
        assert line(victim) == "goes on"
        assert line(victim) == "after"
        assert children(victim.pid) == [], "who woke it up is gone"


def test_the_time_of_a_stop_begins_when_the_rank_is_stopped() -> None:
    """However late the signal comes: it may have to be sent by way of another process."""
    with process(IDLE) as other:
        assert line(other) == "there"

        def send(number: int, uids: object, whole_node: bool) -> None:
            time.sleep(0.3)  # longer than the stop
            assert not select.select([other.stdout], [], [], 0)[0], "not woken before it was stopped"
            os.kill(other.pid, number)

        acts = ProcessFailureEffects(lambda *_, **__: None, find=lambda _: [(10, other.pid)], send=send)
        acts.signal("stop", [0], 0.1)
        assert line(other) == "goes on"


def test_without_a_time_it_is_stopped_for_good() -> None:
    with process(VICTIM, "stop rank=1 step=0") as victim:
        await_stop(victim)
        assert state(victim) == "T"
        assert children(victim.pid) == [], "nobody is there to wake it up"


def test_the_ranks_of_a_node_stop_and_go_on_together() -> None:
    with process(IDLE) as other:
        assert line(other) == "there"
        with process(VICTIM, "stop node=0 step=0 for=0.2", str(other.pid)) as first:
            assert line(first) == "stop_injected {'ranks': [0, 1], 'uids': [10, 11], 'for_s': 0.2}"
            assert [line(other), line(first)] == ["goes on"] * 2


def test_who_leaves_is_asked_to_by_sigterm() -> None:
    with process(VICTIM, "leave rank=1 step=0") as victim:
        assert line(victim) == "leave_injected {'ranks': [1], 'uids': []}"
        assert line(victim) == "asked"
        assert line(victim) == "after"


def test_who_is_killed_says_so_first() -> None:
    with process(VICTIM, "kill rank=1 step=0") as victim:
        assert line(victim) == "kill_injected {'ranks': [1], 'uids': []}"
        assert victim.wait() == -signal.SIGKILL
        assert line(victim) == ""


# Slowness


class Clock:
    """Time that passes when someone works or sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def pace_of(by: float, for_s: float | None = None) -> tuple[Clock, Callable[..., None]]:
    clock = Clock()
    pace = Slowdown(by, for_s, clock=clock, sleep=clock.sleep)

    def work(seconds: float, generation: int = 0) -> None:
        clock.now += seconds
        pace.lap(generation)

    return clock, work


def test_a_slow_rank_takes_so_many_times_as_long() -> None:
    clock, work = pace_of(3)
    for seconds in (1.0, 2.0, 0.5):
        work(seconds)
    assert clock.slept == [2.0, 4.0, 1.0]
    assert clock.now == 100 + 3 * 3.5


def test_slowness_ends_when_its_time_is_over() -> None:
    clock, work = pace_of(3, 7)
    for _ in range(4):
        work(1.0)
    assert clock.slept == [2.0, 2.0], "after the third batch its seven seconds are over"
    clock, work = pace_of(100, 7)
    work(1.0)
    assert clock.slept == [6.0], "and no sleep lasts longer"


def test_a_recovery_is_not_slowed_down() -> None:
    clock, work = pace_of(2)
    work(1.0)
    work(60.0, generation=1)
    work(1.0, generation=1)
    assert clock.slept == [1.0, 1.0]


def test_a_slow_rank_says_so() -> None:
    told: list[Any] = []
    acts = ProcessFailureEffects(lambda event, **fields: told.append((event, fields)))
    assert acts.pace is None
    acts.slow(1, 3.0, None)
    assert acts.pace is not None
    assert not acts.pace.is_over
    assert told == [("slowdown_injected", {"rank": 1, "by": 3.0, "for_s": None})]


# Failures that come at a time


class Timed:
    """One rank, at a time that the test says."""

    reaches_others = True

    def __init__(self, *texts: str, rank: int = 1, claims: dict[str, str] | None = None) -> None:
        self.now, self.rank, self.did, self.seeds = 0.0, rank, [], []
        claims = {} if claims is None else claims
        failures = Failures.parse(texts)
        self.trigger = FailureTrigger(failures, claim=claims.setdefault, acts=self, clock=lambda: self.now)

    def signal(self, kind: str, ranks: Any, for_s: float | None, *, whole_node: bool = False) -> None:
        self.did.append(kind)

    def slow(self, rank: int, by: float, for_s: float | None) -> None:
        self.did.append("slow")

    def cut(self, rank: int, for_s: float | None) -> None:
        self.did.append("cut")

    def flip(self, rank: int, failure: Failure, seed: int) -> None:
        self.did.append("flip")
        self.seeds.append(seed)

    def reach(self, phase: Phase = Phase.DATA, step: int = 0, generation: int = 0, **more: Any) -> list[str]:
        """Come to a site; what came of it."""
        self.did.clear()
        if self.trigger.is_armed(step, generation):
            where = {"members": MEMBERS, "nodes": NODES} | more
            self.trigger.reach(phase, step=step, generation=generation, rank=self.rank, **where)
        return list(self.did)


def test_what_has_a_time_comes_at_the_first_site_then_and_once() -> None:
    rank = Timed("stop rank=1 time=5")
    rank.now = 4.9
    assert not rank.trigger.is_armed(0, 0)
    assert rank.reach() == []
    rank.now = 5.0
    assert rank.trigger.is_armed(3, 0)
    assert rank.reach(Phase.OPTIMIZER, step=3) == ["stop"]
    assert not rank.trigger.is_armed(3, 0)
    assert [rank.reach(generation=generation) for generation in range(3)] == [[]] * 3


def test_with_a_phase_it_waits_for_that_site() -> None:
    rank = Timed("stop rank=1 time=5 phase=recovery", "cut rank=1 time=5 bucket=1 at=during")
    rank.now = 9
    assert rank.reach(Phase.DATA) == []
    assert rank.reach(Phase.RECOVERY, generation=1) == ["stop"]
    assert rank.reach(Phase.BACKWARD, bucket=1, at="before") == []
    assert rank.reach(Phase.BACKWARD, bucket=1, at="during") == ["cut"]


def test_without_a_phase_only_the_main_thread_meets_it() -> None:
    rank = Timed("stop rank=1 time=5")
    rank.now = 9
    aside: list[list[str]] = []
    thread = threading.Thread(target=lambda: aside.append(rank.reach(Phase.BACKWARD, bucket=0, at="before")))
    thread.start()
    thread.join()
    assert aside == [[]]
    assert rank.reach(Phase.BACKWARD, bucket=0, at="before") == ["stop"]


def test_whom_it_does_not_hit_is_asked_once_a_generation() -> None:
    rank = Timed("stop rank=0 time=5", "cut rank=1 time=20")
    rank.now = 9
    assert rank.trigger.is_armed(0, 0)
    assert rank.reach() == []
    assert not rank.trigger.is_armed(0, 0), "nothing of it concerns this rank"
    assert rank.trigger.is_armed(0, 1), "it may have another number now"
    assert rank.reach(generation=1) == []
    rank.now = 20
    assert rank.reach(generation=1) == ["cut"]


def test_a_time_is_claimed_as_a_step_is() -> None:
    claims: dict[str, str] = {}
    ranks = [Timed("exception node=0 time=5", rank=rank, claims=claims) for rank in (0, 1)]
    for rank in ranks:
        rank.now = 6
    with pytest.raises(RuntimeError, match=r"'exception node=n0 time=5' \(rank 0, step 0, generation 2\)"):
        ranks[0].reach(generation=2)
    assert ranks[1].reach(generation=3) == [], "it has happened, and this rank was spared"


def test_the_clock_begins_with_the_job_or_else_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_START_TIME", str(time.monotonic() - 1000))
    assert 1000 <= job_clock()() < 1100
    monkeypatch.delenv("EVERGRAD_START_TIME")
    begun = time.monotonic()
    code = "from evergrad.recovery.failures.injector import job_clock; print(job_clock()())"
    found = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 0 < found <= time.monotonic() - begun + 0.1  # the kernel counts in hundredths


# Soft errors of a schedule


def test_soft_errors_of_a_schedule_do_not_undo_each_other() -> None:
    texts = ["flip node=0 step=7", "flip node=0 step=7", "flip node=0 step=7 seed=5 times=3", "flip rank=1 time=0"]
    seeds: list[int] = []
    for place in (0, 1):
        rank = Timed(*texts, rank=place)
        while rank.reach(Phase.BACKWARD, step=7):
            pass
        seeds += rank.seeds
    assert len(seeds) == 5 + 6
    assert len(set(seeds)) == len(seeds)
    assert seeds.count(5) == 1, "a seed that is given is the injector's own, the first time"
    again = Timed(*texts, rank=0)
    again.reach(Phase.BACKWARD, step=7)
    assert again.seeds == seeds[:1]


def test_without_a_state_a_soft_error_says_what_is_missing() -> None:
    acts = ProcessFailureEffects(lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"failure 'flip rank=1 step=7': this job has no state yet"):
        acts.flip(1, Failure.parse("flip rank=1 step=7"), 0)
