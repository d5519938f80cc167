"""Jobs that get a signal leave in order, and ranks agree on when to save: real signals, real processes, real gloo."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import evergrad as eg
from evergrad.checkpoint import Progress
from evergrad.checkpoint.save_policy import SavePolicyRuntime
from evergrad.checkpoint.tiers import Work
from evergrad.errors import CheckpointError
from ranks import Rank, Ranks, run_ranks


def join_others(me: Rank) -> None:
    """Join the process group; a job of one rank has none."""
    if me.world_size > 1:
        me.join()


def checkpointer(me: Rank, *, agent: bool = False, **settings: Any) -> eg.Checkpointer:
    tiers = [eg.Memory(), eg.Local(me.folder / "disk")]
    return eg.Checkpointer(me.folder / "run", tiers=tiers, agent=agent, **settings)


def state_of(me: Rank, value: float) -> dict[str, Any]:
    return {"a": torch.full((100,), value * 100 + me.rank), "step": int(value)}


def tell(me: Rank, name: str, text: object) -> None:
    (me.folder / f"{name}-{me.rank}").write_text(str(text))


def all_have(me: Rank, mine: object) -> list[Any]:
    found: list[Any] = [None] * me.world_size
    distributed.all_gather_object(found, mine)
    return found


def train(me: Rank, ck: eg.Checkpointer, number: int, at: int) -> None:
    """Until the job has to leave; the last rank gets a signal after some step."""
    warnings.simplefilter("error")
    for step in range(1, 200):
        if step == at and me.is_last:
            os.kill(os.getpid(), number)
        if ck.need_checkpoint():
            tell(me, "saved", step)
            ck.save(step, state_of(me, step))
        assert ck.exit_code == 0
        if ck.should_exit():
            assert ck.should_exit(), "and it stays so"
            assert not ck.need_checkpoint()
            sys.exit(ck.exit_code)
    raise AssertionError("nobody said that the job has to leave")


def leave(me: Rank) -> None:
    join_others(me)
    train(me, checkpointer(me, policy=eg.EverySteps(1000), agent=True), signal.SIGTERM, 5)


def take_up(me: Rank) -> None:
    join_others(me)
    with checkpointer(me) as ck:
        live = state_of(me, 0)
        step = ck.restore(live)
        assert step == live["step"] == int((me.folder / f"saved-{me.rank}").read_text())
        assert bool((live["a"] == step * 100 + me.rank).all())


@pytest.mark.parametrize("world_size", [1, 2])
def test_if_one_rank_is_signalled_all_save_the_same_step_and_leave(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, leave, tmp_path, codes=75, finalize=True)
    steps = {(tmp_path / f"saved-{rank}").read_text() for rank in range(world_size)}
    assert len(steps) == 1
    run_ranks(world_size, take_up, tmp_path)


def leave_in_order(me: Rank) -> None:
    """As a careful program does, with a policy that needs votes, and an exit code of its own."""
    join_others(me)
    with checkpointer(me, policy=[eg.EverySeconds(1e6), eg.EverySteps(500)], exit_code=99) as ck:
        try:
            train(me, ck, signal.SIGUSR2, 7)
        finally:
            if me.world_size > 1:
                distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_program_that_closes_everything_leaves_with_its_own_code(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, leave_in_order, tmp_path, codes=99)
    run_ranks(world_size, take_up, tmp_path)


def leave_without_being_asked(me: Rank) -> None:
    """Who never asks need_checkpoint saves by himself: nothing is waited for."""
    join_others(me)
    ck = checkpointer(me)
    assert not ck.should_exit()
    if me.is_last:
        os.kill(os.getpid(), signal.SIGTERM)
    answers = [ck.should_exit() for _ in range(4)]
    assert answers == ([True] * 4 if me.world_size == 1 else [False, True, True, True]), answers
    sys.exit(ck.exit_code)


@pytest.mark.parametrize("world_size", [1, 2])
def test_who_saves_by_himself_is_told_at_once(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, leave_without_being_asked, tmp_path, codes=75)


def insist(me: Rank) -> None:
    """Heeds nothing."""
    cadence = SavePolicyRuntime()
    while True:
        cadence.need_checkpoint()
        tell(me, "runs", os.getpid())
        time.sleep(0.01)


def test_a_second_signal_ends_the_process(tmp_path: Path) -> None:
    with Ranks(1, insist, tmp_path, codes=-signal.SIGTERM) as ranks:
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
        ranks.results()


class Clock:
    """A rank's own, unlike any other's."""

    def __init__(self, rank: int) -> None:
        self._random, self._pace = random.Random(rank), 1 + 2.5 * rank
        self.now = 1e6 * self._random.random()

    def __call__(self) -> float:
        self.now += self._pace * self._random.random() / 10
        return self.now


def agree(me: Rank) -> None:
    """Different clocks, costs and luck: every answer is the same on all ranks."""
    me.join()
    luck = random.Random(7)  # what all ranks do alike
    for policy in (
        eg.EverySeconds(6.0),
        eg.MaxOverhead(0.2),
        eg.YoungDaly(300.0),
        [eg.EverySteps(9), eg.EverySeconds(5)],
    ):
        clock = Clock(me.rank)
        cadence = SavePolicyRuntime(policy, preempt_signals=(), clock=clock)
        answers, saves = [], []
        for call in range(80):
            clock()
            answer = cadence.need_checkpoint()
            answers.append(answer)
            if (answer and luck.random() < 0.9) or luck.random() < 0.01:
                cadence.begin_save()
                clock.now += 0.5 + me.rank
                if not (me.rank == 1 and luck_of_one(call)):
                    cadence.saved()
                saves.append(call)
            if luck.random() < 0.5:
                answers.append(cadence.should_exit())
        cadence.close()
        assert all(other == answers for other in all_have(me, answers)), policy
        assert 2 <= len(saves) <= 60, f"{policy}: {len(saves)} saves"


def luck_of_one(call: int) -> bool:
    return call % 3 == 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_clocks_of_their_own_always_agree(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, agree, tmp_path)


def save_once(me: Rank) -> None:
    """The votes that are under way when a save comes do not ask for another one."""
    me.join()
    clock = Clock(me.rank)
    for policy in (eg.EverySeconds(50.0), eg.YoungDaly(1e5), eg.MaxOverhead(0.01)):
        cadence = SavePolicyRuntime(policy, preempt_signals=(), clock=clock)
        saves = []
        for call in range(40):
            if call == 20:
                clock.now += 1e5 if me.is_last else 0.0
            if cadence.need_checkpoint():
                saves.append(call)
                cadence.begin_save()
                clock.now += 1.0
                if me.rank:  # on the first rank it fails, every time
                    cadence.saved()
            cadence.should_exit()
        cadence.close()
        first = [] if isinstance(policy, eg.EverySeconds) else [2]
        assert saves == [*first, 21], f"{policy}: {saves}"


def test_votes_from_before_a_save_ask_for_no_second_one(tmp_path: Path) -> None:
    run_ranks(2, save_once, tmp_path)


class Look:
    """Is never due, and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def is_due(self, progress: Progress) -> bool:
        self.seen.append(progress)
        return False


