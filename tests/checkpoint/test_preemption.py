"""Jobs that get a signal leave in order, and ranks agree on when to save: real signals, real processes, real gloo."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import evergrad as eg
from evergrad.checkpoint.policy import Cadence
from evergrad.checkpoint.tiers import Work

PROGRAM = Path(__file__).with_name("preempted.py")
Run = Callable[..., list[int]]


class Jobs:
    """A program that forks ranks when it is asked to. One that has ended is started again."""

    def __init__(self) -> None:
        self._program: subprocess.Popen[str] | None = None
        self._number = 0

    def ask(self, scenario: str, world_size: int, folder: Path) -> None:
        if self._program is None or self._program.poll() is not None:
            self.close()
            command = [sys.executable, str(PROGRAM)]
            self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._number += 1
        request = {
            "number": self._number,
            "scenario": scenario,
            "world_size": world_size,
            "folder": str(folder),
            "environment": {name: os.environ[name] for name in ("EVERGRAD_SHM", "EVERGRAD_LINGER")},
        }
        assert self._program.stdin is not None
        print(json.dumps(request), file=self._program.stdin, flush=True)

    def answer(self) -> list[int]:
        """How the ranks have ended; what a test that gave up had asked for is passed over."""
        assert self._program is not None
        assert self._program.stdout is not None
        for line in self._program.stdout:
            number, codes = json.loads(line)
            if number == self._number:
                return list(codes)
        raise AssertionError("the program that forks ranks has ended")

    def close(self) -> None:
        if self._program is not None:
            with self._program as program:
                program.communicate()


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    started = Jobs()
    yield started
    started.close()


@pytest.fixture
def run(jobs: Jobs, tmp_path: Path) -> Run:
    """Run a scenario with real ranks; they have to end with these codes."""

    def run_all(scenario: str, *codes: int) -> None:
        jobs.ask(scenario, len(codes), tmp_path)
        found = jobs.answer()
        output = tmp_path / "output"
        assert found == list(codes), output.read_text() if output.exists() else found

    return run_all


@pytest.mark.parametrize("world_size", [1, 2])
def test_if_one_rank_is_signalled_all_save_the_same_step_and_leave(run: Run, tmp_path: Path, world_size: int) -> None:
    run("leave", *[75] * world_size)
    steps = {(tmp_path / f"saved-{rank}").read_text() for rank in range(world_size)}
    assert len(steps) == 1
    run("take_up", *[0] * world_size)


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_program_that_closes_everything_leaves_with_its_own_code(run: Run, world_size: int) -> None:
    run("leave_in_order", *[99] * world_size)
    run("take_up", *[0] * world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_who_saves_by_himself_is_told_at_once(run: Run, world_size: int) -> None:
    run("leave_without_being_asked", *[75] * world_size)


def test_a_second_signal_ends_the_process(jobs: Jobs, tmp_path: Path) -> None:
    jobs.ask("insist", 1, tmp_path)
    told = tmp_path / "runs-0"
    while not told.exists() or not (said := told.read_text()):  # it is written again and again
        time.sleep(0.01)
    pid = int(said)
    os.kill(pid, signal.SIGTERM)
    told.write_text("")
    while not told.read_text():  # it has gone on
        time.sleep(0.01)

    def is_there() -> bool:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return False
        return True

    while is_there():  # what comes right after the first is the same notice, passed on by another
        time.sleep(0.05)
    assert jobs.answer() == [-signal.SIGTERM]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_clocks_of_their_own_always_agree(run: Run, world_size: int) -> None:
    run("agree", *[0] * world_size)


def test_votes_from_before_a_save_ask_for_no_second_one(run: Run) -> None:
    run("save_once", 0, 0)


def test_policies_see_what_a_save_costs_the_slowest_rank(run: Run) -> None:
    run("share_costs", 0, 0, 0)


def test_a_number_of_steps_needs_nobody_elses_word(run: Run) -> None:
    run("count_alone", 0, 0)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_is_gone_is_an_error_on_all_others(run: Run, world_size: int) -> None:
    run("lose_a_rank", *[0] * (world_size - 1), -signal.SIGKILL)


def test_ranks_that_do_not_call_alike_are_told(run: Run) -> None:
    run("mix_up", 0, 0)


def test_a_new_process_group_begins_afresh(run: Run) -> None:
    run("begin_afresh", 0, 0)


def test_a_forked_worker_does_not_touch_the_group(run: Run) -> None:
    run("fork_a_worker", 0, 0)


def test_no_rank_that_ends_waits_for_the_others(run: Run) -> None:
    run("go_first", 0, 0)


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """Handlers of the program's own for both signals, put back after the test."""
    numbers: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: numbers.append(number))
        for number in (signal.SIGUSR2, signal.SIGUSR1)
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_handler_that_was_there_is_called_and_put_back(noted: list[int]) -> None:
    mine = signal.getsignal(signal.SIGUSR2)
    cadence = Cadence(preempt_signals=["SIGUSR2"])
    assert signal.getsignal(signal.SIGUSR2) is mine, "nothing is watched before the first call"
    assert not cadence.should_exit()
    assert signal.getsignal(signal.SIGUSR2) is not mine
    send(signal.SIGUSR2)
    assert noted == [signal.SIGUSR2]
    assert cadence.should_exit()
    cadence.close()
    cadence.close()
    assert signal.getsignal(signal.SIGUSR2) is mine
    send(signal.SIGUSR2)
    assert noted == [signal.SIGUSR2] * 2


