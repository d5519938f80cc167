"""Groups of ranks: warm, reused, and ended when one of them is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from evergrad.errors import StudyError
from evergrad.study.rank_group import GroupRankLost, RankGroup


@pytest.fixture(autouse=True)
def _work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def group() -> Iterator[RankGroup]:
    with RankGroup(3) as made:
        yield made


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_all_ranks_do_what_is_called_and_stay_warm(group: RankGroup, tmp_path: Path) -> None:
    first = group.call("rank_work:gather", tmp_path, {"value": 1})
    second = group.call("rank_work:gather", tmp_path, lambda rank: {"value": rank})
    assert [answer["sum"] for answer in first if answer] == [6.0, 6.0, 6.0]
    assert [answer["pid"] for answer in first if answer] == [answer["pid"] for answer in second if answer]
    assert [answer["pid"] for answer in second if answer] == group.pids()
    assert [answer["value"] for answer in second if answer] == [0, 1, 2]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV"])
def test_a_rank_that_dies_is_named_and_ends_its_group(group: RankGroup, tmp_path: Path, how: str) -> None:
    pids = group.pids()
    with pytest.raises(GroupRankLost, match=f"rank 1 ended with {how}"):
        group.call("rank_work:fall", tmp_path, {"rank": 1, "how": how})
    assert group.is_over
    assert not any(is_alive(pid) for pid in pids)
    with RankGroup(2) as another:
        assert [answer["sum"] for answer in another.call("rank_work:gather", tmp_path, {"value": 0}) if answer] == [
            3,
            3,
        ]


def test_a_rank_that_fails_is_told_and_nobody_waits_for_it(group: RankGroup, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"ValueError at .*rank_work.py:\d+: this one fails"):
        group.call("rank_work:fall", tmp_path, {"rank": 2, "how": "raise"})
    assert group.is_over


def test_an_answer_that_the_others_will_not_follow_ends_the_group(group: RankGroup, tmp_path: Path) -> None:
    work = {"rank": 0, "how": "answer"}
    answers = group.call("rank_work:fall", tmp_path, work, is_last=lambda answer: answer["end"] == "early")
    assert answers == [{"end": "early"}, None, None]
    assert group.is_over


def test_a_group_that_does_not_answer_in_time_is_ended(group: RankGroup, tmp_path: Path) -> None:
    pids = group.pids()
    with pytest.raises(GroupRankLost, match=r"rank 0 did not answer within 0.5 s"):
        group.call("rank_work:fall", tmp_path, {"rank": 1, "how": "SIGSTOP"}, limit_s=0.5)
    assert not any(is_alive(pid) for pid in pids)


def test_pinned_ranks_have_a_core_each(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    with RankGroup(2, pinned=True) as group:
        found = [answer["cores"] for answer in group.call("rank_work:gather", tmp_path, {"value": 0}) if answer]
    assert found == [[cores[0]], [cores[1 % len(cores)]]]
