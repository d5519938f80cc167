"""torch.distributed.checkpoint on arenas and tiers: its calls, bit for bit what they give with its own storage."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_ranks import alone, in_group
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import evergrad as eg
from evergrad.errors import RestoreError, StateError, UsageError
from evergrad.integrations.dcp import ArenaStager, TierReader, TierWriter
from ranks import run_ranks

pytestmark = [
    pytest.mark.usefixtures("shm"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


def test_what_four_ranks_staged_two_and_one_can_load(tmp_path: Path) -> None:
    run_ranks(4, in_group, tmp_path, dcp_ranks.save_spread)
    run_ranks(2, in_group, tmp_path, dcp_ranks.load_spread)
    run_ranks(1, alone, tmp_path, dcp_ranks.load_alone)


def test_a_version_with_a_corrupt_shard_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, in_group, tmp_path, dcp_ranks.two_versions)
    run_ranks(1, alone, tmp_path, dcp_ranks.damage_20)
    run_ranks(2, in_group, tmp_path, dcp_ranks.load_10)


def test_a_state_that_one_rank_cannot_store_keeps_no_rank_waiting(tmp_path: Path) -> None:
    run_ranks(2, in_group, tmp_path, dcp_ranks.fail_on_one)


def test_what_was_staged_becomes_durable_after_the_trainer_was_killed(tmp_path: Path) -> None:
    run_ranks(1, alone, tmp_path, dcp_ranks.save_and_die, codes=-signal.SIGKILL)
    run_ranks(1, alone, tmp_path, dcp_ranks.load_after_death)


def test_tensors_that_a_shared_tier_stores_once_are_loaded_by_every_rank(tmp_path: Path) -> None:
    run_ranks(2, in_group, tmp_path, dcp_ranks.share)
    run_ranks(2, in_group, tmp_path, dcp_ranks.load_shared)
    run_ranks(1, alone, tmp_path, dcp_ranks.load_shared)


def test_folders_of_four_ranks_are_restored_by_two_and_by_one(tmp_path: Path) -> None:
    run_ranks(4, in_group, tmp_path, dcp_ranks.write_folders)
    run_ranks(2, in_group, tmp_path, dcp_ranks.restore_folders)
    run_ranks(1, alone, tmp_path, dcp_ranks.restore_folders)
    run_ranks(2, in_group, tmp_path, dcp_ranks.refuse_folder)


@pytest.fixture
def ck(tmp_path: Path, shm: Path) -> Iterator[eg.Checkpointer]:
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Memory(), eg.Local(tmp_path / "disk")], agent=False) as found:
        yield found


def training() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(value: float) -> dict[str, Any]:
    """One of every kind that DCP has a name for."""
    return {
        "model": {"fc.weight": torch.full((2, 3), value), "half": torch.full((3,), value).bfloat16()},
        "list": [torch.arange(3) + int(value), {"a": value}],
        "values": [1, 2, value],
        "pair": (value, torch.full((2,), value)),
        "by number": {0: torch.tensor(value), 1: {"x": value}},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(value),
        "step": int(value),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def by_text(state: dict[str, Any]) -> dict[str, Any]:
    """The same with text for keys: DCP writes a loaded value back under the key's text."""
    return {**state, "by number": {str(key): value for key, value in state["by number"].items()}}


@pytest.mark.parametrize("how", ["staged", "by the writer", "save"])
def test_what_dcp_saves_through_the_tiers_it_loads_back(ck: eg.Checkpointer, how: str) -> None:
    if how == "save":
        dcp.save(by_text(state_of(5)), storage_writer=TierWriter(ck, 5))
    else:
        stager = ArenaStager(ck) if how == "staged" else None
        state = by_text(state_of(5))
        future = dcp.async_save(state, async_stager=stager, storage_writer=TierWriter(ck, step=5))
        state["model"]["fc.weight"].fill_(-1)  # it is in the arena
        future.result(timeout=60)
    live = by_text(state_of(0))
    weight = live["model"]["fc.weight"]
    dcp.load(live, storage_reader=TierReader(ck))
    assert same(live, by_text(state_of(5)))
    assert live["model"]["fc.weight"] is weight, "not in place"


