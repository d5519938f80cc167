"""Faults in a version of the checkpointer: by default as if they came before the save, or as rot at rest."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.cli import main
from evergrad.errors import EvergradError, FileAccessError, RestoreError, UsageError
from evergrad.records import Check
from version_folders import commit, copy_of, files, flip, restored, saved, two_ranks

pytestmark = pytest.mark.usefixtures("shm")

WEIGHT = "model/fc.weight"
BAD = eg.SetValue(77.0)


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Two versions of one rank, steps 3 and 4."""
    return saved(tmp_path, 3, 4)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two ranks, committed."""
    return two_ranks(tmp_path)


def hits(live: dict[str, Any]) -> int:
    return int((live["model"]["fc.weight"] == 77.0).sum())


@pytest.mark.parametrize("through", ["", "rank-00000.safetensors"])
def test_a_fault_that_came_before_the_save_is_restored_without_a_word(
    through: str, versions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = files(versions[1])
    log = eg.inject(versions[1] / through, BAD, count=5, where=WEIGHT, in_place=True, log=tmp_path / "log.jsonl")
    assert {change.name for change in log.files} == {"rank-00000.safetensors", "rank-00000.json"}
    found = eg.verify(versions[1])
    assert {row.checksum for row in found.tensors} | set(found.container.values()) == {Check.OK}
    with caplog.at_level(logging.WARNING):
        step, live = restored(tmp_path)
    assert (step, hits(live), caplog.records) == (4, 5, [])
    assert eg.undo(log).found_state == "injected"
    assert files(versions[1]) == before
    assert hits(restored(tmp_path)[1]) == 0


@pytest.mark.parametrize("through", ["", "rank-00000.safetensors"])
def test_rot_at_rest_is_passed_over_for_the_version_before(
    through: str, versions: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = files(versions[1])
    where = {"where": WEIGHT, "in_place": True, "log": tmp_path / "log.jsonl"}
    log = eg.inject(versions[1] / through, BAD, count=5, stale_checksum=True, **where)
    assert [change.name for change in log.files] == ["rank-00000.safetensors"]
    assert [row.name for row in eg.verify(versions[1]).wrong] == [WEIGHT, "model/tied"]
    with caplog.at_level(logging.WARNING):
        step, live = restored(tmp_path)
    assert (step, hits(live)) == (3, 0)
    assert f"{WEIGHT}: not what was captured" in caplog.text
    eg.undo(log)
    assert files(versions[1]) == before
    assert restored(tmp_path)[0] == 4


def test_rot_in_every_version_leaves_nothing_to_restore(versions: list[Path], tmp_path: Path) -> None:
    for version in versions:
        eg.inject(version, BAD, count=1, where="model/half", in_place=True, stale_checksum=True)
    with pytest.raises(RestoreError, match="model/half: not what was captured"):
        restored(tmp_path)


def test_a_fault_after_rot_does_not_heal_it(versions: list[Path], tmp_path: Path) -> None:
    before = files(versions[1])
    rot = eg.inject(versions[1], BAD, count=1, where=WEIGHT, in_place=True, stale_checksum=True)
    log = eg.inject(versions[1], BAD, count=1, seed=1, where=[WEIGHT, "wave"], in_place=True)
    assert eg.verify(versions[1])[WEIGHT].checksum is Check.FAILED
    with pytest.raises(UsageError, match="a later injection is still in effect"):
        eg.undo(rot)
    eg.undo(log)
    eg.undo(rot)
    assert files(versions[1]) == before


def test_a_tied_tensor_counts_under_both_of_its_names(versions: list[Path], tmp_path: Path) -> None:
    eg.inject(versions[1], BAD, count=2, where="model/tied", in_place=True)
    step, live = restored(tmp_path)
    assert (step, hits(live)) == (4, 2)


def test_faults_in_both_ranks_are_followed_up_to_the_commit(pair: Path, tmp_path: Path) -> None:
    before = files(pair)
    log = eg.inject(pair, BAD, fraction=0.01, in_place=True, digest="full", log=tmp_path / "log.jsonl")
    assert {change.name for change in log.files} == set(before)
    assert {column.tensor for column in log.columns} == {"rank-00000/a", "rank-00001/a"}
    assert set(eg.verify(pair).container.values()) == {Check.OK}
    for rank in (0, 1):
        with Shard(copy_of(pair, rank), "job-1") as shard:
            assert shard.verify() == []
            assert bool((shard.tensor("a") == 77).any())
    assert eg.undo(log).found_state == "injected"
    assert files(pair) == before


def test_only_digests_and_what_they_cover_change(pair: Path) -> None:
    before = files(pair)
    eg.inject(pair, eg.BitFlip(5), count=1, where="rank-00001", in_place=True)
    for name, data in files(pair).items():
        places = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(before[name], np.uint8))
        limit = {"rank-00001.safetensors": 1, "rank-00001.json": 64, "COMMIT.json": 64}.get(name, 0)
        assert (len(data), len(places) <= limit, bool(len(places))) == (len(before[name]), True, limit > 0), name


def test_a_tensor_that_another_rank_refers_to_is_followed_there(pair: Path) -> None:
    held, manifest = (Manifest.read(pair / f"rank-0000{rank}.json") for rank in (0, 1))
    (pair / "rank-00001.json").write_bytes(replace(manifest, elsewhere={"a": (0, held.digests["a"])}).to_bytes())
    commit(pair)
    before = files(pair)
    for path in (pair, pair / "rank-00000.safetensors"):
        log = eg.inject(path, BAD, count=1, where="rank-00000/a" if path == pair else "a", in_place=True)
        now = Manifest.read(pair / "rank-00001.json")
        assert now.elsewhere["a"][1] == Manifest.read(pair / "rank-00000.json").digests["a"] != held.digests["a"]
        assert now.digests == manifest.digests
        assert set(eg.verify(pair).container.values()) == {Check.OK}
        eg.undo(log)
        assert {name: data for name, data in files(pair).items() if name in before} == before


def test_a_copy_is_a_whole_version_and_the_original_stays(pair: Path, tmp_path: Path) -> None:
    before = files(pair)
    log = eg.inject(pair, BAD, count=3, out=tmp_path / "bad")
    assert files(pair) == before
    assert set(files(tmp_path / "bad")) == set(before)
    assert set(eg.verify(tmp_path / "bad").container.values()) == {Check.OK}
    eg.undo(log)
    assert files(tmp_path / "bad") == before


def test_a_copy_of_one_shard_is_one_file(pair: Path, tmp_path: Path) -> None:
    before = files(pair)
    log = eg.inject(pair / "rank-00001.safetensors", BAD, count=3, out=tmp_path / "bad.safetensors")
    assert files(pair) == before
    assert [change.name for change in log.files] == ["rank-00001.safetensors"]
    assert int((eg.open_checkpoint(tmp_path / "bad.safetensors").read("a") == 77).sum()) == 3
    eg.undo(log)
    assert (tmp_path / "bad.safetensors").read_bytes() == before["rank-00001.safetensors"]


def test_the_same_faults_are_replayed_in_another_version(versions: list[Path], tmp_path: Path) -> None:
    log = eg.inject(versions[0], BAD, count=4, where=WEIGHT, out=tmp_path / "bad")
    eg.replay(log, versions[1], in_place=True)
    step, live = restored(tmp_path)
    assert (step, hits(live)) == (4, 4)
    again = eg.replay(log, versions[0], out=tmp_path / "again")
    assert again.changed == 4
    assert files(tmp_path / "again") == files(tmp_path / "bad")


def test_a_dry_run_changes_nothing(pair: Path) -> None:
    before = files(pair)
    assert eg.inject(pair, BAD, count=3, dry_run=True).injected == 3
    assert files(pair) == before


def test_a_manifest_is_replaced_and_never_written_into(pair: Path, tmp_path: Path) -> None:
    before = files(pair)
    for name in ("rank-00000.json", "COMMIT.json"):
        os.link(pair / name, tmp_path / name)
    log = eg.inject(pair, BAD, count=1, where="rank-00000", in_place=True)
    for name in ("rank-00000.json", "COMMIT.json"):
        assert (tmp_path / name).read_bytes() == before[name] != (pair / name).read_bytes()
        os.unlink(tmp_path / name)
        os.link(pair / name, tmp_path / name)
    after = files(pair)
    eg.undo(log)
    assert {name: (tmp_path / name).read_bytes() for name in ("rank-00000.json", "COMMIT.json")} == {
        name: after[name] for name in ("rank-00000.json", "COMMIT.json")
    }


def test_a_record_that_changed_since_is_not_undone(pair: Path) -> None:
    log = eg.inject(pair, BAD, count=1, where="rank-00000", in_place=True)
    flip(pair / "COMMIT.json", -10)
    before = files(pair)
    with pytest.raises(UsageError, match=r"COMMIT\.json: has changed since"):
        eg.undo(log)
    assert files(pair) == before


def test_a_shard_without_its_manifest_is_not_undone_half(pair: Path) -> None:
    shard = pair / "rank-00000.safetensors"
    log = eg.inject(shard, BAD, count=1, in_place=True)
    (pair / "rank-00000.json").unlink()
    before = files(pair)
    with pytest.raises(EvergradError, match="Nothing was changed"):
        eg.undo(log)
    assert files(pair) == before


def test_a_folder_that_may_not_be_written_is_refused_at_once(unprivileged: Any, pair: Path) -> None:
    folder = unprivileged.folder / "v"
    shutil.copytree(pair, folder)
    for path in folder.iterdir():
        path.chmod(0o666)  # the files may be, their folder may not
    folder.chmod(0o755)
    before = files(folder)
    with unprivileged:
        with pytest.raises(FileAccessError, match="permission denied"):
            eg.inject(folder, BAD, count=1, in_place=True, log=Path("/dev/shm") / f"never-{os.getpid()}.jsonl")
        with eg.open_checkpoint(folder) as ck, pytest.raises(FileAccessError, match="permission denied"):
            ck.xor("rank-00000/a", [0], [1])
    assert files(folder) == before


@pytest.mark.parametrize("grain", [1, 64, 1 << 20])
def test_any_mixture_of_old_and_new_bytes_is_undone(grain: int, pair: Path, tmp_path: Path) -> None:
    before = files(pair)
    log = eg.inject(pair, eg.BitFlip(), count=24, seed=1, in_place=True, log=tmp_path / "log.jsonl")
    after, dice = files(pair), np.random.default_rng(grain)
    for _ in range(2):
        for name in before:
            old, new = np.frombuffer(before[name], np.uint8), np.frombuffer(after[name], np.uint8)
            chosen = np.repeat(dice.random(len(old) // grain + 1) < dice.random(), grain)[: len(old)]
            (pair / name).write_bytes(np.where(chosen, new, old).tobytes())
        eg.undo(log)
        assert files(pair) == before


def test_an_injection_that_was_killed_at_any_point_is_undone(tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    (start := tmp_path / "start").mkdir()
    shutil.copytree(two_ranks(made), start / "v")
    what = {"verb": "inject", "path": "v", "count": 1, "log": "v.faults.jsonl", "step": 25}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed.py"), tmp_path, json.dumps(what)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert {"clean", "partly injected", "injected"} <= set(json.loads(done.stdout)["seen"])


def test_digests_follow_over_many_blocks_of_a_large_tensor(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(tmp_path / "disk")], agent=False) as ck:
        ck.save(1, {"a": torch.zeros(3_000_001)}).wait(timeout=60)
    (version,) = (path.parent for path in (tmp_path / "disk").rglob("rank-00000.safetensors"))
    before = files(version)
    log = eg.inject(version, eg.BitFlip(), count=2000, in_place=True)
    assert eg.verify(version)["a"].checksum is Check.OK
    eg.undo(log)
    assert files(version) == before


def test_names_that_look_like_json_are_not_mistaken_for_it(tmp_path: Path) -> None:
    names = ['"', "\\", 'a": "', '", "digests": {"', "é\u2028", "{}", '"elsewhere": {}', "check"]
    with eg.Checkpointer(tmp_path / "run", tiers=[eg.Local(tmp_path / "disk")], agent=False) as ck:
        ck.save(1, {name: torch.ones(8) for name in names}, meta={name: name for name in names}).wait(timeout=60)
    (version,) = (path.parent for path in (tmp_path / "disk").rglob("rank-00000.safetensors"))
    commit(version)
    before = files(version)
    with eg.open_checkpoint(version) as ck:
        tensors = list(ck.tensors)
        assert len(tensors) == len(names)
    log = eg.inject(version, BAD, fraction=1.0, in_place=True, log=tmp_path / "log.jsonl")
    assert {column.tensor for column in log.columns} == set(tensors)
    found = eg.verify(version)
    assert {row.checksum for row in found.tensors} | set(found.container.values()) == {Check.OK}
    assert Manifest.read(version / "rank-00000.json").meta == {name: name for name in names}
    eg.undo(log)
    assert files(version) == before


def test_the_verbs_inject_undo_and_replay(
    versions: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, log = files(versions[1]), f"{versions[1]}.faults.jsonl"
    faults = ["--fault", "setvalue", "--value", "77", "--count", "3", "--where", WEIGHT]
    assert main(["inject", str(versions[1]), *faults, "--in-place"]) == 0
    assert hits(restored(tmp_path)[1]) == 3
    assert main(["diff", str(versions[0]), str(versions[1])]) == 1
    assert main(["undo", log]) == 0
    assert files(versions[1]) == before
    assert main(["replay", log, str(versions[0]), "--in-place"]) == 0
    assert main(["inject", str(versions[1]), *faults, "--in-place", "--stale-checksum"]) == 0
    step, live = restored(tmp_path)
    assert (step, hits(live)) == (3, 3)
    capsys.readouterr()
    assert main(["verify", str(versions[1])]) == 1
    assert WEIGHT in capsys.readouterr().out
