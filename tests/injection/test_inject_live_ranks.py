"""Live faults among real DDP ranks: on k of n, still there steps later; and in what ranks send each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evergrad.study.rank_group import RankGroup

RANKS = 4


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with RankGroup(RANKS) as group:
        yield group


def call(group: RankGroup, function: str, work: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    answers = group.call(f"live_rank_work:{function}", folder, work, limit_s=60)
    assert all(answer is not None for answer in answers)
    return [answer for answer in answers if answer]


def differing(mine: dict[str, list[float]], other: dict[str, list[float]]) -> list[list[Any]]:
    return [[name, n] for name in mine for n, value in enumerate(mine[name]) if value != other[name][n]]


@pytest.mark.parametrize("ranks", [[1], [0, 3]])
def test_what_is_hit_on_some_ranks_is_there_three_steps_later_where_their_logs_say(
    group: RankGroup, tmp_path: Path, ranks: list[int]
) -> None:
    found = call(group, "corrupt_one", {"ranks": ranks}, tmp_path)
    clean = found[2]["weights"]
    for rank, answer in enumerate(found):
        assert answer["done"]
        assert differing(answer["weights"], clean) == sorted(
            answer["hits"], key=lambda hit: (list(clean).index(hit[0]), hit[1])
        )
        assert len(answer["hits"]) == (3 if rank in ranks else 0)
    seeds = [found[rank]["seed"] for rank in ranks]
    assert seeds == ["3"] if len(ranks) == 1 else len({"3", *seeds}) == 3
    assert len({str(found[rank]["hits"]) for rank in ranks}) == len(ranks), "each rank draws for itself"


def test_what_ddp_would_erase_is_refused(group: RankGroup, tmp_path: Path) -> None:
    found = call(group, "refused", {}, tmp_path)
    bare, buffers, ranks = found[0]["said"]
    assert "rank 2: the model is not wrapped yet, and DDP's constructor gives rank 0's parameters" in bare
    assert "Wrap it first" in bare
    assert "rank 2: model/1.running_mean is a buffer" in buffers
    assert "rank 4 is not there: there are 0 to 3" in ranks
    assert all(answer["said"] == found[0]["said"] for answer in found), "on every rank alike"
    assert [answer["bare"] for answer in found] == [False, False, True, False], "a model that is never wrapped"


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_rank_sends_reaches_all_and_nothing_else_is_touched(
    group: RankGroup, tmp_path: Path, ranks: int
) -> None:
    found = call(group, "communicate", {"ranks": ranks, "count": 4, "received": False}, tmp_path)
    assert all(answer["same before"] for answer in found), "our hook reduces as DDP does, to the last bit"
    assert not any(answer["same at"] for answer in found)
    assert len({answer["weights"] for answer in found}) == 1, "all ranks have received the same"
    assert [len(answer["hits"]) for answer in found] == [0, 4] + [0] * (ranks - 2)
    assert all(hit.startswith("communication/bucket-") for hit in found[1]["hits"])


def test_what_a_rank_receives_is_its_own_matter(group: RankGroup, tmp_path: Path) -> None:
    found = call(group, "communicate", {"ranks": 2, "count": 1, "received": True}, tmp_path)
    assert [answer["same before"] for answer in found] == [True, True]
    assert [answer["same at"] for answer in found] == [True, False]
    assert found[1]["done"]


def test_a_comm_hook_that_is_there_already_has_to_let_faults_in(group: RankGroup, tmp_path: Path) -> None:
    found = call(group, "wrap_anew", {}, tmp_path)
    without, wrapped = found[0]["said"]
    assert "model.register_comm_hook(state, eg.comm_faults(hook))" in without
    assert wrapped == "done: True"
