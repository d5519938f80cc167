"""What is owed, retired, announced and noted when something on the way fails: one process, no agent."""

from __future__ import annotations

import errno
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from s3_jobs import Trainer, holds, state, until

import evergrad as eg
from evergrad import _files
from evergrad.checkpoint.agent.client import ThreadClient
from evergrad.checkpoint.agent.inventory import CompletionLog
from evergrad.checkpoint.capture.capture import CaptureInFlight, _finish
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Work
from evergrad.checkpoint.tiers.commits import CommitIndex
from evergrad.checkpoint.tiers.object_store import PosixBucket
from evergrad.checkpoint.tiers.persistent import PersistentStore
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError, FileAccessError, SaveRefused, TierError

SECONDS = 100.0
PASSWORD = "hunter2-not-to-be-shown"


class Disks:
    """The folders of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"

    def tiers(self, *, keep: int = 2, every: int = 1) -> list[Any]:
        bucket = eg.Persistent(f"file://{self.folder}/bucket", every=every, keep=9)
        return [eg.Memory(), eg.Local(self.folder / "disk", keep=keep), bucket]

    @contextmanager
    def checkpointer(self, tiers: list[Any], **settings: Any) -> Iterator[eg.Checkpointer]:
        with eg.Checkpointer(self.run, tiers=tiers, agent=False, **settings) as ck:
            yield ck

    def on_disk(self) -> list[int]:
        return sorted(int(path.parent.name[1:11]) for path in self.folder.glob("disk/*/*/v*/rank-00000.json"))

    def committed(self) -> list[int]:
        return sorted(int(path.parent.name[1:11]) for path in self.folder.glob("bucket/v*/COMMIT.json"))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


def leave_owing(disks: Disks, tiers: list[Any], shm: Path) -> None:
    """A trainer saves step 10 and is killed while that is uploaded; then its machine starts again."""

    def train() -> None:
        PersistentStore.put = lambda self, work: threading.Event().wait()  # type: ignore[method-assign, assignment]
        ck = eg.Checkpointer(disks.run, tiers=tiers, agent=False)
        ck.save(10, state(10)).wait("local", timeout=SECONDS)
        (disks.folder / "saved").touch()
        signal.pause()

    trainer = Trainer.start(train)
    until((disks.folder / "saved").exists)
    trainer.kill()
    for path in [path for path in shm.rglob("*") if path.is_file()]:
        path.unlink()
    (record,) = disks.folder.glob("disk/*/*/v*/rank-00000.json")
    assert [spec["kind"] for spec in Manifest.read(record).owed] == ["persistent"]
    assert disks.committed() == []


# --- a new attempt that cannot begin ------------------------------------------------------------------------------


def test_a_new_attempt_that_cannot_begin_leaves_no_way_to_save_a_version_twice(disks: Disks, shm: Path) -> None:
    tiers = [eg.Memory(), eg.Local(disks.folder / "disk", keep=9)]
    attempts, away = disks.run / "attempts", disks.run / "away"
    with disks.checkpointer(tiers) as ck:
        first = ck.save(20, state(1)).wait(timeout=SECONDS)
        attempts.rename(away)
        attempts.touch()  # nobody can write there, root included
        with pytest.raises(EvergradError):
            ck.save(20, state(2))
        attempts.unlink()
        away.rename(attempts)
        again = ck.save(20, state(3)).wait(timeout=SECONDS)
    assert again != first
    for path in [path for path in shm.rglob("*") if path.is_file()]:
        path.unlink()
    with disks.checkpointer(tiers) as ck:
        for version, value in ((first, 1), (again, 3)):
            live = state(0)
            assert ck.restore(live, version=version) == 20
            assert holds(live, value)


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (errno.ENOSPC, "no space left on device. Free room on that disk: the run folder needs a few KB."),
        (errno.EROFS, "read-only file system. Make the run folder writable."),
    ],
)
def test_a_restarted_job_that_cannot_note_its_attempt_says_how_to_go_on_and_captures_nothing(
    disks: Disks, shm: Path, monkeypatch: pytest.MonkeyPatch, number: int, line: str, agent: bool
) -> None:
    def refuse(path: Path) -> None:
        if path.parent.name == "attempts":
            raise OSError(number, os.strerror(number), str(path))

    tiers = [eg.Memory(), eg.Local(disks.folder / "disk", keep=9)]
    with eg.Checkpointer(disks.run, tiers=tiers, agent=agent) as ck:
        ck.save(10, state(1)).wait(timeout=SECONDS)
    with eg.Checkpointer(disks.run, tiers=tiers, agent=agent) as ck:
        live = state(0)
        assert ck.restore(live) == 10
        with monkeypatch.context() as patched:
            patched.setattr(_files, "fsync_path", refuse)
            path = disks.run / "attempts" / "00002.json"
            for _ in range(2):
                with pytest.raises(FileAccessError) as caught:
                    ck.save(20, state(2))
                assert str(caught.value) == f"{path}: a new attempt cannot be noted: {line}"
            assert ck.restore(live) == 10
        assert ck.save(20, state(3)).wait(timeout=SECONDS).attempt == 2
        assert ck.restore(live) == 20
        assert holds(live, 3)


# --- modules and slow tiers ---------------------------------------------------------------------------------------


class Noting:
    """A user's link in the chain."""

    def __init__(self, after: str) -> None:
        self.name, self.after = "noting", after
        self.steps: list[int] = []

    def run(self, work: Work) -> None:
        self.steps.append(work.version.step)


