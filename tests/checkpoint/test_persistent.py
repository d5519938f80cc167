"""The persistent tier on a shared file system and in memory: order, ownership, retention, settings."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.tiers import Persistent, Site, Tier, read_tiers
from evergrad.checkpoint.tiers.base import Redaction
from evergrad.checkpoint.tiers.commits import CommitRecord
from evergrad.checkpoint.tiers.object_store import Retry, Throttle, parse_bandwidth
from evergrad.checkpoint.tiers.persistent import PersistentStore
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, TierError, UsageError
from evergrad.testing import FullStorage, SharedTierContract, StorageCalls, capture_shard, kill_after
from evergrad.wording import install_hint
from unprivileged import Unprivileged

ZSTD = {"codec": "zstd", "level": 1}


class TestSharedFolder(SharedTierContract):
    def make(self, folder: Path) -> Tier:
        return Persistent(str(folder / "shared" / "r50"))


class TestSharedFolderCompressed(SharedTierContract):
    def make(self, folder: Path) -> Tier:
        return Persistent(f"file://{folder}/shared", compress=ZSTD)


class TestAnyFileSystem(SharedTierContract):
    """What fsspec knows, by its general calls."""

    def make(self, folder: Path) -> Tier:
        return Persistent(f"memory://{folder.name}/{folder.stat().st_ino}")


def open_store(folder: Path, job: str = "job-1", **settings: Any) -> tuple[PersistentStore, Site]:
    site = Site(job, "n0", folder / "arenas", folder / "run")
    site.arenas.mkdir(exist_ok=True)
    store = Persistent(str(folder / "shared"), **settings).store(site)
    assert isinstance(store, PersistentStore)
    return store, site


def put_all(store: PersistentStore, site: Site, version: Version, *, commit: bool = True) -> None:
    for rank in (0, 1):
        with capture_shard(site, version, rank) as work:
            store.put(work)
    if commit:
        store.commit(version, 2)


def in_a_child(work: Callable[[], None]) -> int:
    """How a process ended that did this."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("compress", [None, ZSTD], ids=["plain", "zstd"])
def test_killed_after_any_storage_call_the_version_is_all_there_or_not_at_all(
    shm: Path, compress: dict[str, Any] | None
) -> None:
    number, seen = 0, set()
    while True:
        number += 1 if compress is None else 3
        folder = shm / str(number)
        folder.mkdir()
        store, site = open_store(folder, compress=compress)

        def save() -> None:
            with kill_after(number, below=folder / "shared"):  # noqa: B023
                put_all(store, site, Version(1, 1))  # noqa: B023

        ended = in_a_child(save)
        there = open_store(folder)[0].find()
        seen.add(len(there))
        assert len(there) in (0, 2)
        put_all(store, site, Version(1, 1))
        for copy in store.find():
            with Shard(store.fetch(copy, folder / "fetched"), "job-1") as shard:
                assert shard.verify() == []
        put_all(store, site, Version(2, 1))
        for copy in store.find():
            if copy.version == Version(1, 1):
                store.drop(copy)
        put_all(store, site, Version(3, 1))
        left = {path.name for path in (folder / "shared").iterdir() if not path.name.startswith(".JOB")}
        assert left == {"JOB.json", "v0000000002-01", "v0000000003-01"}, f"after call {number}"
        if ended == 0:
            break
        assert ended == signal.SIGKILL
    assert seen == {0, 2}
    assert number > 20


def test_killed_while_it_drops_a_version_is_not_seen_again(shm: Path) -> None:
    number = 0
    while True:
        number += 1
        folder = shm / str(number)
        folder.mkdir()
        store, site = open_store(folder)
        put_all(store, site, Version(1, 1))

        def drop() -> None:
            copies = store.find()  # noqa: B023
            with kill_after(number, below=folder / "shared"):  # noqa: B023
                for copy in copies:
                    store.drop(copy)  # noqa: B023

        ended = in_a_child(drop)
        assert store.find() == []
        put_all(store, site, Version(2, 1))
        assert sorted(path.name for path in (folder / "shared").iterdir()) == ["JOB.json", "v0000000002-01"]
        if ended == 0:
            break
    assert number > 8


