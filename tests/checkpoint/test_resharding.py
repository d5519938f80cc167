"""Jobs that go on with another number of ranks: real processes, a real gloo group, FSDP2 and DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evergrad.checkpoint.placement import ALL, Place, Placements
from evergrad.errors import DamagedFile
from programs import run_python

PROGRAM = Path(__file__).with_name("resharded.py")


def run(scenario: str, folder: Path) -> str:
    log = folder / "output.txt"
    assert run_python(PROGRAM, scenario, folder, output=log).returncode == 0, log.read_text()
    return log.read_text()


def test_fsdp2_on_four_ranks_goes_on_with_four_with_two_with_one_and_without_fsdp(tmp_path: Path) -> None:
    run("fsdp", tmp_path)


def test_fsdp2_on_four_ranks_goes_on_with_three_from_the_bucket_alone(tmp_path: Path) -> None:
    run("fsdp bucket", tmp_path)


@pytest.mark.slow
def test_ddp_on_four_ranks_goes_on_with_two_and_with_one(tmp_path: Path) -> None:
    run("ddp", tmp_path)


@pytest.mark.slow
def test_ddp_on_four_ranks_goes_on_from_the_bucket_alone(tmp_path: Path) -> None:
    run("ddp bucket", tmp_path)


@pytest.mark.slow
def test_what_ddp_saved_can_be_cut_by_fsdp2(tmp_path: Path) -> None:
    run("ddp to fsdp", tmp_path)


def test_of_what_was_each_ranks_own_the_user_says_who_gets_what(tmp_path: Path) -> None:
    assert "rank 1: rng: was each rank's own" in run("own", tmp_path)


@pytest.mark.slow
def test_what_is_called_replicated_and_differs_is_each_ranks_own(tmp_path: Path) -> None:
    assert "no intact shard" not in run("claims", tmp_path)


def test_what_all_ranks_have_alike_is_flushed_once_in_balanced_parts(tmp_path: Path) -> None:
    run("shares", tmp_path)


def test_placements_survive_the_way_through_a_manifest_and_the_narrowest_counts() -> None:
    said = Placements(("model/",), ("model/bn",), {"model/fc.weight": Place((4, 2), (2, 0), (2, 2))})
    assert Placements.from_json(said.to_json()) == said
    kinds = [said.kind(path) for path in ("model/fc.weight", "model/bn", "model/fc.bias", "modelled")]
    assert kinds == ["sharded", "first", "replicated", "own"]
    assert Placements((ALL,)).kind("anything") == "replicated"


@pytest.mark.parametrize(
    "data",
    [
        {"sharded": {"a": {"shape": [4], "offset": [3], "piece": [2]}}},
        {"sharded": {"a": {"shape": [4], "offset": [-1], "piece": [2]}}},
        {"sharded": {"a": {"shape": [4, 2], "offset": [0], "piece": [2]}}},
        {"sharded": ["a"]},
        {"replicated": [7]},
    ],
)
def test_placements_that_cannot_be_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(DamagedFile, match="the placements cannot be"):
        Placements.from_json(data)
