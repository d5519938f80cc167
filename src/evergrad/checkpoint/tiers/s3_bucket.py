"""S3, and whatever speaks like it: one request for each thing, through s3fs's session and credentials."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from evergrad.checkpoint.tiers.buckets import Access, FsspecBucket, Item, Source, rechunk
from evergrad.checkpoint.tiers.retry import error_code
from evergrad.checkpoint.tiers.s3_multipart import PARALLEL_PARTS, Upload, UploadGone, unfinished
from evergrad.errors import TierError
from evergrad.wording import install_hint

_MOST_PARTS = 9_000  # S3 allows 10,000; packed bytes may be more than there were
_FEW = 4
_BATCH = 1000
_TAKEN_UP = 3
_TIMEOUTS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 0}}


class S3Bucket(FsspecBucket):
    """Objects of a bucket below a prefix. Large ones go in parts, and are taken up again where a crash left them."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        bucket, _, prefix = access.url.partition("://")[2].partition("/")
        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._slots = threading.BoundedSemaphore(PARALLEL_PARTS)
        """Parts in memory, of all ranks together."""

    @property
    def _library(self) -> str:
        return f"s3fs ({install_hint('s3')})"

    def items(self, folder: str = "") -> list[Item]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        found = []
        for page in self._pages(f"listing {folder or 'versions'}", prefix):
            for row in page.get("CommonPrefixes", ()):
                found.append(Item(row["Prefix"][len(prefix) :].rstrip("/"), 0, True))
            for row in page.get("Contents", ()):
                found.append(Item(row["Key"][len(prefix) :], row["Size"], False))
        return [item for item in found if item.name]

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        def get() -> bytes:
            fs, _ = self._fs()
            path = f"{self._bucket}/{self._prefix}{name}"
            # More than one at a time would ask for the size first.
            data: bytes = self._checked(lambda: fs.cat_file(path, start=begin, end=end, max_concurrency=1))
            return data

        return self._retry(f"reading {name}", get)

    def size(self, name: str) -> int:
        return int(self.call(f"looking at {name}", "head_object", name)["ContentLength"])

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        def put() -> None:
            if new:
                try:
                    self._once("put_object", name, Body=data, IfNoneMatch="*")
                    return
                except Exception as error:
                    status = error_code(error)[1]
                    if status == 412:
                        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
                    if status not in (400, 405, 501):  # a store that does not know the condition
                        raise
            self._once("put_object", name, Body=data)

        self._retry(f"writing {name}", put)

    def upload(self, name: str, source: Source, size: int) -> int:
        part_bytes = max(self.access.part_bytes, math.ceil(size / _MOST_PARTS))
        for _ in range(_TAKEN_UP):
            with suppress(UploadGone):  # completed or aborted by someone else: begin again
                return self._upload(name, source, part_bytes)
        raise TierError(f"{self.label(name)}: the upload was aborted by someone else, {_TAKEN_UP} times")

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        if len(names) <= _FEW:
            for name in names:
                with suppress(FileNotFoundError):
                    self.call(f"removing {name}", "delete_object", name)
            return
        for begin in range(0, len(names), _BATCH):
            batch = [{"Key": self._prefix + name} for name in names[begin : begin + _BATCH]]
            done = self.call("removing objects", "delete_objects", None, Delete={"Objects": batch, "Quiet": True})
            if errors := done.get("Errors"):
                first = errors[0]
                raise TierError(f"{self.where}/{first.get('Key')}: cannot be removed: {first.get('Code')}")

    def abandon(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        for upload in unfinished(self, self._prefix + prefix):
            if is_over(upload.key[len(self._prefix) :]):
                with suppress(FileNotFoundError):
                    upload.abort()

    def call(self, what: str, method: str, name: str | None, **arguments: Any) -> dict[str, Any]:
        """One request, on an object or on the bucket; made again while that may help."""
        return self._retry(what, lambda: self._once(method, name, **arguments))

    def key(self, name: str) -> str:
        """The whole name of an object in its bucket."""
        return self._prefix + name

    def _once(self, method: str, name: str | None, **arguments: Any) -> dict[str, Any]:
        if name is not None:
            arguments["Key"] = self._prefix + name
        fs, _ = self._fs()
        done: dict[str, Any] = self._checked(lambda: fs.call_s3(method, Bucket=self._bucket, **arguments))
        return done

    def _upload(self, name: str, source: Source, part_bytes: int) -> int:
        parts = rechunk(source(), part_bytes)
        with self._slots:
            first = next(parts, b"")
            if len(first) < part_bytes:
                self.pay(len(first))
                self.call(f"uploading {name}", "put_object", name, Body=first)
                return len(first)
        upload = Upload.resume(self, name) or Upload.begin(self, name)
        whole = chain([first], parts)
        del first  # or it would stay until all are sent
        return upload.send(whole, self._slots)

    def _pages(self, what: str, prefix: str) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {}
        while True:
            page = self.call(what, "list_objects_v2", None, Prefix=prefix, Delimiter="/", **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _checked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FileNotFoundError as error:
            if error_code(error)[0] == "NoSuchBucket":
                raise TierError(
                    f"{self.where}: there is no bucket {self._bucket!r}: make it, or correct the URL"
                ) from None
            raise

    def _make(self) -> Any:
        fs = super()._make()
        fs.retries = 1  # trying again is our business
        return fs

    def _options(self) -> dict[str, Any]:
        options = dict(self.access.options)
        options["config_kwargs"] = _TIMEOUTS | options.get("config_kwargs", {})
        options["use_listings_cache"] = False
        return options