def test_handlers_that_were_set_later_stay(noted: list[int]) -> None:
    first, second = Cadence(preempt_signals=["SIGUSR2"]), Cadence(preempt_signals=[signal.SIGUSR2])
    assert not first.need_checkpoint()
    assert not second.need_checkpoint()
    first.close()
    send(signal.SIGUSR2)
    assert noted == [signal.SIGUSR2]
    assert not first.preempted
    assert second.need_checkpoint()
    second.close()
    send(signal.SIGUSR2)
    assert noted == [signal.SIGUSR2] * 2


def test_a_checkpointer_that_is_forgotten_watches_nothing(noted: list[int]) -> None:
    mine = signal.getsignal(signal.SIGUSR2)
    cadence = Cadence(preempt_signals=["SIGUSR2"])
    cadence.should_exit()
    del cadence
    assert signal.getsignal(signal.SIGUSR2) is mine


def test_no_signal_is_watched_if_none_is_named(noted: list[int]) -> None:
    cadence = Cadence(preempt_signals=())
    assert not cadence.need_checkpoint()
    send(signal.SIGUSR2)
    assert not cadence.need_checkpoint()
    assert not cadence.should_exit()
    assert noted == [signal.SIGUSR2]


def test_outside_the_main_thread_nothing_is_watched_and_that_is_said(
    noted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    mine = signal.getsignal(signal.SIGUSR2)
    cadence = Cadence(2, preempt_signals=["SIGUSR2"])
    answers: list[bool] = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: answers.extend(cadence.need_checkpoint() for _ in range(2)))
        thread.start()
        thread.join()
    assert answers == [False, True]
    assert caplog.text.count("outside the main thread") == 1
    assert signal.getsignal(signal.SIGUSR2) is mine


def test_a_forked_worker_is_ended_by_the_signal() -> None:
    cadence = Cadence(preempt_signals=["SIGUSR2"])
    cadence.should_exit()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.write(write, b"x")
        while True:
            time.sleep(0.01)
    os.read(read, 1)
    os.kill(child, signal.SIGUSR2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
    assert not cadence.should_exit()
    cadence.close()
    os.close(read)
    os.close(write)


def test_what_is_not_heeded_is_asked_until_the_time_is_over(noted: list[int]) -> None:
    now = [0.0]
    cadence = Cadence(preempt_signals=["SIGUSR2"], grace_s=10.0, clock=lambda: now[0])
    assert not cadence.need_checkpoint()
    send(signal.SIGUSR2)
    for now[0] in (1.0, 5.0, 9.0):
        assert cadence.need_checkpoint()
        assert not cadence.should_exit()
    now[0] = 10.0
    assert cadence.should_exit()
    assert cadence.exit_code == 75
    assert cadence.complaints() == ["leaving after SIGUSR2 without a save: need_checkpoint() was not heeded"]
    assert cadence.complaints() == []
    cadence.close()


def test_a_last_save_that_fails_keeps_nobody(noted: list[int]) -> None:
    cadence = Cadence(preempt_signals=["SIGUSR2"])
    cadence.should_exit()
    send(signal.SIGUSR2)
    assert cadence.need_checkpoint()
    assert cadence.preempted
    cadence.begin_save()  # and it raises
    assert not cadence.need_checkpoint()
    assert cadence.should_exit()
    assert cadence.complaints() == ["leaving after SIGUSR2 without a save: the one that was due failed"]
    cadence.close()


class Held:
    """Keeps a version from the disk until the test lets it go."""

    name, after = "held", "digest"

    def __init__(self) -> None:
        self.go = threading.Event()

    def run(self, work: Work) -> None:
        self.go.wait(30)


def test_when_the_time_is_over_what_is_missing_is_said(tmp_path: Path, noted: list[int]) -> None:
    held = Held()
    settings: dict[str, Any] = {"agent": False, "modules": [held], "preempt_signals": ["SIGUSR2"]}
    with eg.Checkpointer(tmp_path / "run", grace_s=0.05, exit_code=3, **settings) as ck:
        assert not ck.need_checkpoint()
        send(signal.SIGUSR2)
        assert ck.need_checkpoint()
        pending = ck.save(1, {"x": torch.ones(3)})
        with pytest.warns(eg.CheckpointWarning, match="after SIGUSR2: .* is not in tier local 0.05 s after"):
            assert ck.should_exit()
        assert ck.exit_code == 3
        assert ck.should_exit()
        held.go.set()
        pending.wait(timeout=30)


def test_a_save_after_a_signal_is_waited_for(tmp_path: Path, noted: list[int]) -> None:
    with eg.Checkpointer(tmp_path / "run", agent=False, preempt_signals=["SIGUSR2"]) as ck:
        assert not ck.should_exit()
        assert not ck.need_checkpoint()
        send(signal.SIGUSR2)
        assert not ck.should_exit(), "there is a save to make first"
        assert ck.need_checkpoint()
        pending = ck.save(1, {"x": torch.ones(3)})
        assert not ck.need_checkpoint(), "once is enough"
        assert ck.should_exit()
        assert pending.done("memory")
        assert pending.done("local")
        assert ck.exit_code == 75
