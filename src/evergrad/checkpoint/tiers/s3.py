"""S3, and whatever speaks like it: one request for each thing, through s3fs's session and credentials."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from evergrad.checkpoint.tiers.object_store import (
    BucketAccess,
    ChunkSource,
    FsspecBucket,
    ListedObject,
    error_code,
    rechunk,
)
from evergrad.errors import TierError
from evergrad.wording import install_hint

# A multipart upload that another process can take up: parts that are there already are not sent again.
#
# S3 keeps the parts of an upload until it is completed or aborted, and the ETag of a part is the MD5 of its bytes.
# (It is not where the store encrypts with keys of its own: there every part is sent again, which is slower and as
# right.)

MIN_PART_BYTES = 5 << 20
PARALLEL_PARTS = 4
_log = logging.getLogger(__name__)


class S3Calls(Protocol):
    """What is needed of a bucket."""

    def call(self, what: str, method: str, name: str | None, **arguments: Any) -> dict[str, Any]:
        """One request on an object or on the bucket."""
        ...

    def key(self, name: str) -> str:
        """The whole name of an object."""
        ...

    def await_bandwidth(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        ...


class UploadGone(Exception):
    """The upload does not exist any more: someone else has completed or aborted it."""


@dataclass(slots=True)
class MultipartUpload:
    """An upload that was begun."""

    bucket: S3Calls
    key: str
    id: str
    name: str = ""
    there: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Parts that were sent before: number → MD5 and size."""
    rivals: list[MultipartUpload] = field(default_factory=list)
    """Other uploads of the same object, which crashes have left."""

    @classmethod
    def begin(cls, bucket: S3Calls, name: str) -> MultipartUpload:
        """A new one."""
        made = bucket.call(f"uploading {name}", "create_multipart_upload", name)
        return cls(bucket, bucket.key(name), made["UploadId"], name)

    @classmethod
    def resume(cls, bucket: S3Calls, name: str) -> MultipartUpload | None:
        """The newest one of an object, with what it has; None if there is none."""
        key = bucket.key(name)
        found = [upload for upload in unfinished(bucket, key) if upload.key == key]
        while found:
            upload = found.pop()
            upload.name, upload.rivals = name, found
            try:
                upload.there = upload._parts()
            except FileNotFoundError:
                continue
            _log.info("%s: taken up again, %d parts are there", name, len(upload.there))
            return upload
        return None

    def abort(self) -> None:
        """Give up, and free what the parts take; `FileNotFoundError` if it is gone."""
        self.bucket.call("aborting an upload", "abort_multipart_upload", None, Key=self.key, UploadId=self.id)

    def send(self, parts: Iterator[bytes], slots: threading.BoundedSemaphore) -> int:
        """Send what is missing, a few parts at a time, and complete; gives the bytes of the object."""
        waiting: list[Future[tuple[str, int]]] = []
        with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            while not any(future.done() and future.exception() for future in waiting):
                slots.acquire()  # before the part is made: memory is what is scarce
                try:
                    part = next(parts, None)
                    if part is None:
                        slots.release()
                        break
                except BaseException:
                    slots.release()
                    raise
                waiting.append(pool.submit(self._send, len(waiting) + 1, part, slots))
                del part
        sent = [future.result() for future in waiting]
        self._complete([etag for etag, _ in sent])
        for rival in self.rivals:
            try:
                rival.abort()
            except (FileNotFoundError, TierError) as error:
                _log.debug("%s: an older upload is left: %s", self.name, error)
        return sum(size for _, size in sent)

    def _send(self, number: int, part: bytes, slots: threading.BoundedSemaphore) -> tuple[str, int]:
        try:
            digest = hashlib.md5(part, usedforsecurity=False).hexdigest()
            if self.there.get(number) == (digest, len(part)):
                return f'"{digest}"', len(part)
            self.bucket.await_bandwidth(len(part))
            done = self.bucket.call(
                f"uploading part {number} of {self.name}", "upload_part", self.name,
                UploadId=self.id, PartNumber=number, Body=part,
            )  # fmt: skip
            return str(done["ETag"]), len(part)
        except FileNotFoundError:
            raise UploadGone from None
        finally:
            slots.release()

    def _complete(self, etags: list[str]) -> None:
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
        try:
            self.bucket.call(
                f"completing {self.name}", "complete_multipart_upload", self.name,
                UploadId=self.id, MultipartUpload={"Parts": parts},
            )  # fmt: skip
        except FileNotFoundError:
            # Perhaps an answer was lost on the way, and it is completed.
            try:
                found = self.bucket.call(f"looking at {self.name}", "head_object", self.name)["ETag"]
            except FileNotFoundError:
                raise UploadGone from None
            if str(found).strip('"') != _whole(etags):
                raise UploadGone from None

    def _parts(self) -> dict[int, tuple[str, int]]:
        found: dict[int, tuple[str, int]] = {}
        more: dict[str, Any] = {}
        while True:
            page = self.bucket.call(
                f"listing parts of {self.name}", "list_parts", self.name, UploadId=self.id, **more
            )  # fmt: skip
            for row in page.get("Parts", ()):
                found[int(row["PartNumber"])] = (str(row["ETag"]).strip('"'), int(row["Size"]))
            if not page.get("IsTruncated"):
                return found
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}