def test_another_job_may_read_and_not_write(tmp_path: Path) -> None:
    ours, site = open_store(tmp_path)
    put_all(ours, site, Version(1, 1))
    theirs, their_site = open_store(tmp_path, "job-2")
    theirs.check()
    assert theirs.owner() == "job-1"
    copy, _ = theirs.find()
    assert theirs.read_manifest(copy).job == theirs.read_manifest(copy, digests=False).job == "job-1"
    assert theirs.fetch(copy, tmp_path / "fetched").shard.exists()
    refused = pytest.raises(TierError, match="belongs to job job-1: choose another URL, or adopt=True")
    with capture_shard(their_site, Version(2, 1), 0) as work, refused:
        theirs.put(work)
    with pytest.raises(TierError, match="belongs to job job-1"):
        theirs.commit(Version(1, 1), 2)
    with pytest.raises(TierError, match="belongs to job job-1"):
        theirs.drop(copy)
    assert len(ours.find()) == 2


def test_adopting_takes_the_place_over_and_leaves_the_versions_that_are_there(tmp_path: Path) -> None:
    ours, site = open_store(tmp_path)
    put_all(ours, site, Version(1, 1))
    put_all(ours, site, Version(2, 1), commit=False)
    theirs, their_site = open_store(tmp_path, "job-2", adopt=True)
    put_all(theirs, their_site, Version(3, 1))
    assert theirs.owner() == "job-2"
    assert [copy.version.step for copy in theirs.find(0)] == [1, 3]
    assert [copy.version.step for copy in theirs.begun(0)] == [2]
    later, site = open_store(tmp_path)
    with capture_shard(site, Version(4, 1), 0) as work, pytest.raises(TierError, match="belongs to job job-2"):
        later.put(work)


def test_another_capture_of_the_same_version_is_refused(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1))
    refused = pytest.raises(TierError, match="is there already, and is not what was captured now")
    with capture_shard(site, Version(1, 1), 0, value=9.0) as work, refused:
        store.put(work)
    (copy,) = store.find(0)
    with Shard(copy, "job-1") as shard:
        assert shard.verify() == []
        assert bool((shard.tensor("a") == 0.0).all())


def test_a_lost_payload_is_stored_again(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1), commit=False)
    payload = tmp_path / "shared/v0000000001-01/rank-00000.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    with pytest.raises(TierError, match="bytes, and not"):
        store.commit(Version(1, 1), 2)
    put_all(store, site, Version(1, 1))
    assert len(store.find()) == 2


def test_what_crashes_left_goes_when_a_newer_version_is_committed(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    for version in (Version(1, 1), Version(2, 1)):
        put_all(store, site, version, commit=version.step == 1)
    put_all(store, site, Version(1, 2), commit=False)  # another attempt: newer, and perhaps running
    partial = tmp_path / "shared/v0000000002-01/.rank-00001.safetensors.partial"
    partial.write_bytes(b"half")
    put_all(store, site, Version(3, 1))
    names = sorted(path.name for path in (tmp_path / "shared").iterdir())
    assert names == ["JOB.json", "v0000000001-01", "v0000000001-02", "v0000000003-01"]


def test_the_record_of_a_version_is_the_same_whoever_writes_it(tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        store, site = open_store(folder)
        put_all(store, site, Version(1, 1))
        texts.append((folder / "shared/v0000000001-01/COMMIT.json").read_bytes())
    assert texts[0] == texts[1]
    record = json.loads(texts[0])
    assert next(iter(record)) == "check"
    assert [shard["rank"] for shard in record["shards"]] == [0, 1]
    assert CommitRecord.from_bytes(texts[0], "x", Version(1, 1)).to_bytes() == texts[0]


def test_a_damaged_record_hides_its_version_and_says_so(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1))
    put_all(store, site, Version(2, 1))
    path = tmp_path / "shared/v0000000002-01/COMMIT.json"
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert [copy.version.step for copy in store.find(0)] == [1]
    assert store.torn(0)[Version(2, 1)].was_complete
    path.write_bytes(good[:-9])
    assert [copy.version.step for copy in store.find(0)] == [1]
    store.commit(Version(2, 1), 2)
    assert path.read_bytes() == good


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1))
    data = (tmp_path / "shared/v0000000001-01/COMMIT.json").read_bytes()
    with pytest.raises(DamagedFile, match="of another version"):
        CommitRecord.from_bytes(data, "x", Version(2, 1))


