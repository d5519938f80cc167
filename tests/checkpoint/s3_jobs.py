"""Whole jobs that save to a real S3 server: their tiers, a trainer that can be killed, and somebody who looks on."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from s3_server import SECRET, Proxy

import evergrad as eg
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.tiers import Persistent, Site
from evergrad.checkpoint.tiers.persistent import PersistentStore

PATIENCE_S = 100


def state(value: float, size: int = 1000) -> dict[str, Any]:
    """Something to save that is different each time, in every part of it."""
    return {"a": torch.arange(size, dtype=torch.float32) + value * 1000, "epoch": int(value)}


def holds(found: dict[str, Any], value: float) -> bool:
    """Whether it is what was saved, bit for bit."""
    return torch.equal(found["a"], state(value, len(found["a"]))["a"]) and found["epoch"] == value


def until(so: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    """Wait for something that somebody else does."""
    end = time.monotonic() + patience_s
    while not so():
        assert time.monotonic() < end, "it never became so"
        time.sleep(0.05)


@dataclass(frozen=True)
class Trainer:
    """A forked process that trains until it is killed."""

    pid: int

    @classmethod
    def start(cls, act: Callable[[], None]) -> Trainer:
        """One that does this, and then stands still."""
        if (pid := os.fork()) == 0:
            try:
                torch.set_num_threads(1)  # the parent's other threads are not there
                signal.alarm(110)
                act()
                signal.pause()
            except BaseException:
                traceback.print_exc()
            os._exit(9)
        return cls(pid)

    def kill(self) -> None:
        """As a scheduler does."""
        os.kill(self.pid, signal.SIGKILL)
        assert os.waitpid(self.pid, 0)[1] == signal.SIGKILL


@dataclass(frozen=True)
class Bucket:
    """What one test has in the bucket, seen past the proxy: looking disturbs no count and no fault."""

    s3: Proxy
    folder: Path
    name: str = ""

    @property
    def url(self) -> str:
        """Where a job of this test saves to."""
        return f"s3://bucket/{self.folder.name}{self.name}"

    def tier(self, **settings: Any) -> Persistent:
        """The tier, through the proxy; trying again begins soon enough, and ends before the test does."""
        return Persistent(self.url, **{"options": self.s3.options, "patience_s": 20} | settings)

    def tiers(self, **settings: Any) -> list[Any]:
        """All tiers of a job."""
        return [eg.Memory(), eg.Local(self.folder / "disk"), self.tier(**settings)]

    def objects(self) -> dict[str, bytes]:
        """Every object, by its name below the URL."""
        return {name: self.store()._bucket.read(name) for name in self.names()}

    def names(self) -> list[str]:
        """Every object's name below the URL."""
        found = []
        look = self.store()._bucket
        for item in look.items():
            found += [f"{item.name}/{each.name}" for each in look.items(item.name)] if item.is_folder else [item.name]
        return found

    def visible(self) -> list[int]:
        """The steps that anybody who lists finds, oldest first."""
        return sorted(copy.version.step for copy in self.store().find(0))

    def store(self) -> PersistentStore:
        """The tier as a stranger sees it."""
        site = Site("nobody", "n0", self.folder, self.folder)
        store = Persistent(self.url, options=self._options).store(site)
        assert isinstance(store, PersistentStore)
        return store

    def commits(self) -> list[str]:
        """The versions whose COMMIT.json was sent, in that order."""
        paths = [request.path.partition("?")[0] for request in self.s3.requests if request.kind == "put"]
        return [path.split("/")[-2] for path in paths if path.endswith("COMMIT.json")]

    @property
    def _options(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.s3.upstream}"
        return {
            "key": "observer",
            "secret": "observer",
            "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
        }


@dataclass
class Observer:
    """Lists all the time; whatever it finds, it fetches and checks at once."""

    bucket: Bucket
    folder: Path
    seen: set[int] = field(default_factory=set)
    looks: int = 0
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def looking(self) -> Iterator[Observer]:
        """While the context lasts."""
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()
        assert self.looks > 0
        assert self.wrong == []

    def _look(self) -> None:
        store = self.bucket.store()
        is_over = False
        while not is_over:
            is_over = self._stop.wait(0.1)  # and it looks once more
            try:
                for copy in store.find():
                    if copy.version.step not in self.seen:
                        with Shard(store.fetch(copy, self.folder), store.read_manifest(copy).job) as shard:
                            self.wrong += shard.verify()
                        self.seen.add(copy.version.step)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            self.looks += 1


@contextmanager
def another_machine(bucket: Bucket, **settings: Any) -> Iterator[eg.Checkpointer]:
    """A new job that knows nothing but the URL: no run folder, no memory, no disk of the one that saved."""
    known = os.environ["EVERGRAD_SHM"]
    with tempfile.TemporaryDirectory(prefix="evergrad-test-", dir=Path(known).parent) as memory:
        os.environ["EVERGRAD_SHM"] = memory
        run = Path(tempfile.mkdtemp(prefix="elsewhere-", dir=bucket.folder))
        try:
            with eg.Checkpointer(run, tiers=[bucket.tier(**settings)], agent=False) as ck:
                yield ck
        finally:
            os.environ["EVERGRAD_SHM"] = known
            shutil.rmtree(run, ignore_errors=True)


def files_with_secrets(folder: Path) -> list[str]:
    """Files below a folder that hold a credential."""
    told = (SECRET.encode(), b"AKIAEXAMPLE")
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if any(word in path.read_bytes() for word in told)]