def share_costs(me: Rank) -> None:
    """A policy is shown what a save costs the slowest rank, and nothing between a save and the time when all know."""
    me.join()
    look, clock = Look(), Clock(me.rank)
    cadence = SavePolicyRuntime(look, clock=lambda: clock.now)
    for save in range(1, 4):
        cadence.need_checkpoint()
        cadence.begin_save()
        clock.now += save * (1 + me.rank)
        if me.rank != 1:
            cadence.saved()
        for _ in range(2):
            cadence.need_checkpoint()
    shown = [progress.cost_s for progress in look.seen]
    largest = [1.0 * me.world_size, 1.5 * me.world_size, 2.0 * me.world_size]  # the medians of 1, of 1 and 2, …
    assert shown == [largest[0], largest[0], largest[1], largest[1], largest[2]], shown
    assert all(other == shown for other in all_have(me, shown))
    cadence.close()


def test_policies_see_what_a_save_costs_the_slowest_rank(tmp_path: Path) -> None:
    run_ranks(3, share_costs, tmp_path)


def count_alone(me: Rank) -> None:
    """Steps are counted alike everywhere: nobody is asked, and nothing lags."""
    me.join()
    with_signals = SavePolicyRuntime(5)
    assert [call for call in range(1, 18) if asks_and_saves(with_signals)] == [5, 10, 15]
    with_signals.close()
    made, distributed.new_group = distributed.new_group, None
    cadence = SavePolicyRuntime([5, eg.EverySteps(7)], preempt_signals=())
    if me.rank:  # no other rank takes part
        assert [call for call in range(1, 18) if asks_and_saves(cadence)] == [5, 10, 15]
    distributed.new_group = made


def asks_and_saves(cadence: SavePolicyRuntime) -> bool:
    if not cadence.need_checkpoint():
        return False
    cadence.begin_save()
    cadence.saved()
    return True


def test_a_number_of_steps_needs_nobody_elses_word(tmp_path: Path) -> None:
    run_ranks(2, count_alone, tmp_path)


