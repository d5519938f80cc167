"""What a process shows of itself, and what is made of that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from evergrad.errors import UsageError
from evergrad.recovery.heartbeat import (
    HeartbeatPage,
    HeartbeatThreads,
    LivenessFinding,
    LivenessRules,
    LivenessTimeouts,
    ProcessHealth,
    innermost,
    is_stopped,
)
from evergrad.recovery.launch.launcher import StoreQueries

WELL = ProcessHealth(
    0, beats=9, silent_s=0.1, is_stopped=False, asks_s=0.0, asks_beats=0, waits_s=0.0, waited_s=0.0, waits=0
)
PATIENCE = LivenessTimeouts(heartbeat_timeout_s=1.0, warn_after_s=5.0, hang_timeout_s=60.0)


def vitals(*each: ProcessHealth) -> dict[int, ProcessHealth]:
    return {uid: replace(vital, uid=uid) for uid, vital in enumerate(each)}


def judged(*each: ProcessHealth, patience: LivenessTimeouts = PATIENCE) -> list[LivenessFinding]:
    return LivenessRules(patience).judge(vitals(*each), range(len(each)), 0, 0.0)


def await_true(is_so: object, seconds: float = 30.0) -> None:
    assert callable(is_so)
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_a_page_is_seen_by_who_shares_it() -> None:
    mine = HeartbeatPage.make()
    watched = HeartbeatPage(os.dup(mine.fd))
    assert watched.read(3, os.getpid()).beats == 0
    mine.beat("somewhere")
    with mine.waiting():
        seen = watched.read(3, os.getpid())
    assert (seen.uid, seen.beats, seen.is_stopped) == (3, 1, False)
    assert seen.waits_s > 0
    after = watched.read(3, os.getpid())
    assert (after.waits_s, after.waits) == (0.0, 1)
    assert after.waited_s > 0
    assert watched.stack() == "somewhere"
    for page in (mine, watched):
        page.close()
        page.close()


def test_a_pulse_shows_what_the_main_thread_does_and_what_the_store_does_not_answer() -> None:
    page, asked, answer = HeartbeatPage.make(), threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        answer.wait(30)

    pulse = HeartbeatThreads(page, 0.01, ask)
    pulse.start()
    assert asked.wait(30)
    await_true(lambda: page.read(0, os.getpid()).asks_beats > 3)
    assert page.read(0, os.getpid()).asks_s > 0
    assert "test_a_pulse_shows_what_the_main_thread_does" in page.stack()
    answer.set()
    await_true(lambda: page.read(0, os.getpid()).beats > 3)
    pulse.close()
    page.close()


def test_a_store_that_is_gone_ends_the_asking() -> None:
    page = HeartbeatPage.make()

    def ask() -> None:
        raise RuntimeError("the store is gone")

    pulse = HeartbeatThreads(page, 0.001, ask)
    pulse.start()
    await_true(lambda: "evergrad-asks" not in {thread.name for thread in threading.enumerate()})
    before = page.read(0, os.getpid()).beats
    await_true(lambda: page.read(0, os.getpid()).beats > before), "it lives all the same"
    pulse.close()
    assert "evergrad-heartbeat" not in {thread.name for thread in threading.enumerate()}
    page.close()


def test_the_kernel_tells_a_stopped_process_from_a_running_one_and_from_one_that_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        await_true(lambda: is_stopped(process.pid))
        process.send_signal(signal.SIGCONT)
        await_true(lambda: not is_stopped(process.pid))
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not is_stopped(process.pid), "a zombie"
    process.wait()
    assert not is_stopped(process.pid), "nobody"


def test_people_see_their_own_code_first() -> None:
    import contextlib

    import torch

    ours = innermost.__code__.co_filename
    stack = "\n".join(
        [
            '  File "train.py", line 3, in step',
            f'  File "{torch.__file__}", line 1, in x',
            *[f'  File "{contextlib.__file__}", line {line}, in z' for line in range(3)],
            f'  File "{ours}", line 9, in y',
        ]
    )
    assert innermost(stack) == f'  File "train.py", line 3, in step\n  File "{ours}", line 9, in y'


def test_who_is_well_is_left_alone() -> None:
    assert judged(WELL, WELL) == []


@pytest.mark.parametrize(
    ("vital", "kind"),
    [
        (replace(WELL, silent_s=1.1, is_stopped=True), "stopped"),
        (replace(WELL, asks_s=1.1, asks_beats=4), "cut off"),
        (replace(WELL, silent_s=61.0), "hung"),
    ],
)
def test_who_is_stopped_cut_off_or_silent_is_lost(vital: ProcessHealth, kind: str) -> None:
    (found,) = judged(WELL, vital)
    assert (found.uid, found.kind, found.is_lost) == (1, kind, True)


@pytest.mark.parametrize(
    "vital",
    [
        replace(WELL, silent_s=0.9, is_stopped=True),
        replace(WELL, silent_s=30.0),  # a call that holds the interpreter
        replace(WELL, asks_s=30.0, asks_beats=1),  # and has just let go of it
        replace(WELL, asks_s=1.5, asks_beats=3),  # gets a processor too rarely to beat in time
        replace(WELL, asks_s=0.9, asks_beats=4),
        replace(WELL, beats=0, silent_s=1e9, is_stopped=True),  # has not begun
    ],
)
def test_who_is_only_busy_or_has_not_begun_is_not(vital: ProcessHealth) -> None:
    assert judged(WELL, vital) == []


def test_who_waits_for_an_answer_is_cut_off_only_if_the_store_has_given_others() -> None:
    questions = StoreQueries()
    tests: list[str] = []

    def asks_s(asks_beats: int, beats: int) -> float:
        asking = replace(WELL, beats=beats, asks_s=0.25 * asks_beats, asks_beats=asks_beats)
        return questions.unanswered(vitals(WELL, asking), lambda: tests.append("answered"))[1].asks_s

    assert asks_s(1, 101) == 0, "an answer may take a moment"
    assert not tests
    assert asks_s(8, 108) == 0, "the store is asked only now: nobody has looked at this process for a while"
    assert asks_s(9, 109) == 0
    assert asks_s(10, 110) == 2.5, "the store has answered since, and this process has beat"
    assert len(tests) == 1, "once for each question"
    assert asks_s(2, 113) == 0, "another question"
    assert asks_s(4, 115) == 1.0
    assert len(tests) == 2


def test_who_keeps_others_waiting_is_reported_once_and_lost_when_it_takes_too_long() -> None:
    vigil = LivenessRules(PATIENCE)
    waits = replace(WELL, waits_s=6.0)
    assert [(one.uid, one.kind, one.is_lost) for one in vigil.judge(vitals(waits, WELL, waits), range(3), 0, 0.0)] == [
        (1, "late", False)
    ]
    assert vigil.judge(vitals(waits, WELL, waits), range(3), 0, 1.0) == []
    forever = replace(WELL, waits_s=61.0)
    assert [(one.uid, one.is_lost) for one in vigil.judge(vitals(forever, WELL, forever), range(3), 0, 2.0)] == [
        (1, True)
    ]
    assert judged(forever, WELL, patience=replace(PATIENCE, hang_timeout_s=0.0))[0].is_lost is False


def test_a_spare_is_never_late() -> None:
    waits = replace(WELL, waits_s=6.0)
    assert LivenessRules(PATIENCE).judge(vitals(waits, waits, WELL), range(2), 0, 0.0) == []


def test_where_all_wait_for_each_other_nobody_is_lost() -> None:
    forever = replace(WELL, waits_s=61.0)
    (found,) = judged(forever, forever)
    assert (found.kind, found.is_lost) == ("deadlock", False)


def test_a_straggler_is_who_never_waits_while_the_others_do() -> None:
    vigil = LivenessRules(replace(PATIENCE, straggler_factor=3.0, replaces_stragglers=True))
    slow = replace(WELL, waited_s=1.0, waits=50)
    quick = replace(WELL, waited_s=8.0, waits=50)
    assert vigil.judge(vitals(WELL, WELL, WELL), range(3), 0, 0.0) == []
    (found,) = vigil.judge(vitals(quick, slow, quick), range(3), 0, 10.0)
    assert (found.uid, found.kind, found.is_lost) == (1, "straggler", True)
    assert "4.5 times" in found.why
    assert vigil.judge(vitals(quick, slow, quick), range(3), 0, 20.0) == [], "a new window"


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"heartbeat_timeout_s": 0}, "--heartbeat-timeout"),
        ({"warn_after_s": -1}, "--warn-after"),
        ({"hang_timeout_s": -1}, "--hang-timeout"),
        ({"straggler_factor": 1}, "--straggler-factor"),
    ],
)
def test_patience_is_checked(wrong: dict[str, float], option: str) -> None:
    with pytest.raises(UsageError, match=option):
        LivenessTimeouts(**wrong)  # type: ignore[arg-type]
