"""Jobs that are asked to leave, and ranks that have to agree, for tests.

Run as a program, it imports torch once and then does what lines of JSON on its standard input ask for: it forks the
ranks of a scenario, waits for them and answers with the number of the request and their exit codes. In some scenarios
they end as any Python program does, with all that an interpreter does when it ends; in the others at once, which is
quicker.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import evergrad as eg
import evergrad.checkpoint.checkpointer
from evergrad.checkpoint import Progress
from evergrad.checkpoint.policy import Cadence
from evergrad.errors import CheckpointError

LIMIT_S = 60


class Rank:
    """One rank of one scenario."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._groups = itertools.count()

    def join(self) -> None:
        if self.world_size > 1:
            store = f"file://{self.folder}/store-{next(self._groups)}"
            distributed.init_process_group("gloo", store, rank=self.rank, world_size=self.world_size)

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1

    def checkpointer(self, *, agent: bool = False, **settings: Any) -> eg.Checkpointer:
        tiers = [eg.Memory(), eg.Local(self.folder / "disk")]
        return eg.Checkpointer(self.folder / "run", tiers=tiers, agent=agent, **settings)

    def state(self, value: float) -> dict[str, Any]:
        return {"a": torch.full((100,), value * 100 + self.rank), "step": int(value)}

    def tell(self, name: str, text: object) -> None:
        (self.folder / f"{name}-{self.rank}").write_text(str(text))

    def all_have(self, mine: object) -> list[Any]:
        found: list[Any] = [None] * self.world_size
        distributed.all_gather_object(found, mine)
        return found


class Clock:
    """A rank's own, unlike any other's."""

    def __init__(self, rank: int) -> None:
        self._random, self._pace = random.Random(rank), 1 + 2.5 * rank
        self.now = 1e6 * self._random.random()

    def __call__(self) -> float:
        self.now += self._pace * self._random.random() / 10
        return self.now


def train(me: Rank, ck: eg.Checkpointer, number: int, at: int) -> None:
    """Until the job has to leave; the last rank gets a signal after some step."""
    warnings.simplefilter("error")
    for step in range(1, 200):
        if step == at and me.is_last:
            os.kill(os.getpid(), number)
        if ck.need_checkpoint():
            me.tell("saved", step)
            ck.save(step, me.state(step))
        assert ck.exit_code == 0
        if ck.should_exit():
            assert ck.should_exit(), "and it stays so"
            assert not ck.need_checkpoint()
            sys.exit(ck.exit_code)
    raise AssertionError("nobody said that the job has to leave")


def leave(me: Rank) -> None:
    me.join()
    train(me, me.checkpointer(policy=eg.EverySteps(1000), agent=True), signal.SIGTERM, 5)


def leave_in_order(me: Rank) -> None:
    """As a careful program does, with a policy that needs votes, and an exit code of its own."""
    me.join()
    with me.checkpointer(policy=[eg.EverySeconds(1e6), eg.EverySteps(500)], exit_code=99) as ck:
        try:
            train(me, ck, signal.SIGUSR2, 7)
        finally:
            if me.world_size > 1:
                distributed.destroy_process_group()


def take_up(me: Rank) -> None:
    me.join()
    with me.checkpointer() as ck:
        live = me.state(0)
        step = ck.restore(live)
        assert step == live["step"] == int((me.folder / f"saved-{me.rank}").read_text())
        assert bool((live["a"] == step * 100 + me.rank).all())


def leave_without_being_asked(me: Rank) -> None:
    """Who never asks need_checkpoint saves by himself: nothing is waited for."""
    me.join()
    ck = me.checkpointer()
    assert not ck.should_exit()
    if me.is_last:
        os.kill(os.getpid(), signal.SIGTERM)
    answers = [ck.should_exit() for _ in range(4)]
    assert answers == ([True] * 4 if me.world_size == 1 else [False, True, True, True]), answers
    sys.exit(ck.exit_code)


def insist(me: Rank) -> None:
    """Heeds nothing."""
    cadence = Cadence()
    while True:
        cadence.need_checkpoint()
        me.tell("runs", os.getpid())
        time.sleep(0.01)


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
        cadence = Cadence(policy, preempt_signals=(), clock=clock)
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
        assert all(other == answers for other in me.all_have(answers)), policy
        assert 2 <= len(saves) <= 60, f"{policy}: {len(saves)} saves"


def luck_of_one(call: int) -> bool:
    return call % 3 == 0