def test_what_it_loads_is_what_its_own_storage_gives(ck: eg.Checkpointer, tmp_path: Path) -> None:
    dcp.save(state_of(5), storage_writer=TierWriter(ck, 5))
    dcp.save(state_of(5), checkpoint_id=tmp_path / "folder")
    ours, theirs = TierReader(ck).read_metadata(), dcp.FileSystemReader(tmp_path / "folder").read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert ours.planner_data == theirs.planner_data
    for name, expected in theirs.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(expected)
        if isinstance(expected, dcp.TensorStorageMetadata):
            assert (found.size, found.chunks, found.properties.dtype) == (
                expected.size,
                expected.chunks,
                expected.properties.dtype,
            )
    empty: list[dict[str, Any]] = [{}, {}]
    for state, reader in zip(empty, (TierReader(ck), dcp.FileSystemReader(tmp_path / "folder")), strict=True):
        _load_state_dict(state, reader, no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert same(*empty)


def test_the_two_apis_read_each_others_versions(ck: eg.Checkpointer) -> None:
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer, "step": 7}
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    moments = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    dcp.save(state, storage_writer=TierWriter(ck, 7))
    dcp.async_save(state, storage_writer=TierWriter(ck, 8)).result(timeout=60)
    ck.save(9, state).wait(timeout=60)
    for version in (7, 8, 9)[1:]:  # two are kept
        fresh, other = training()
        live = {"model": fresh, "optimizer": other, "step": 0}
        dcp.load(live, storage_reader=TierReader(ck, version=version))
        assert all(map(torch.equal, fresh.parameters(), expected))
        assert torch.equal(other.state_dict()["state"][0]["exp_avg"], moments)
    fresh, other = training()
    assert ck.restore({"model": fresh, "optimizer": other, "step": 0}, version=8) == 8
    assert all(map(torch.equal, fresh.parameters(), expected))


def test_a_plain_save_is_restored_by_the_checkpointer_with_its_optimizer(ck: eg.Checkpointer) -> None:
    model, optimizer = training()
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=TierWriter(ck, 7))
    fresh, other = training()
    other.state.clear()
    assert ck.restore({"model": fresh, "optimizer": other}) == 7
    assert same(other.state_dict(), optimizer.state_dict())


def test_nothing_that_dcp_would_unpickle_is_written(ck: eg.Checkpointer, tmp_path: Path) -> None:
    dcp.save(state_of(5), storage_writer=TierWriter(ck, 5))
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert "rank-00000.safetensors" in names
    assert not [name for name in names if name.startswith(".metadata") or name.endswith(".distcp")]


def test_a_save_under_way_is_not_torn_by_the_next(ck: eg.Checkpointer) -> None:
    stager, futures = ArenaStager(ck), []
    state = {"x": torch.zeros(1 << 16)}
    for step in range(1, 7):
        state["x"].fill_(step)
        futures.append(dcp.async_save(state, async_stager=stager, storage_writer=TierWriter(ck, step=step)))
    for future in futures:
        future.result(timeout=60)
    for step in (5, 6):
        live = {"x": torch.zeros(1 << 16)}
        dcp.load(live, storage_reader=TierReader(ck, version=step))
        assert torch.equal(live["x"], torch.full((1 << 16,), float(step)))


def test_a_checkpoint_id_that_is_a_number_is_the_step(ck: eg.Checkpointer) -> None:
    writer = TierWriter(ck)
    for step in ("30", "31"):
        dcp.save({"x": torch.tensor(float(step))}, checkpoint_id=step, storage_writer=writer)
    live = {"x": torch.tensor(0.0)}
    dcp.load(live, checkpoint_id="30", storage_reader=TierReader(ck))
    assert live["x"] == 30
    with pytest.raises(UsageError, match="whole number"):
        dcp.save({"x": torch.ones(1)}, checkpoint_id="runs/a", storage_writer=TierWriter(ck))
    with pytest.raises(UsageError, match="expected 5, as TierWriter was told"):
        dcp.save({"x": torch.ones(1)}, checkpoint_id="6", storage_writer=TierWriter(ck, 5))


def test_a_step_that_is_not_known_when_it_is_needed_is_asked_for(ck: eg.Checkpointer) -> None:
    writer = TierWriter(ck)
    with pytest.raises(UsageError, match=r"TierWriter\(ck, step=…\)"):
        dcp.async_save({"x": torch.ones(1)}, checkpoint_id="5", storage_writer=writer)
    with pytest.raises(dcp.CheckpointException, match="no step"):
        dcp.save({"x": torch.ones(1)}, storage_writer=writer)
    assert ck.versions() == []


def test_a_stager_uses_the_writer_that_waits_and_no_other(ck: eg.Checkpointer) -> None:
    stager = ArenaStager(ck)
    with pytest.raises(UsageError, match="no TierWriter"):
        stager.stage({"x": torch.ones(1)})
    first, second = TierWriter(ck, 1), TierWriter(ck, 2)
    with pytest.raises(UsageError, match="steps 1, 2 wait"):
        dcp.async_save({"x": torch.ones(1)}, async_stager=stager, storage_writer=second)
    del first
    dcp.async_save({"x": torch.ones(1)}, async_stager=stager, storage_writer=second).result(timeout=60)
    assert [record.step for record in ck.versions()] == [2]


