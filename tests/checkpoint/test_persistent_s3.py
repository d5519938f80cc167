"""The persistent tier on a real S3 server, through a network that fails."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from s3_server import SECRET, Fault, Proxy, s3_server

from evergrad.checkpoint.agent.pipeline import DigestModule
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.tiers import Persistent, Site, Tier, Work, object_store, persistent
from evergrad.checkpoint.tiers.persistent import PersistentStore
from evergrad.checkpoint.tiers.s3 import PARALLEL_PARTS, MultipartUpload
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError
from evergrad.testing import SharedTierContract, capture_shard

PART = 64 << 10
LARGE = 75_000  # floats: five parts
MIDDLE = 45_000  # three


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def s3(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The server, as new; small parts, and little waiting between two tries."""
    server.reset()
    monkeypatch.setattr(persistent, "MIN_PART_BYTES", PART)
    monkeypatch.setattr(object_store, "FIRST_WAIT_S", 0.01)
    return server


@pytest.fixture
def counted_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of patience nothing is spent but pauses, which take no time: requests may be as slow as they are."""
    now = [0.0]

    def pause(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(persistent, "Retry", partial(object_store.Retry, clock=lambda: now[0], sleep=pause))


def tier(s3: Proxy, folder: Path, **settings: Any) -> Persistent:
    return Persistent(
        f"s3://bucket/{folder.name}", **{"options": s3.options, "part_bytes": PART, "patience_s": 20} | settings
    )


def open_store(s3: Proxy, folder: Path, job: str = "job-1", **settings: Any) -> tuple[PersistentStore, Site]:
    site = Site(job, "n0", folder / "arenas", folder / "run")
    site.arenas.mkdir(exist_ok=True)
    store = tier(s3, folder, **settings).store(site)
    assert isinstance(store, PersistentStore)
    return store, site


def varied(work: Work) -> Work:
    """Another content for every part."""
    start = work.manifest.data_start
    work.shard[start:] = np.random.default_rng(7).bytes(len(work.shard) - start)
    work.manifest = replace(work.manifest, header="", digests={})
    DigestModule().run(work)
    return work


def put_all(store: PersistentStore, site: Site, version: Version, size: int = 1000) -> None:
    for rank in (0, 1):
        with capture_shard(site, version, rank, size=size) as work:
            store.put(work)


def is_whole(store: PersistentStore, version: Version, folder: Path) -> bool:
    copies = [copy for copy in store.find() if copy.version == version]
    for copy in copies:
        with Shard(store.fetch(copy, folder), "job-1") as shard:
            assert shard.verify() == []
    return len(copies) == 2


class TestS3(SharedTierContract):
    @pytest.fixture(autouse=True)
    def _reached(self, s3: Proxy) -> None:
        self.s3 = s3

    def make(self, folder: Path) -> Tier:
        return tier(self.s3, folder)


class TestS3Compressed(TestS3):
    def make(self, folder: Path) -> Tier:
        return tier(self.s3, folder, compress={"codec": "zstd", "level": 1})


def killed_in_the_middle(s3: Proxy, store: PersistentStore, work: Work, let_by: int) -> None:
    """Put in a process that is killed when so many uploads have gone by."""
    s3.let_by, s3.hold = let_by, threading.Event()
    work = replace(work, shard=memoryview(bytes(work.shard)))  # arenas do not go along into a fork
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        try:
            store.put(work)
        finally:
            os._exit(1)
    assert s3.held.wait(100)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    s3.reset()


def test_a_large_shard_goes_in_parts_and_comes_back(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    put_all(store, site, Version(1, 1), LARGE)
    assert s3.count()["upload_part"] == 10
    store.commit(Version(1, 1), 2)
    assert is_whole(store, Version(1, 1), tmp_path / "fetched")


def test_a_killed_multipart_upload_is_taken_up_again_by_another_process(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    with capture_shard(site, Version(1, 1), 0, size=LARGE) as work:
        varied(work)
        killed_in_the_middle(s3, store, work, let_by=3)
        assert store.begun() == []
        s3.reset()
        store.put(work)
        sent = [request for request in s3.requests if request.kind == "upload_part"]
        assert len(sent) == 2
        assert s3.sent_bytes() < len(work.shard)
        assert bytes(store._bucket.read("v0000000001-01/rank-00000.safetensors")) == bytes(work.shard)
    assert s3.count()["create_upload"] == 0


def test_parts_of_other_bytes_are_sent_again(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    with capture_shard(site, Version(1, 1), 0, size=LARGE) as work:
        killed_in_the_middle(s3, store, work, let_by=3)
        varied(work)
        store.put(work)
        assert s3.count()["upload_part"] == 5
        assert bytes(store._bucket.read("v0000000001-01/rank-00000.safetensors")) == bytes(work.shard)


def test_a_killed_plain_upload_leaves_nothing_and_is_made_again(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    store._claim()
    with capture_shard(site, Version(1, 1), 0) as work:
        killed_in_the_middle(s3, store, work, let_by=0)
        assert store._bucket.items("v0000000001-01") == []
        store.put(work)
        assert [copy.rank for copy in store.begun()] == [0]


def put_alone(store: PersistentStore, site: Site, size: int) -> None:
    """A version of a job with one rank."""
    with capture_shard(site, Version(1, 1), 0, size=size) as work:
        work.manifest = replace(work.manifest, world_size=1)
        store.put(work)


@pytest.mark.parametrize(("how", "first", "stride"), [("503", 1, 2), ("cut", 2, 2), ("lost", 1, 1)])
def test_whichever_request_fails_the_version_is_there_in_the_end(
    s3: Proxy, tmp_path: Path, how: str, first: int, stride: int
) -> None:
    store, site = open_store(s3, tmp_path)
    put_alone(store, site, MIDDLE)
    store.commit(Version(1, 1), 1)
    assert s3.count()["upload_part"] == 3
    total = len(s3.requests)
    for number in range(first, total + 1, stride):
        s3.reset()
        folder = tmp_path / f"{how}-{number}"
        folder.mkdir()
        store, site = open_store(s3, folder)
        s3.faults = [Fault(number, how)]
        put_alone(store, site, MIDDLE)
        fresh, _ = open_store(s3, folder)
        assert fresh.find() == []
        store.commit(Version(1, 1), 1)
        assert len(s3.requests) > total, "nothing failed"
        (copy,) = fresh.find()
        with Shard(fresh.fetch(copy, folder / "fetched"), "job-1") as shard:
            assert shard.verify() == []


@pytest.mark.parametrize("how", ["503", "cut", "lost"])
def test_a_plain_upload_that_fails_is_made_again(s3: Proxy, tmp_path: Path, how: str) -> None:
    store, site = open_store(s3, tmp_path)
    s3.faults = [Fault(2, how, "put")]
    put_all(store, site, Version(1, 1))
    store.commit(Version(1, 1), 2)
    assert [request.path.rpartition("/")[2] for request in s3.requests if request.kind == "put"][1:3] == [
        "rank-00000.safetensors",
        "rank-00000.safetensors",
    ]
    assert is_whole(store, Version(1, 1), tmp_path / "fetched")


@pytest.mark.parametrize("how", ["500", "cut", "short"])
def test_whichever_request_of_a_restore_fails_all_of_it_is_read(s3: Proxy, tmp_path: Path, how: str) -> None:
    store, site = open_store(s3, tmp_path)
    put_all(store, site, Version(1, 1))
    store.commit(Version(1, 1), 2)
    s3.reset()
    assert is_whole(open_store(s3, tmp_path)[0], Version(1, 1), tmp_path / "fetched")
    for number in range(1, len(s3.requests) + 1):
        s3.reset()
        s3.faults = [Fault(number, how)]
        assert is_whole(open_store(s3, tmp_path)[0], Version(1, 1), tmp_path / str(number))


def test_without_patience_a_failure_shows_nothing_and_the_next_try_all(s3: Proxy, tmp_path: Path) -> None:
    for number in range(1, 11):  # the requests up to and with that for COMMIT.json
        s3.reset()
        folder = tmp_path / str(number)
        folder.mkdir()
        store, site = open_store(s3, folder, patience_s=0)
        s3.faults = [Fault(number, "503")]
        with pytest.raises(TierError, match=r"s3://bucket/\d+: \w+"):
            put_alone(store, site, 1000)
            store.commit(Version(1, 1), 1)
        assert store.find() == []
        put_alone(store, site, 1000)
        store.commit(Version(1, 1), 1)
        assert [copy.rank for copy in store.find()] == [0]


@pytest.mark.usefixtures("counted_pauses")
def test_what_does_not_pass_ends_with_what_where_and_how_often(
    s3: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = open_store(s3, tmp_path, patience_s=0.2)
    s3.faults = [Fault(number, "503") for number in range(1, 200)]
    with caplog.at_level(logging.WARNING), pytest.raises(TierError) as caught:
        store.find()
    assert f"s3://bucket/{tmp_path.name}: listing versions: " in str(caught.value)
    tries = len(s3.requests)
    assert f"tried {tries} times" in str(caught.value)
    told = [record for record in caplog.records if "trying again" in record.message]
    assert len(told) == tries - 1 >= 1


def test_a_bucket_that_is_not_there_is_said_at_once(s3: Proxy, tmp_path: Path) -> None:
    site = Site("job-1", "n0", tmp_path, tmp_path)
    store = Persistent("s3://nowhere/x", options=s3.options).store(site)
    with pytest.raises(TierError, match="there is no bucket 'nowhere'"):
        store.find()
    assert len(s3.requests) == 1


@pytest.mark.usefixtures("counted_pauses")
def test_no_message_shows_a_secret(s3: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = s3.options | {"client_kwargs": {"endpoint_url": "http://127.0.0.1:1"}}
    chosen = Persistent("s3://bucket/x", options=options, patience_s=0.5)
    store = chosen.store(Site("job-1", "n0", tmp_path, tmp_path))
    with caplog.at_level(logging.DEBUG, "evergrad"), pytest.raises(TierError) as caught:
        store.find()
    for text in (str(caught.value), caplog.text, repr(chosen)):
        assert SECRET not in text
        assert "AKIAEXAMPLE" not in text
    assert "trying again" in caplog.text


def test_nothing_that_is_stored_holds_a_secret(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    for rank in (0, 1):
        with capture_shard(site, Version(1, 1), rank) as work:
            work.manifest = replace(work.manifest, owed=[tier(s3, tmp_path).to_json()])
            store.put(work)
    store.commit(Version(1, 1), 2)
    items = store._bucket.items("v0000000001-01")
    assert len(items) == 5
    for item in items:
        assert SECRET.encode() not in store._bucket.read(f"v0000000001-01/{item.name}")


def test_looking_for_versions_costs_one_request_each_however_many_ranks(s3: Proxy, tmp_path: Path) -> None:
    costs = {}
    store, site = open_store(s3, tmp_path)
    for step in range(1, 10):
        put_all(store, site, Version(step, 1), 16)
        store.commit(Version(step, 1), 2)
        if step in (3, 9):
            fresh, _ = open_store(s3, tmp_path)
            s3.reset()
            assert len(fresh.find()) == 2 * step
            costs[step] = len(s3.requests)
            assert len(fresh.find(1)) == step
            assert len(s3.requests) == costs[step] + 1, "known records are not read again"
            fresh.read_manifest(fresh.find(0)[0], digests=False)
            assert len(s3.requests) == costs[step] + 2
    assert costs == {3: 4, 9: 10}


def test_uploads_that_nobody_will_finish_are_aborted(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    for version in (Version(1, 1), Version(2, 1), Version(1, 2)):
        with capture_shard(site, version, 0, size=LARGE) as work:
            killed_in_the_middle(s3, store, work, let_by=2)
    put_all(store, site, Version(2, 1))
    s3.reset()
    store.commit(Version(2, 1), 2)
    assert s3.count()["abort"] == 2  # one was of this version, and was overtaken; that of a later attempt may go on
    left = store._bucket.call("", "list_multipart_uploads", None, Prefix=f"{tmp_path.name}/").get("Uploads", [])
    assert [row["Key"].split("/")[1] for row in left] == ["v0000000001-02"]


def test_a_version_that_another_node_drops_meanwhile_is_said_to_be_gone(s3: Proxy, tmp_path: Path) -> None:
    store, site = open_store(s3, tmp_path)
    put_all(store, site, Version(1, 1))
    store.commit(Version(1, 1), 2)
    copies = store.find()
    other, _ = open_store(s3, tmp_path)
    for copy in copies:
        other.drop(copy)
    with pytest.raises(TierError, match="gone"):
        store.fetch(copies[0], tmp_path / "fetched")
    assert store.find() == []


def test_no_more_parts_are_in_memory_than_are_sent_at_a_time() -> None:
    class Calls:
        def __init__(self) -> None:
            self.begun = self.ended = self.most = 0
            self.lock = threading.Lock()

        def call(self, what: str, method: str, name: str | None, **arguments: Any) -> dict[str, Any]:
            if method == "upload_part":
                threading.Event().wait(0.002)
                with self.lock:
                    self.ended += 1
            return {"UploadId": "u", "ETag": "e"}

        def key(self, name: str) -> str:
            return name

        def await_bandwidth(self, size_bytes: int) -> None:
            """Free."""

        def parts(self) -> Iterator[bytes]:
            for _ in range(30):
                with self.lock:
                    self.begun += 1
                    self.most = max(self.most, self.begun - self.ended)
                yield bytes(10)

    calls = Calls()
    slots = threading.BoundedSemaphore(PARALLEL_PARTS)
    assert MultipartUpload.begin(calls, "x").send(calls.parts(), slots) == 300
    assert calls.most <= PARALLEL_PARTS
