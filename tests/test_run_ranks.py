"""The ranks of the tests: results in order, errors with their traceback, limits, and no process that is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed

from ranks import Rank, Ranks, RanksFailed, run_ranks


def add_up(me: Rank, more: float) -> tuple[int, str | None, float]:
    me.join()
    number = torch.tensor([me.rank + more])
    distributed.all_reduce(number)
    return me.rank, os.environ.get("EVERGRAD_NODE"), number.item()


def fail_on_the_last(me: Rank) -> None:
    if me.is_last:
        raise ValueError(f"of {me.world_size}")


def exit_early(me: Rank) -> None:
    if me.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(75)


def stay(me: Rank) -> None:
    (me.folder / f"pid-{me.rank}").write_text(str(os.getpid()))
    if os.fork() == 0:
        (me.folder / f"pid-of-a-child-of-{me.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def leave_a_child(me: Rank) -> None:
    if (child := os.fork()) == 0:
        time.sleep(600)
    (me.folder / f"pid-of-a-child-of-{me.rank}").write_text(str(child))


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*")]


def are_gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # killed, and somebody has to reap them
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_results_are_those_of_each_rank_on_its_node(tmp_path: Path) -> None:
    assert run_ranks(3, add_up, tmp_path, 0.5, nodes=2) == [(0, "n0", 4.5), (1, "n0", 4.5), (2, "n1", 4.5)]


def test_the_traceback_of_a_rank_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"found \[0, 1\]\nrank 1: Traceback [^$]*in fail_on_the_last\n[^$]*of 2"):
        run_ranks(2, fail_on_the_last, tmp_path)


def test_exit_codes_have_to_be_those_expected(tmp_path: Path) -> None:
    codes = [-signal.SIGKILL, 75]
    assert run_ranks(2, exit_early, tmp_path, codes=codes) == [None, None]
    with pytest.raises(RanksFailed, match=r"expected \[0, 0\], found \[-9, 75\]"):
        run_ranks(2, exit_early, tmp_path)


def test_ranks_that_do_not_end_in_time_say_where_they_are_and_are_killed(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"\[None, None\] \(None: still running after 2 s\)[^$]*, line \d+ in stay"):
        run_ranks(2, stay, tmp_path, limit_s=2)
    assert len(pids(tmp_path)) == 4
    assert are_gone(pids(tmp_path))


def test_processes_that_ranks_have_left_are_killed(tmp_path: Path) -> None:
    run_ranks(2, leave_a_child, tmp_path)
    assert len(pids(tmp_path)) == 2
    assert are_gone(pids(tmp_path))


def test_ranks_of_a_test_that_fails_are_killed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Ranks(1, stay, tmp_path) as ranks:
        while len([path for path in tmp_path.glob("pid-*") if path.read_text()]) < 2:
            time.sleep(0.01)
        assert ranks.are_running
        _ = 1 / 0
    assert are_gone(pids(tmp_path))