def test_a_manifest_that_was_changed_after_the_commit_is_noticed(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1))
    put_all(store, site, Version(1, 2))
    folder = tmp_path / "shared"
    other = (folder / "v0000000001-02/rank-00000.json").read_bytes()
    (folder / "v0000000001-01/rank-00000.json").write_bytes(other)
    copy = store.find(0)[0]
    with pytest.raises(DamagedFile, match="not what was committed"):
        store.read_manifest(copy)


def test_several_processes_that_want_one_shard_download_it_once(tmp_path: Path) -> None:
    store, site = open_store(tmp_path, compress=ZSTD)
    put_all(store, site, Version(1, 1))
    (copy,) = store.find(0)
    fetched: list[Path] = []
    with StorageCalls(below=tmp_path / "fetched") as calls:
        threads = [
            threading.Thread(target=lambda: fetched.append(store.fetch(copy, tmp_path / "fetched").shard))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(fetched) == 4
    assert len(set(fetched)) == 1
    assert [call.name for call in calls.calls].count("rename") == 2  # the shard, and its manifest
    with Shard(replace(copy, shard=fetched[0], manifest=fetched[0].with_suffix(".json")), "job-1") as shard:
        assert shard.verify() == []
    assert sorted(path.name for path in fetched[0].parent.iterdir() if not path.name.endswith(".lock")) == [
        "rank-00000.json",
        "rank-00000.safetensors",
    ]


def test_a_file_on_a_shared_file_system_is_used_where_it_lies(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1))
    (copy,) = store.find(0)
    assert store.fetch(copy, tmp_path / "fetched") is copy
    assert copy.shard == tmp_path / "shared/v0000000001-01/rank-00000.safetensors"


def test_a_packed_file_that_is_rubbish_is_said_to_be(tmp_path: Path) -> None:
    store, site = open_store(tmp_path, compress=ZSTD)
    put_all(store, site, Version(1, 1))
    (copy,) = store.find(0)
    copy.shard.write_bytes(os.urandom(500))
    with pytest.raises(DamagedFile, match="not a frame"):
        store.fetch(copy, tmp_path / "fetched")
    assert not list((tmp_path / "fetched").rglob("*.safetensors"))


def test_a_full_disk_is_said_at_once_and_keeps_nothing_of_the_try(tmp_path: Path) -> None:
    store, site = open_store(tmp_path)
    put_all(store, site, Version(1, 1))
    full = FullStorage(10_000, below=tmp_path / "shared")
    with (
        capture_shard(site, Version(2, 1), 0) as work,
        full,
        pytest.raises(TierError, match=r"No space.*Free some space"),
    ):
        store.put(work)
    assert not list((tmp_path / "shared").rglob(".*.partial"))
    put_all(store, site, Version(2, 1))
    assert len(store.find(0)) == 2


def test_the_first_save_and_every_nth_after_it_are_due() -> None:
    assert [count for count in range(7) if Persistent("/a", every=3).is_due(count)] == [0, 3, 6]


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "relative/path"},
        {"url": "file://relative"},
        {"url": "s3://"},
        {"url": "nosuch://x"},
        {"url": "/a", "every": 0},
        {"url": "/a", "keep": 0},
        {"url": "/a", "bandwidth": "fast"},
        {"url": "/a", "bandwidth": 0},
        {"url": "/a", "part_bytes": 1000},
        {"url": "/a", "patience_s": -1},
        {"url": "/a", "options": {"x": object()}},
        {"url": "/a", "compress": {"codec": "lz4"}},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read_tiers([{"kind": "persistent", **settings}])


def test_settings_have_one_spelling_and_survive_json() -> None:
    one = Persistent(Path("/shared//r50/"), bandwidth="50 MB/s", options={"a": {"b": 1}})  # type: ignore[arg-type]
    assert one.url == "file:///shared/r50"
    assert one.bandwidth == parse_bandwidth("50 MB/s") == 50e6
    assert read_tiers([json.loads(json.dumps(one.to_json()))]) == [one]
    assert len({one, Persistent("file:///shared/r50", bandwidth=50e6, options={"a": {"b": 1}})}) == 1


