"""A multipart upload that another process can take up: parts that are there already are not sent again.

S3 keeps the parts of an upload until it is completed or aborted, and the ETag of a part is the MD5 of its bytes. (It is
not where the store encrypts with keys of its own: there every part is sent again, which is slower and as right.)
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from evergrad.errors import TierError

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

    def pay(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        ...


class UploadGone(Exception):
    """The upload does not exist any more: someone else has completed or aborted it."""


@dataclass(slots=True)
class Upload:
    """An upload that was begun."""

    bucket: S3Calls
    key: str
    id: str
    name: str = ""
    there: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Parts that were sent before: number → MD5 and size."""
    rivals: list[Upload] = field(default_factory=list)
    """Other uploads of the same object, which crashes have left."""

    @classmethod
    def begin(cls, bucket: S3Calls, name: str) -> Upload:
        """A new one."""
        made = bucket.call(f"uploading {name}", "create_multipart_upload", name)
        return cls(bucket, bucket.key(name), made["UploadId"], name)

    @classmethod
    def resume(cls, bucket: S3Calls, name: str) -> Upload | None:
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
            self.bucket.pay(len(part))
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


def unfinished(bucket: S3Calls, prefix: str) -> list[Upload]:
    """Uploads below a prefix that were neither completed nor aborted, oldest first; none where the store cannot say."""
    found: list[tuple[str, Upload]] = []
    more: dict[str, Any] = {}
    while True:
        try:
            page = bucket.call("listing uploads", "list_multipart_uploads", None, Prefix=prefix, **more)
        except (FileNotFoundError, TierError) as error:
            _log.debug("unfinished uploads cannot be listed: %s", error)
            break
        for row in page.get("Uploads") or ():
            if row["Key"].startswith(prefix):
                found.append((str(row.get("Initiated", "")), Upload(bucket, row["Key"], row["UploadId"])))
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