def unfinished(bucket: S3Calls, prefix: str) -> list[MultipartUpload]:
    """Uploads below a prefix that were neither completed nor aborted, oldest first; none where the store cannot say."""
    found: list[tuple[str, MultipartUpload]] = []
    more: dict[str, Any] = {}
    while True:
        try:
            page = bucket.call("listing uploads", "list_multipart_uploads", None, Prefix=prefix, **more)
        except (FileNotFoundError, TierError) as error:
            _log.debug("unfinished uploads cannot be listed: %s", error)
            break
        for row in page.get("Uploads") or ():
            if row["Key"].startswith(prefix):
                found.append((str(row.get("Initiated", "")), MultipartUpload(bucket, row["Key"], row["UploadId"])))
        if not page.get("IsTruncated"):
            break
        more = {"KeyMarker": page.get("NextKeyMarker", ""), "UploadIdMarker": page.get("NextUploadIdMarker", "")}
    return [upload for _, upload in sorted(found, key=lambda pair: pair[0])]


def _whole(etags: list[str]) -> str:
    """The ETag of an object made of parts with these."""
    try:
        joined = b"".join(bytes.fromhex(etag.strip('"')) for etag in etags)
    except ValueError:
        return ""
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(etags)}"


_MOST_PARTS = 9_000  # S3 allows 10,000; packed bytes may be more than there were
_FEW = 4
_BATCH = 1000
_TAKEN_UP = 3
_TIMEOUTS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 0}}


class S3Bucket(FsspecBucket):
    """Objects of a bucket below a prefix. Large ones go in parts, and are taken up again where a crash left them."""

    def __init__(self, access: BucketAccess) -> None:
        super().__init__(access)
        bucket, _, prefix = access.url.partition("://")[2].partition("/")
        self._bucket, self._prefix = bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._slots = threading.BoundedSemaphore(PARALLEL_PARTS)
        """Parts in memory, of all ranks together."""

    @property
    def _library(self) -> str:
        return f"s3fs ({install_hint('s3')})"

    def items(self, folder: str = "") -> list[ListedObject]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        found = []
        for page in self._pages(f"listing {folder or 'versions'}", prefix):
            for row in page.get("CommonPrefixes", ()):
                found.append(ListedObject(row["Prefix"][len(prefix) :].rstrip("/"), 0, True))
            for row in page.get("Contents", ()):
                found.append(ListedObject(row["Key"][len(prefix) :], row["Size"], False))
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

    def upload(self, name: str, source: ChunkSource, size: int) -> int:
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

    def _upload(self, name: str, source: ChunkSource, part_bytes: int) -> int:
        parts = rechunk(source(), part_bytes)
        with self._slots:
            first = next(parts, b"")
            if len(first) < part_bytes:
                self.await_bandwidth(len(first))
                self.call(f"uploading {name}", "put_object", name, Body=first)
                return len(first)
        upload = MultipartUpload.resume(self, name) or MultipartUpload.begin(self, name)
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