def test_a_missing_library_is_named_with_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from pathlib import Path\n"
        "from evergrad.checkpoint.tiers import Persistent, Site\n"
        "store = Persistent('s3://bucket/x').store(Site('j', 'n', Path('/'), Path('/')))\n"
        "try: store.check()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"TierError s3://bucket/x: needs the library s3fs: {install_hint('s3')}" in done.stdout


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Persistent(str(tmp_path / "file" / "x")).store(Site("j", "n", tmp_path, tmp_path))
    with pytest.raises(TierError, match="is no folder"):
        store.check()


def test_a_folder_that_this_user_may_not_write_is_refused_with_the_reason(unprivileged: Unprivileged) -> None:
    site = Site("job", "n0", unprivileged.folder, unprivileged.folder)
    store = Persistent(str(unprivileged.folder / "shared")).store(site)
    with (
        unprivileged,
        pytest.raises(TierError, match=rf"^{unprivileged.folder}: .*cannot be written to: permission denied$"),
    ):
        store.check()


def test_a_read_only_file_system_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Persistent(str(tmp_path / "shared")).store(Site("job", "n0", tmp_path, tmp_path))
    found = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*found[:8], found.f_flag | os.ST_RDONLY, found.f_namemax])
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    with pytest.raises(TierError, match=rf"^{tmp_path}: .*cannot be written to: read-only file system$"):
        store.check()


def test_uploads_stay_below_the_bandwidth() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    throttle = Throttle(1000.0, clock=lambda: now[0], sleep=sleep)
    for _ in range(10):
        throttle.acquire(500)
    assert now[0] == pytest.approx(4.5)  # the last one is paid for by what comes next
    now[0] += 100
    throttle.acquire(500)
    assert now[0] == pytest.approx(104.5), "what was not used is not saved up"


def test_a_tier_with_a_bandwidth_pays_for_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, site = open_store(tmp_path, bandwidth=1e12)
    paid: list[int] = []
    monkeypatch.setattr(store._bucket.access.throttle, "acquire", paid.append)
    with capture_shard(site, Version(1, 1), 0) as work:
        store.put(work)
        assert sum(paid) == len(work.shard)


def test_trying_again_ends_with_patience() -> None:
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        waits.append(seconds)

    def fail() -> None:
        raise ConnectionResetError("reset by hunter22")

    retry = Retry("s3://b", 60.0, Redaction({"password": "hunter22"}), clock=lambda: now[0], sleep=sleep)
    with pytest.raises(TierError, match=r"s3://b: reading x: reset by \*\*\* \(tried \d+ times\)"):
        retry("reading x", fail)
    assert 30 < now[0] <= 60
    assert 5 < len(waits) < 30
    assert waits[1] < waits[-1] <= 10


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        *(
            OSError(number, os.strerror(number))
            for number in (
                errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM,
                errno.EROFS,
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_pass_is_not_tried_again(error: Exception) -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        raise error

    with pytest.raises(TierError):
        Retry("x", 60.0, Redaction())("reading", fail)
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            errno.EMFILE,
            r"Too many open files in this process: its limit is \d+\. Raise it \(ulimit -n\), or close some\.$",
        ),
        (errno.ENFILE, r"too many open files in system on this machine: raise fs\.file-max, or close some\.$"),
    ],
)
def test_too_many_open_files_do_not_pass_and_are_said_with_the_limit(number: int, said: str) -> None:
    tried = []

    def fail() -> None:
        tried.append(1)
        raise OSError(number, os.strerror(number))

    with pytest.raises(TierError, match=f"(?i)x: reading: {said}"):
        Retry("x", 60.0, Redaction())("reading", fail)
    assert len(tried) == 1


def test_what_is_missing_is_for_the_caller_to_judge() -> None:
    def fail() -> None:
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError):
        Retry("x", 60.0, Redaction())("reading", fail)


def test_passwords_in_urls_are_not_shown() -> None:
    tier = Persistent("ftp://me:hunter22@host/x", options={"password": "secret99"})
    assert "hunter22" not in repr(tier)
    assert "secret99" not in repr(tier)
    store = tier.store(Site("j", "n", Path("/"), Path("/")))
    assert isinstance(store, PersistentStore)
    assert store._bucket.where == "ftp://***@host/x"
