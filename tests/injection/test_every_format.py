"""Faults in every format: exactly the logged bits change, the format's own library agrees, and all of it is undone."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
from kinds import KINDS, Kind, contents, snapshot
from readers import put_in

import evergrad as eg
from evergrad.errors import UnsupportedContent, UsageError
from evergrad.records import Check
from evergrad.testing import raw_bytes

COUNT = 24
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
sealed = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.sealed], ids=str)
unsealed = pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.sealed and not kind.rewritten], ids=str)
compressed = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.rewritten and not kind.sealed], ids=str)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power failure leaves is not at stake here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the source is, and nothing else."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the result goes: a folder of its own."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "injected"


def faults(path: Path, **where: object) -> eg.InjectionLog:
    return eg.inject(path, eg.BitFlip(), count=COUNT, seed=11, **where)


def assert_exactly_the_logged_bits_differ(kind: Kind, source: Path, result: Path, log: eg.InjectionLog) -> None:
    """By the format's own library, which also sees whether checksums hold."""
    assert (log.injected, log.changed, len(list(log.faults()))) == (COUNT, COUNT, COUNT)
    if kind.load is None:
        return
    expected, found = put_in(kind.load(source), log), kind.load(result)
    assert {name for name in expected if raw_bytes(found[name]) != raw_bytes(expected[name])} == set()
    assert set(found) == set(expected)