def test_a_module_after_a_tier_that_is_not_due_is_left_out_and_nothing_fails(disks: Disks) -> None:
    noting = Noting("persistent")
    with disks.checkpointer(disks.tiers(keep=9, every=2), modules=[noting]) as ck:
        for step in (10, 20, 30):
            pending = ck.save(step, state(step))  # a warning would say what failed, and is an error here
            pending.wait("local", timeout=SECONDS)
            if step != 20:
                pending.wait("persistent", timeout=SECONDS)
    assert noting.steps == [10, 30]
    assert (disks.on_disk(), disks.committed()) == ([10, 20, 30], [10, 30])


def test_an_owed_flush_does_not_stumble_over_a_module_of_a_near_tier(
    disks: Disks, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers, noting = disks.tiers(every=10), Noting("local")
    leave_owing(disks, tiers, shm)
    with caplog.at_level(logging.ERROR), disks.checkpointer(tiers, modules=[noting]) as ck:
        live = state(0)
        assert ck.restore(live) == 10
        assert holds(live, 10)
        ck.save(11, state(11)).wait("persistent", timeout=SECONDS)
        ck.save(12, state(12)).wait("local", timeout=SECONDS)
    assert caplog.messages == []
    assert 11 in disks.committed()
    assert noting.steps == [11, 12]


# --- what is retired, and what is not -----------------------------------------------------------------------------


def test_a_copy_that_owes_a_flush_stays_while_the_slow_tier_is_away(
    disks: Disks, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = disks.tiers(keep=1, every=10)
    leave_owing(disks, tiers, shm)
    back, find = threading.Event(), PersistentStore.find

    def away(self: PersistentStore, rank: int | None = None) -> list[Any]:
        if threading.current_thread().name.startswith("evergrad-flush"):
            back.wait()
        return find(self, rank)

    monkeypatch.setattr(PersistentStore, "find", away)
    monkeypatch.setattr(eg.Persistent, "is_due", lambda self, count: False)
    with disks.checkpointer(tiers) as ck:
        try:
            for step in (11, 12, 13):
                ck.save(step, state(step)).wait("local", timeout=SECONDS)
            assert disks.on_disk() == [10, 13], "one is kept, and the one that is still to be flushed"
        finally:
            back.set()  # or closing would wait for it
        until(lambda: disks.committed() == [10])
        ck.save(14, state(14)).wait("local", timeout=SECONDS)
        until(lambda: disks.on_disk() == [14])  # nothing is owed any more
    with eg.Checkpointer(disks.folder / "other", agent=False) as ck:
        live = state(0)
        assert ck.restore(live, source=f"file://{disks.folder}/bucket") == 10
        assert holds(live, 10)


def test_while_a_tag_cannot_be_read_nothing_is_retired(disks: Disks, caplog: pytest.LogCaptureFixture) -> None:
    tag = disks.run / "catalogue" / "tags" / "best.json"
    with disks.checkpointer(disks.tiers(keep=1)[:2]) as ck:
        first = ck.save(1, state(1)).wait(timeout=SECONDS)
        Pins(disks.run).tag(first, "best")
        assert tag.is_file()
        tag.rename(tag.with_suffix(".away"))
        tag.mkdir()  # what is there cannot be read, by root neither
        for step in (2, 3):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        assert disks.on_disk() == [1, 2, 3]
        assert any("nothing is retired, because what is pinned is not known" in line for line in caplog.messages)
        tag.rmdir()
        tag.with_suffix(".away").rename(tag)
        ck.save(4, state(4)).wait(timeout=SECONDS)
        until(lambda: disks.on_disk() == [1, 4])


# --- captures that end in another thread --------------------------------------------------------------------------


class Captured:
    """A stand-in for an arena, or for copies that have ended."""

    def mark_captured(self, ticket: object) -> None:
        pass

    def wait(self) -> None:
        pass


def test_an_announcement_that_is_refused_does_not_stop_the_next_captures() -> None:
    told: list[tuple[str, str]] = []

    def announce(name: str, refused: int) -> Callable[[Exception | None], None]:
        def act(error: Exception | None) -> None:
            told.append((name, "" if error is None else str(error)))
            if len([each for each, _ in told if each == name]) <= refused:
                raise SaveRefused("attempt 1 of the job is over")

        return act

    flights: queue.SimpleQueue[CaptureInFlight | None] = queue.SimpleQueue()
    thread = threading.Thread(target=_finish, args=(flights,), daemon=True)
    thread.start()
    made = [
        CaptureInFlight(Captured(), None, Captured(), announce(name, refused))  # type: ignore[arg-type]
        for name, refused in (("once", 1), ("always", 9), ("never", 0))
    ]
    for flight in made:
        flights.put(flight)
    assert all(flight.ended.wait(SECONDS) for flight in made)
    assert thread.is_alive()
    flights.put(None)
    thread.join(SECONDS)
    assert not thread.is_alive()
    over = "attempt 1 of the job is over"
    assert told == [("once", ""), ("once", over), ("always", ""), ("always", over), ("never", "")]


# --- where things are, and what is noted of that ------------------------------------------------------------------


def files_with(word: str, *folders: Path) -> list[str]:
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if word.encode() in path.read_bytes() or word in str(path)]


def test_a_password_in_a_url_is_in_no_file_and_no_log(disks: Disks, caplog: pytest.LogCaptureFixture) -> None:
    url = f"memory://me:{PASSWORD}@host/{disks.folder.name}"
    tiers = [eg.Memory(), eg.Local(disks.folder / "disk"), eg.Persistent(url, patience_s=0)]
    with caplog.at_level(logging.INFO), disks.checkpointer(tiers) as ck:
        ck.save(10, state(10)).wait("persistent", timeout=SECONDS)
        live = state(0)
        assert ck.restore(live, version=10) == 10
    with caplog.at_level(logging.INFO), eg.Checkpointer(disks.folder / "next", tiers[:2], agent=False) as ck:
        assert ck.restore(live, source=url) == 10
        ck.save(11, state(11)).wait("local", timeout=SECONDS)
    records = [path.read_text() for name in ("run", "next") for path in (disks.folder / name / "attempts").glob("*")]
    assert len(records) == 2
    assert files_with(PASSWORD, disks.folder) == []
    assert PASSWORD not in caplog.text
    assert all(f"memory://host/{disks.folder.name}" in record for record in records), "the place itself is noted"


def test_an_owed_flush_finds_its_way_though_the_password_is_not_noted(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://me:{PASSWORD}@host/{disks.folder.name}"
    tiers = [eg.Local(disks.folder / "disk", keep=9), eg.Persistent(url, patience_s=0)]
    with pytest.MonkeyPatch.context() as patch, disks.checkpointer(tiers) as ck:
        patch.setattr(PersistentStore, "put", lambda self, work: os.stat("/nowhere/at/all"))
        pending = ck.save(10, state(10))
        pending.wait("local", timeout=SECONDS)
        with pytest.raises(TierError, match="/nowhere/at/all"):
            pending.wait("persistent", timeout=SECONDS)
    monkeypatch.setattr(eg.Persistent, "is_due", lambda self, count: False)
    with disks.checkpointer(tiers) as ck:
        ck.save(11, state(11)).wait("local", timeout=SECONDS)
    with eg.Checkpointer(disks.folder / "other", agent=False) as ck:
        live = state(0)
        assert ck.restore(live, source=url) == 10
        assert holds(live, 10)


def test_versions_under_a_path_that_an_earlier_attempt_used_are_found(disks: Disks) -> None:
    for step, name in ((10, "old"), (20, "new"), (30, "newest")):
        with disks.checkpointer([eg.Local(disks.folder / name)]) as ck:
            ck.save(step, state(step)).wait(timeout=SECONDS)
    with eg.Checkpointer(disks.folder / "other", agent=False) as ck:
        for asked, step in ((None, 30), (20, 20), (10, 10)):
            live = state(0)
            assert ck.restore(live, source=disks.run, version=asked) == step
            assert holds(live, step)


def test_a_record_that_another_node_wrote_first_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = PosixBucket.write

    def too_late(self: PosixBucket, name: str, data: bytes, **how: Any) -> None:
        write(self, name, data, **how)
        if name.endswith("COMMIT.json"):
            raise FileNotFoundError(name)

    monkeypatch.setattr(PosixBucket, "write", too_late)
    tiers = [eg.Local(tmp_path / "disk"), eg.Persistent(f"file://{tmp_path}/bucket")]
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        version = ck.save(10, {"x": torch.ones(3)}).wait("persistent", timeout=SECONDS)
    assert (tmp_path / "bucket" / version.name / "COMMIT.json").exists()


def test_a_listing_that_shows_another_nodes_shard_late_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, asked = CommitIndex.names, []

    def late(self: CommitIndex, version: Version) -> dict[str, int]:
        asked.append(version)
        return {} if len(asked) == 1 else names(self, version)

    monkeypatch.setattr(CommitIndex, "names", late)
    tiers = [eg.Local(tmp_path / "disk"), eg.Persistent(f"file://{tmp_path}/bucket")]
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        version = ck.save(10, {"x": torch.ones(3)}).wait("persistent", timeout=SECONDS)
    assert len(asked) >= 2
    assert (tmp_path / "bucket" / version.name / "COMMIT.json").exists()


def test_a_version_that_only_a_failure_is_known_of_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "complete").mkdir()
    books = CompletionLog(tmp_path, "n0")
    books.note(Version(10, 1), "persistent", 0, 0, "not committed: no such bucket")
    assert not books.is_complete(Version(10, 1), "persistent")
    assert books.complete() == []


def test_an_arena_is_kept_while_its_version_is_uploaded_and_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: PersistentStore, version: Version, world_size: int) -> None:
        raise TierError("no room for a record")

    tiers = [eg.Memory(), eg.Persistent(f"file://{tmp_path}/bucket", patience_s=0)]
    monkeypatch.setattr(PersistentStore, "commit", refused)
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        with pytest.raises(TierError, match="no room for a record"):
            ck.save(10, {"x": torch.ones(3)}).wait("persistent", timeout=SECONDS)
        live = {"x": torch.zeros(3)}
        assert isinstance(ck._client, ThreadClient)
        assert ck._client._pipeline is not None
        assert ck._client._pipeline.free_arenas(0) == {}, "the only copy may be overwritten"
        assert ck.restore(live) == 10
        assert live["x"].tolist() == [1.0, 1.0, 1.0]