def lose_a_rank(me: Rank) -> None:
    me.join()
    cadence = SavePolicyRuntime(eg.EverySeconds(1e6))
    for _ in range(3):
        cadence.need_checkpoint()
    distributed.barrier()
    if me.is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        try:
            while True:
                cadence.need_checkpoint()
        except CheckpointError as error:
            assert f"rank {me.rank} of {me.world_size}: the ranks cannot agree" in str(error), error
            assert "A rank is gone" in str(error), error
    tell(me, "lost", "a rank")
    while len([*me.folder.glob("lost-*")]) < me.world_size - 1:  # nobody learns of it only because this one ends
        time.sleep(0.01)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_is_gone_is_an_error_on_all_others(tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, lose_a_rank, tmp_path, codes=[0] * (world_size - 1) + [-signal.SIGKILL])


def mix_up(me: Rank) -> None:
    me.join()
    for others in (SavePolicyRuntime.should_exit, SavePolicyRuntime.begin_save):
        cadence = SavePolicyRuntime(eg.EverySeconds(1e6))
        cadence.need_checkpoint()
        if me.rank:
            others(cadence)
        try:
            for _ in range(3):
                cadence.need_checkpoint()
        except CheckpointError as error:
            assert "in the same order" in str(error), error
        else:
            raise AssertionError("two ranks that do different things count as agreed")


def test_ranks_that_do_not_call_alike_are_told(tmp_path: Path) -> None:
    run_ranks(2, mix_up, tmp_path)


def begin_afresh(me: Rank) -> None:
    """In a new process group one rank is new, and the others are not."""
    me.join()
    cadence = SavePolicyRuntime([eg.EverySteps(4), eg.EverySeconds(1e6)])
    for _ in range(3):
        assert not cadence.need_checkpoint()
    distributed.destroy_process_group()
    me.join()
    if me.is_last:
        cadence = SavePolicyRuntime([eg.EverySteps(4), eg.EverySeconds(1e6)])
    answers = [cadence.need_checkpoint() for _ in range(4)]
    assert answers == [False, False, False, True]
    distributed.destroy_process_group()
    alone = [cadence.need_checkpoint() for _ in range(4)]
    assert alone == [False, False, False, True]


def test_a_new_process_group_begins_afresh(tmp_path: Path) -> None:
    run_ranks(2, begin_afresh, tmp_path)


def fork_a_worker(me: Rank) -> None:
    """A child forgets what its parent goes on with."""
    me.join()
    cadence = SavePolicyRuntime(eg.EverySteps(4))
    assert not any(cadence.need_checkpoint() for _ in range(3))
    if (child := os.fork()) == 0:
        signal.alarm(60)
        del cadence
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cadence.need_checkpoint()
    assert not cadence.should_exit()
    cadence.close()


def test_a_forked_worker_does_not_touch_the_group(tmp_path: Path) -> None:
    run_ranks(2, fork_a_worker, tmp_path)


def go_first(me: Rank) -> None:
    """The first rank asks once more than the others, and ends; the others stay until it is gone."""
    me.join()
    cadence = SavePolicyRuntime(eg.EverySeconds(1e6))
    pids = all_have(me, os.getpid())
    cadence.need_checkpoint()
    if me.rank == 0:
        cadence.need_checkpoint()
        return
    while True:
        try:
            os.kill(pids[0], 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def test_no_rank_that_ends_waits_for_the_others(tmp_path: Path) -> None:
    run_ranks(2, go_first, tmp_path, finalize=True)


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
    cadence = SavePolicyRuntime(preempt_signals=["SIGUSR2"])
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
    first, second = SavePolicyRuntime(preempt_signals=["SIGUSR2"]), SavePolicyRuntime(preempt_signals=[signal.SIGUSR2])
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
    cadence = SavePolicyRuntime(preempt_signals=["SIGUSR2"])
    cadence.should_exit()
    del cadence
    assert signal.getsignal(signal.SIGUSR2) is mine


def test_no_signal_is_watched_if_none_is_named(noted: list[int]) -> None:
    cadence = SavePolicyRuntime(preempt_signals=())
    assert not cadence.need_checkpoint()
    send(signal.SIGUSR2)
    assert not cadence.need_checkpoint()
    assert not cadence.should_exit()
    assert noted == [signal.SIGUSR2]


def test_outside_the_main_thread_nothing_is_watched_and_that_is_said(
    noted: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    mine = signal.getsignal(signal.SIGUSR2)
    cadence = SavePolicyRuntime(2, preempt_signals=["SIGUSR2"])
    answers: list[bool] = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: answers.extend(cadence.need_checkpoint() for _ in range(2)))
        thread.start()
        thread.join()
    assert answers == [False, True]
    assert caplog.text.count("outside the main thread") == 1
    assert signal.getsignal(signal.SIGUSR2) is mine


def test_a_forked_worker_is_ended_by_the_signal() -> None:
    cadence = SavePolicyRuntime(preempt_signals=["SIGUSR2"])
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
    cadence = SavePolicyRuntime(preempt_signals=["SIGUSR2"], grace_s=10.0, clock=lambda: now[0])
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
    cadence = SavePolicyRuntime(preempt_signals=["SIGUSR2"])
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
