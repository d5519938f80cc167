"""The job's secret, and what it is for: nobody else can write what ranks and launcher take from the store.

The store has no doors: whoever reaches its port can read and write it. So every value carries a seal, made of the
secret, the name of its key and its text. A value without the right seal ends the job: a stranger can stop it, and
never steer it.

The secret is made anew for every run and lies in a file that only its owner can read; it never goes through the store.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from evergrad.errors import FileAccessError, RecoveryError

_SIZE = 32
_SEAL = 16


class Forged(RecoveryError):
    """A value in the store was not written by this job."""


class Secret:
    """Seals texts, and tells whether a seal is right."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def make(cls, path: Path) -> Secret:
        """A new one, and its file, which must not be there."""
        secret = os.urandom(_SIZE)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise FileAccessError(path, f"the job's secret cannot be written: {error.strerror}") from None
        with os.fdopen(fd, "wb") as file:
            file.write(secret)
        return cls(secret)

    @classmethod
    def read(cls, path: Path) -> Secret:
        """From its file; refused if it is somebody else's, or if others can read it."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise FileAccessError(path, f"the job's secret cannot be read: {error.strerror}") from None
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(file.fileno())
            secret = file.read(_SIZE + 1)
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            raise FileAccessError(
                path, "is no secret", expected="a file of mode 0600 of this user", found=f"{mode:04o} of {found.st_uid}"
            )
        if len(secret) != _SIZE:
            raise FileAccessError(path, "is no secret", expected=f"{_SIZE} bytes", found=f"{len(secret)}")
        return cls(secret)

    def seal(self, name: str, text: bytes) -> bytes:
        """What is stored under this name."""
        return self._seal_of(name, text) + text

    def open(self, name: str, sealed: bytes) -> bytes:
        """The text that was stored under this name; `Forged` if this job has not written it."""
        seal, text = sealed[:_SEAL], sealed[_SEAL:]
        if not hmac.compare_digest(seal, self._seal_of(name, text)):
            raise Forged(
                f"the store's value of '{name}' was not written by this job (its seal is wrong): somebody else has "
                "access to the store's port. The job ends rather than follow it"
            )
        return text

    def _seal_of(self, name: str, text: bytes) -> bytes:
        said = name.encode()
        whole = len(said).to_bytes(4, "little") + said + text
        return hashlib.blake2b(whole, key=self._secret, digest_size=_SEAL).digest()
