"""Undo: byte for byte, newest first, and never onto a file that is not as the injection left it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from kinds import snapshot

import evergrad as eg
from evergrad.errors import EvergradError, FileAccessError, UsageError

LARGE = 5 << 20  # more than what is digested whole by default


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure leaves is not at stake here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A torch file of two tensors, with checksums."""
    torch.manual_seed(0)
    torch.save({"a.weight": torch.randn(8, 5), "b.weight": torch.randn(30)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of which only the blocks that faults touch, and a few others, are digested."""
    values = np.random.default_rng(0).standard_normal(LARGE // 4).astype(np.float32)
    np.save(tmp_path / "large.npy", values)
    return tmp_path / "large.npy"


def flips(path: Path, seed: int, **options: object) -> eg.InjectionLog:
    return eg.inject(path, eg.BitFlip(), count=3, seed=seed, in_place=True, **options)


def refused(log: eg.InjectionLog | Path, *told: str, file: Path | None = None) -> None:
    """Undoing is refused in one line that says all this, and no file has changed."""
    kept = log.path if isinstance(log, eg.InjectionLog) else log
    target = file or Path(eg.InjectionLog.load(kept).out)
    before = snapshot(target.parent, logs=True) if target.parent.exists() else {}
    with pytest.raises(EvergradError) as caught:
        eg.undo(log, file)
    assert "\n" not in str(caught.value)
    for text in told:
        assert text in str(caught.value)
    assert (snapshot(target.parent, logs=True) if target.parent.exists() else {}) == before


def test_injections_are_undone_newest_first(path: Path) -> None:
    states, logs = [path.read_bytes()], []
    for seed in range(4):
        logs.append(flips(path, seed))
        states.append(path.read_bytes())
    assert len(set(states)) == 5
    for log in reversed(logs):
        assert states.pop() == path.read_bytes()
        assert eg.undo(log).found_state == "injected"
    assert states == [path.read_bytes()]


@pytest.mark.parametrize("own_places", [False, True], ids=["default logs", "logs elsewhere"])
def test_another_order_is_refused_and_the_one_to_undo_first_is_named(
    own_places: bool, path: Path, tmp_path: Path
) -> None:
    (elsewhere := tmp_path / "logs").mkdir()
    names = ["zebra", "ape", "newt"]  # not in the order of the alphabet
    first, second, third = (
        flips(path, seed, **({"log": elsewhere / f"{names[seed]}.jsonl"} if own_places else {})) for seed in range(3)
    )
    for older in (first, second):
        refused(older, "Undo that one first", str(third.path))
    eg.undo(third)
    refused(first, "Undo that one first", str(second.path))
    eg.undo(second)
    assert eg.undo(first).found_state == "injected"


def test_an_injection_that_was_undone_no_longer_stands_in_the_way(path: Path) -> None:
    before = path.read_bytes()
    first, second = flips(path, 1), flips(path, 2)
    eg.undo(second)
    third = flips(path, 3)
    refused(first, "Undo that one first", str(third.path))
    eg.undo(third)
    eg.undo(first)
    assert path.read_bytes() == before
    fourth = flips(path, 4)
    eg.undo(fourth)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["path", "large"])
def test_an_injection_into_a_copy_comes_before_those_into_it(name: str, request: pytest.FixtureRequest) -> None:
    source: Path = request.getfixturevalue(name)
    first = eg.inject(source, eg.BitFlip(), count=20, out=source.with_name("copy"))
    second = flips(Path(first.out), 1)
    refused(first, "Undo that one first", str(second.path))
    eg.undo(second)
    eg.undo(first)
    assert Path(first.out).read_bytes() == source.read_bytes()


def test_compressed_files_are_undone_newest_first_too(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "data.h5", "w") as file:
        file.create_dataset("w", data=np.arange(300.0), chunks=(50,), compression="gzip")
        file.create_dataset("plain", data=np.arange(30.0))
    before = path.read_bytes()
    logs = [flips(path, seed, where=where) for seed, where in enumerate(["w", "plain", "w"])]
    assert [any(change.rewritten for change in log.files) for log in logs] == [True, False, True]
    refused(logs[0], "Undo that one first", str(logs[2].path))
    for log in reversed(logs):
        eg.undo(log)
    assert path.read_bytes() == before


def test_undoing_twice_says_that_it_was_clean(path: Path) -> None:
    before = path.read_bytes()
    log = flips(path, 0)
    assert (eg.undo(log).found_state, eg.undo(log.path).found_state, eg.undo(log).elements) == ("injected", "clean", 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("stale", [False, True])
def test_undoing_a_folder_twice_says_that_it_was_clean(stale: bool, data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "tf_ckpt", path := tmp_path / "ckpt")
    log = flips(path, 0, stale_checksum=stale)
    assert [eg.undo(log).found_state for _ in range(3)] == ["injected", "clean", "clean"]


def test_an_injection_that_changed_no_bit_stands_in_nobodys_way(path: Path) -> None:
    before = path.read_bytes()
    first = eg.inject(path, eg.StuckAt(1, bits="sign"), fraction=1.0, in_place=True)
    again = eg.inject(path, eg.StuckAt(1, bits="sign"), fraction=1.0, in_place=True)
    assert (first.changed > 0, again.changed) == (True, 0)
    eg.undo(first)
    assert path.read_bytes() == before


def test_an_element_that_was_hit_twice_comes_back_in_two_steps(path: Path) -> None:
    before = path.read_bytes()
    first = eg.inject(path, eg.BitFlip(bits=3), fraction=1.0, where="b.weight", in_place=True)
    between = path.read_bytes()
    second = eg.inject(path, eg.Scale(4.0), fraction=1.0, where="b.weight", in_place=True)
    assert {hit.where for hit in first.faults()} == {hit.where for hit in second.faults()}
    eg.undo(second)
    assert path.read_bytes() == between
    eg.undo(first)
    assert path.read_bytes() == before


def test_the_same_flips_twice_are_none_and_are_undone_twice(path: Path) -> None:
    before = path.read_bytes()
    first = flips(path, 5)
    between = path.read_bytes()
    second = flips(path, 5)
    assert path.read_bytes() == before != between
    assert eg.undo(second).found_state == "injected"
    assert path.read_bytes() == between
    assert eg.undo(first).found_state == "injected"
    assert path.read_bytes() == before


def test_an_element_that_one_injection_hits_more_than_once_comes_back(path: Path) -> None:
    before = path.read_bytes()
    log = eg.inject(path, eg.BitFlip(), count=200, sampling="tensor", in_place=True)
    assert len({hit.where for hit in log.faults()}) < 200
    eg.undo(log)
    assert path.read_bytes() == before


def test_whatever_byte_of_a_small_file_was_altered_since_undo_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.randn(40), "v": torch.randn(3, 3)}, path := tmp_path / "m.safetensors")
    log = flips(path, 0)
    injected = path.read_bytes()
    for place in range(len(injected)):
        path.write_bytes(injected[:place] + bytes([injected[place] ^ 0xFF]) + injected[place + 1 :])
        refused(log)
    path.write_bytes(injected)
    assert eg.undo(log).found_state == "injected"


def test_another_file_of_the_same_layout_is_refused(path: Path, tmp_path: Path) -> None:
    log = flips(path, 0)
    torch.save({"a.weight": torch.randn(8, 5), "b.weight": torch.randn(30)}, path)
    refused(log, "has changed since", "Nothing was changed")
    torch.save({"a.weight": torch.randn(5, 8), "b.weight": torch.randn(30)}, path)
    refused(log, str(path), "Nothing was changed")
    torch.save({"c.weight": torch.randn(5, 8)}, path)
    refused(log, str(path), "Nothing was changed")


@pytest.mark.parametrize("size", [-1, -100, 1, 4096])
def test_a_file_of_another_length_is_refused(size: int, tmp_path: Path) -> None:
    np.save(path := tmp_path / "one.npy", np.random.default_rng(0).standard_normal(500))
    log = flips(path, 0)
    data = path.read_bytes()
    path.write_bytes(data[:size] if size < 0 else data + bytes(size))
    refused(log, str(path))


def test_a_file_that_was_moved_is_undone_where_it_is(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    log = flips(path, 0)
    (tmp_path / "other").mkdir()
    moved = path.rename(tmp_path / "other" / "renamed.pt")
    refused(log, "is not there any more", "evergrad undo LOG FILE")
    assert eg.undo(log, moved).path == moved
    assert moved.read_bytes() == before


def test_a_log_that_moved_with_its_file_still_finds_it(path: Path, tmp_path: Path) -> None:
    before = path.read_bytes()
    first, second = flips(path, 0), flips(path, 1)
    (folder := tmp_path / "other").mkdir()
    for file in (path, first.path, second.path):
        file.rename(folder / file.name)
    refused(folder / first.path.name, "Undo that one first", second.path.name, file=folder / path.name)
    eg.undo(folder / second.path.name)
    eg.undo(folder / first.path.name)
    assert (folder / path.name).read_bytes() == before


def test_a_folder_that_moved_is_undone_where_it_is(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "sharded", path := tmp_path / "gpt")
    before = snapshot(path)
    log = flips(path, 0)
    moved = path.rename(tmp_path / "elsewhere")
    eg.undo(log, moved)
    assert snapshot(moved) == before


def test_a_folder_that_lost_a_file_is_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "deepspeed", path := tmp_path / "run")
    log = eg.inject(path, eg.BitFlip(), count=30, in_place=True)
    (path / log.files[0].name).unlink()
    refused(log, str(path))


def test_a_full_digest_sees_what_happened_far_from_every_fault(large: Path) -> None:
    quick = eg.inject(large, eg.BitFlip(), count=2, seed=1, out=large.with_name("quick.npy"))
    whole = eg.inject(large, eg.BitFlip(), count=2, seed=1, out=large.with_name("whole.npy"), digest="full")
    for log in (quick, whole):
        with open(log.out, "r+b") as file:
            file.seek(LARGE // 2 + 777)
            file.write(bytes([file.read(1)[0] ^ 1]))
    refused(whole, "has changed since", "sha256")
    assert eg.undo(quick).found_state == "injected", (
        "the default digest is over the blocks of the faults and a few others"
    )


def test_a_full_digest_holds_for_the_file_as_it_was_injected(large: Path) -> None:
    before = large.read_bytes()
    log = eg.inject(large, eg.BitFlip(), count=5000, in_place=True, digest="full")
    (change,) = log.files
    assert change.full_before == hashlib.sha256(before).hexdigest()
    assert change.full_after == hashlib.sha256(large.read_bytes()).hexdigest()
    eg.undo(log)
    assert large.read_bytes() == before


def test_a_link_stays_a_link(data: Path, tmp_path: Path) -> None:
    (blobs := tmp_path / "blobs").mkdir()
    for name in ("chainer_convnet_gzip.h5", "chainer_adam_plain.h5"):  # one is rewritten, one is not
        shutil.copy(data / name, blobs)
        (link := tmp_path / name).symlink_to(blobs / name)
        log = flips(link, 0)
        assert (blobs / name).read_bytes() != (data / name).read_bytes()
        eg.undo(log)
        assert link.is_symlink()
        assert (blobs / name).read_bytes() == (data / name).read_bytes()


def test_a_link_may_lead_to_another_file_system(data: Path, tmp_path: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shutil.copy(data / "chainer_convnet_gzip.h5", there := Path(folder) / "blob")
        (link := tmp_path / "model.h5").symlink_to(there)
        log = flips(link, 0)
        assert there.read_bytes() != (data / "chainer_convnet_gzip.h5").read_bytes()
        eg.undo(log)
        assert there.read_bytes() == (data / "chainer_convnet_gzip.h5").read_bytes()


def test_a_dry_run_has_nothing_to_undo(path: Path) -> None:
    log = eg.inject(path, eg.BitFlip(), count=3, dry_run=True)
    assert os.listdir(path.parent) == ["model.pt"]
    with pytest.raises(UsageError, match="nothing to undo"):
        eg.undo(log)


def test_logs_are_kept_beside_the_result_under_the_next_free_number(path: Path, tmp_path: Path) -> None:
    names = [flips(path, seed).path.name for seed in range(3)]
    assert names == ["model.pt.faults.jsonl", "model.pt.faults.2.jsonl", "model.pt.faults.3.jsonl"]
    (tmp_path / "bad.pt.faults.jsonl").write_text("mine")
    assert eg.inject(path, eg.BitFlip(), count=1, out=tmp_path / "bad.pt").path.name == "bad.pt.faults.2.jsonl"
    assert (tmp_path / "bad.pt.faults.jsonl").read_text() == "mine"


def test_a_log_is_never_written_over(path: Path, tmp_path: Path) -> None:
    (taken := tmp_path / "taken.jsonl").write_text("mine")
    before = snapshot(tmp_path, logs=True)
    for where in ({"in_place": True}, {"out": tmp_path / "out.pt"}):
        with pytest.raises(FileAccessError, match="never written over"):
            eg.inject(path, eg.BitFlip(), count=1, log=taken, **where)
    assert snapshot(tmp_path, logs=True) == before
    log = flips(path, 0, log=tmp_path / "new.jsonl")
    with pytest.raises(FileAccessError, match="never written over"):
        log.save(taken)
    with pytest.raises(FileAccessError, match="never written over"):
        log.save(log.path)
    assert taken.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "new.jsonl", "taken.jsonl"]