def assert_sound(kind: Kind, path: Path) -> None:
    """Zip files as zipfile sees them, and every checksum that the container has."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if file.is_file() and zipfile.is_zipfile(file) and file.suffix != ".distcp" and not kind.bad_checksums:
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None, file
    with eg.open_checkpoint(path) as ck:
        filled = [name for name, info in ck.tensors.items() if info.numel]
        assert Check.FAILED not in {ck.checksum(name) for name in filled} | set(ck.container_checks().values())


def flipped(before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]], log: eg.InjectionLog) -> int:
    """How many bits of all files differ, not counting the checksums that the log names."""
    total = 0
    seals = {change.name: change.seals for change in log.files}
    for name, (_, old) in before.items():
        new = bytearray(after[name][1])
        assert len(new) == len(old), name
        for path, places in seals.items():
            for offset, was, _ in places if Path(name).as_posix().endswith(path) else ():
                new[offset : offset + len(was)] = old[offset : offset + len(was)]
        total += sum((a ^ b).bit_count() for a, b in zip(old, new, strict=True) if a != b)
    return total


@every_kind
def test_a_copy_has_exactly_the_logged_bits_changed_and_the_source_stays(kind: Kind, folder: Path, out: Path) -> None:
    source = kind.make(folder)
    before = snapshot(folder, logs=True)
    log = faults(source, out=out)
    assert snapshot(folder, logs=True) == before
    assert sorted(child.name for child in out.parent.iterdir()) == ["injected", "injected.faults.jsonl"]
    assert log.path == out.with_name("injected.faults.jsonl")
    assert (log.file, log.out, log.in_place) == (str(source), str(out), False)
    assert_exactly_the_logged_bits_differ(kind, source, out, log)
    assert_sound(kind, out)


@every_kind
def test_in_place_the_result_is_that_of_a_copy(kind: Kind, folder: Path, out: Path) -> None:
    source = kind.make(folder)
    before = snapshot(folder)
    apart = faults(source, out=out)
    log = faults(source, in_place=True)
    assert [str(hit) for hit in log.faults()] == [str(hit) for hit in apart.faults()]
    assert_sound(kind, source)
    after = snapshot(folder)
    assert set(after) == set(before)
    copy = snapshot(out) if out.is_dir() else {"injected": (out.stat().st_mode, out.read_bytes())}
    assert set(copy.values()) <= set(after.values())
    changed = [name for name in after if after[name] != before[name]]
    assert len(changed) == len(log.files)
    assert {after[name] for name in changed} <= set(copy.values())
    if not kind.rewritten:
        assert flipped(before, after, log) == sum((hit.old ^ hit.new).bit_count() for hit in log.faults()) == COUNT


@every_kind
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_undo_restores_every_file_byte_for_byte(kind: Kind, in_place: bool, folder: Path, out: Path) -> None:
    source = kind.make(folder)
    for file in folder.rglob("*"):
        file.chmod(0o750 if file.is_dir() else 0o640)
    before = snapshot(folder)
    log = faults(source, in_place=True) if in_place else faults(source, out=out)
    undone = eg.undo(log.path)
    hit = {(hit.tensor, hit.index) for hit in log.faults()}  # both parts of a complex element may be hit
    assert (undone.found_state, undone.elements) == ("injected", len(hit))
    assert snapshot(folder) == before
    if not in_place:
        found = snapshot(out) if out.is_dir() else {"injected": (out.stat().st_mode, out.read_bytes())}
        assert set(found.values()) <= set(before.values())
        assert len(found) == (len(before) if source.is_dir() else len(found))
    left = [child.name for child in (folder if in_place else out.parent).rglob("*") if "partial" in child.name]
    assert left == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name in ("npz deflated", "HDF5 gzip")], ids=str)
def test_a_compressed_file_has_another_length_while_it_is_injected(kind: Kind, folder: Path) -> None:
    source = kind.make(folder)
    log = eg.inject(source, eg.BitFlip(), fraction=0.5, seed=2, in_place=True)
    (change,) = log.files
    assert change.size != change.size_after == source.stat().st_size
    eg.undo(log)
    assert source.stat().st_size == change.size


@every_kind
def test_a_replay_onto_the_same_file_is_byte_identical(kind: Kind, folder: Path, out: Path) -> None:
    source = kind.make(folder)
    log = faults(source, out=out)
    again = eg.replay(log.path, source, out=out.with_name("again"))
    assert contents(out.with_name("again")) == contents(out)
    assert again.settings["replay_of"] == log.digest
    assert [str(hit) for hit in again.faults()] == [str(hit) for hit in log.faults()]


@every_kind
def test_a_log_reads_back_as_it_was_written(kind: Kind, folder: Path, out: Path) -> None:
    log = faults(kind.make(folder), out=out)
    kept = eg.InjectionLog.load(log.save(out.with_name("kept.jsonl")))
    assert kept.path == out.with_name("kept.jsonl")
    assert kept.path.read_bytes() == log.path.read_bytes()
    for ours, theirs in zip(kept.faults(), log.faults(), strict=True):
        assert ours == theirs
    for field in ("file", "out", "in_place", "format", "fault", "settings", "files", "left_out", "follows", "digest"):
        assert getattr(kept, field) == getattr(log, field), field
    assert kept.summary() == {**log.summary(), "log": str(kept.path)}
    assert kept.known_fault() == eg.BitFlip()


@sealed
def test_rot_at_rest_changes_the_data_and_leaves_the_checksum(kind: Kind, folder: Path) -> None:
    source = kind.make(folder)
    before = snapshot(folder)
    log = faults(source, in_place=True, stale_checksum=True)
    after = snapshot(folder)
    assert all(change.seals == () for change in log.files)
    assert flipped(before, after, log) == COUNT
    assert eg.verify(source).verdict is Check.FAILED
    for name in after:
        if after[name] != before[name] and zipfile.is_zipfile(folder / name) and not name.endswith(".distcp"):
            with zipfile.ZipFile(folder / name) as archive:
                assert archive.testzip() is not None, name
    eg.undo(log)
    assert snapshot(folder) == before


@unsealed
def test_without_checksums_rot_at_rest_is_the_same_as_an_error_in_memory(kind: Kind, folder: Path, out: Path) -> None:
    source = kind.make(folder)
    one, other = faults(source, out=out), faults(source, out=out.with_name("stale"), stale_checksum=True)
    assert contents(Path(other.out)) == contents(Path(one.out))


@compressed
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_rot_at_rest_of_compressed_data_is_refused(kind: Kind, in_place: bool, folder: Path, out: Path) -> None:
    source = kind.make(folder)
    before = snapshot(folder, logs=True)
    with pytest.raises(UsageError, match="checksum cannot be left stale") as caught:
        faults(source, stale_checksum=True, **({"in_place": True} if in_place else {"out": out}))
    assert "\n" not in str(caught.value)
    assert snapshot(folder, logs=True) == before
    assert list(out.parent.iterdir()) == []


def test_what_can_only_be_listed_is_refused(data: Path, out: Path) -> None:
    with pytest.raises(UnsupportedContent, match="can be listed, but not read or altered"):
        eg.inject(data / "orbax_zarr", eg.BitFlip(), count=1, out=out)
    assert list(out.parent.iterdir()) == []