def save_once(me: Rank) -> None:
    """The votes that are under way when a save comes do not ask for another one."""
    me.join()
    clock = Clock(me.rank)
    for policy in (eg.EverySeconds(50.0), eg.YoungDaly(1e5), eg.MaxOverhead(0.01)):
        cadence = Cadence(policy, preempt_signals=(), clock=clock)
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
    cadence = Cadence(look, clock=lambda: clock.now)
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
    assert all(other == shown for other in me.all_have(shown))
    cadence.close()


def count_alone(me: Rank) -> None:
    """Steps are counted alike everywhere: nobody is asked, and nothing lags."""
    me.join()
    with_signals = Cadence(5)
    assert [call for call in range(1, 18) if asks_and_saves(with_signals)] == [5, 10, 15]
    with_signals.close()
    made, distributed.new_group = distributed.new_group, None
    cadence = Cadence([5, eg.EverySteps(7)], preempt_signals=())
    if me.rank:  # no other rank takes part
        assert [call for call in range(1, 18) if asks_and_saves(cadence)] == [5, 10, 15]
    distributed.new_group = made


def asks_and_saves(cadence: Cadence) -> bool:
    if not cadence.need_checkpoint():
        return False
    cadence.begin_save()
    cadence.saved()
    return True


def lose_a_rank(me: Rank) -> None:
    me.join()
    cadence = Cadence(eg.EverySeconds(1e6))
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
    me.tell("lost", "a rank")
    while len([*me.folder.glob("lost-*")]) < me.world_size - 1:  # nobody learns of it only because this one ends
        time.sleep(0.01)


def mix_up(me: Rank) -> None:
    me.join()
    for others in (Cadence.should_exit, Cadence.begin_save):
        cadence = Cadence(eg.EverySeconds(1e6))
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


def begin_afresh(me: Rank) -> None:
    """In a new process group one rank is new, and the others are not."""
    me.join()
    cadence = Cadence([eg.EverySteps(4), eg.EverySeconds(1e6)])
    for _ in range(3):
        assert not cadence.need_checkpoint()
    distributed.destroy_process_group()
    me.join()
    if me.is_last:
        cadence = Cadence([eg.EverySteps(4), eg.EverySeconds(1e6)])
    answers = [cadence.need_checkpoint() for _ in range(4)]
    assert answers == [False, False, False, True]
    distributed.destroy_process_group()
    alone = [cadence.need_checkpoint() for _ in range(4)]
    assert alone == [False, False, False, True]


def fork_a_worker(me: Rank) -> None:
    """A child forgets what its parent goes on with."""
    me.join()
    cadence = Cadence(eg.EverySteps(4))
    assert not any(cadence.need_checkpoint() for _ in range(3))
    if (child := os.fork()) == 0:
        signal.alarm(LIMIT_S)
        del cadence
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert cadence.need_checkpoint()
    assert not cadence.should_exit()
    cadence.close()


def go_first(me: Rank) -> None:
    """The first rank asks once more than the others, and ends; the others stay until it is gone."""
    me.join()
    cadence = Cadence(eg.EverySeconds(1e6))
    pids = me.all_have(os.getpid())
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


SCENARIOS: dict[str, Callable[[Rank], None]] = {
    scenario.__name__: scenario
    for scenario in (
        agree, begin_afresh, count_alone, fork_a_worker, go_first, insist, leave, leave_in_order,
        leave_without_being_asked, lose_a_rank, mix_up, save_once, share_costs, take_up,
    )
}  # fmt: skip


ENDING_IN_FULL = {"leave", "go_first"}


def run_rank(scenario: str, me: Rank) -> None:
    torch.set_num_threads(1)
    signal.alarm(LIMIT_S)
    output = os.open(me.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(output, fd)
    code: Any = 0
    try:
        SCENARIOS[scenario](me)
    except SystemExit as end:
        code = end.code
    except BaseException:
        print(f"rank {me.rank} in {scenario}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    if scenario in ENDING_IN_FULL:
        sys.exit(code)
    os._exit(code)


def main() -> None:
    while line := sys.stdin.readline():
        request = json.loads(line)
        os.environ.update(request["environment"])
        folder = Path(request["folder"])
        for store in folder.glob("store-*"):
            store.unlink()
        children = []
        for rank in range(request["world_size"]):
            if (child := os.fork()) == 0:
                run_rank(request["scenario"], Rank(rank, request["world_size"], folder))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps([request["number"], codes]), flush=True)


if __name__ == "__main__":
    main()