def test_what_was_staged_is_never_written_by_another_writer(ck: eg.Checkpointer, tmp_path: Path) -> None:
    writer = TierWriter(ck, 3)
    future = dcp.async_save(
        {"x": torch.ones(1)},
        async_stager=ArenaStager(ck),
        storage_writer=dcp.FileSystemWriter(tmp_path / "folder"),
    )
    with pytest.raises(dcp.CheckpointException, match="use it with storage_writer=TierWriter"):
        future.result(timeout=60)
    assert not (tmp_path / "folder" / ".metadata").exists()
    del writer


def test_a_second_process_is_refused_in_one_line(ck: eg.Checkpointer) -> None:
    writer = TierWriter(ck, 3)
    with pytest.raises(UsageError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(writer)
    with pytest.raises(UsageError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(writer.stage({"x": torch.ones(1)}))


def test_what_cannot_be_stored_is_named_as_dcp_names_it(ck: eg.Checkpointer) -> None:
    state = {"model": {"fc.weight": torch.ones(1)}, "extra": {"thing": object()}}
    with pytest.raises(StateError, match=r"^extra\.thing: a builtins\.object has no form that can be stored"):
        dcp.async_save(state, async_stager=ArenaStager(ck), storage_writer=TierWriter(ck, step=1))


def test_a_planner_that_decides_what_is_written_is_refused(ck: eg.Checkpointer) -> None:
    class Halves(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).half()

    with pytest.raises(dcp.CheckpointException, match="Halves decides what is written"):
        dcp.save({"x": torch.ones(1)}, storage_writer=TierWriter(ck, 1), planner=Halves())
    assert ck.versions() == []


def flip(tmp_path: Path, shm: Path, step: int) -> None:
    """One bit of a version, wherever it lies."""
    shards = [*tmp_path.glob(f"disk/*/*/v{step:010d}-*/*.safetensors"), *shm.rglob("rank-*.safetensors")]
    assert shards
    for shard in shards:
        with shard.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-2, os.SEEK_END)
            file.write(bytes([byte ^ 16]))


def test_a_corrupt_version_is_passed_over_for_the_one_before(
    tmp_path: Path, shm: Path, ck: eg.Checkpointer, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        dcp.save({"x": torch.full((5,), float(step))}, storage_writer=TierWriter(ck, step))
    flip(tmp_path, shm, 2)
    live = {"x": torch.zeros(5)}
    with pytest.raises(RestoreError, match=r"version 2 cannot be loaded: .*x: not what was captured"):
        _ = TierReader(ck, version=2).version
    # torch 2.11 keeps the reason to itself.
    with pytest.raises(dcp.CheckpointException, match=r"version 2 cannot be loaded|metadata is None"):
        dcp.load(live, storage_reader=TierReader(ck, version=2))
    assert not live["x"].any()
    with caplog.at_level(logging.WARNING, "evergrad"):
        dcp.load(live, storage_reader=TierReader(ck))
    assert live["x"].tolist() == [1.0] * 5
    assert any("not what was captured" in line and "Loading step 1" in line for line in caplog.messages)


def test_a_torn_version_is_as_good_as_none(tmp_path: Path, ck: eg.Checkpointer) -> None:
    for step in (1, 2):
        dcp.save({"x": torch.full((5,), float(step))}, storage_writer=TierWriter(ck, step))
    ck.close()  # manifests are written in the background
    manifests = list(tmp_path.glob("disk/*/*/v0000000002-01/*.json"))
    assert manifests
    for manifest in manifests:
        manifest.unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(tmp_path / "disk")], agent=False) as other:
        assert TierReader(other).version.step == 1


def test_nothing_to_load_is_said_so(ck: eg.Checkpointer) -> None:
    with pytest.raises(RestoreError, match="there is no version to load"):
        _ = TierReader(ck).version
    ck.save(4, {"x": torch.ones(1)}).wait(timeout=60)
    with pytest.raises(UsageError, match=r"there is no version 5\. There are 4\."):
        _ = TierReader(ck, version=5).version


def open_shards() -> Counter[str]:
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return Counter(name for name in names if name.endswith(".safetensors"))


def test_a_reader_lets_go_of_every_shard(ck: eg.Checkpointer) -> None:
    ck.save(4, {"x": torch.ones(1)}).wait(timeout=60)
    before = open_shards()
    for _ in range(3):
        with TierReader(ck) as reader, pytest.raises(dcp.CheckpointException, match="Missing key"):
            dcp.load({"y": torch.ones(1)}, storage_reader=reader)
        dcp.load({"x": torch.ones(1)}, storage_reader=TierReader(ck))
    assert not open_shards() - before  # those of the save may be closed a little later than it is done
