"""Messages that prove who wrote them: a secret, its tags (HMAC), and a connection on which every message has one.

The secret lies in a file that only its owner can read, and never goes over a network. Nothing is encrypted: messages
can be read on the way. Nothing that is received is executed: messages are JSON, or bytes that the caller asked for by
name. A connection bounds their length before it looks at them.

- `Secret.seal` and `open`: values in a store to which anybody may write.
- `Wire`: JSON lines over TCP, in order, each once.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import select
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.errors import FileAccessError, RecoveryError

if TYPE_CHECKING:
    from evergrad.records import Json

SILENCE_S = 60
"""How long the other's machine may say nothing at all."""

_SIZE = 32
_TAG = 32
_NONCE = 16
_STRANGER = 4096
"""Bytes that are kept of one who has not proven anything yet."""
_READ = 1 << 16


class Forged(RecoveryError):
    """A value in the store was not written by this job."""


class Garbled(Exception):
    """The other end says what no worker and no runner says."""


class Secret:
    """What both ends know; 32 random bytes."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def new(cls) -> Secret:
        """One that nobody knows yet."""
        return cls(secrets.token_bytes(_SIZE))

    @classmethod
    def make(cls, path: Path) -> Secret:
        """A new one, and its file, which must not be there."""
        made = cls.new()
        try:
            write_private(path, made._secret)
        except OSError as error:
            raise FileAccessError(path, f"the job's secret cannot be written: {error.strerror}") from None
        return made

    @classmethod
    def read(cls, path: Path) -> Secret:
        """From its file; refused if it is somebody else's, or if others can read it."""
        try:
            found = read_private(path, _SIZE + 1)
        except OSError as error:
            raise FileAccessError(path, f"the job's secret cannot be read: {error.strerror}") from None
        if len(found) != _SIZE:
            raise FileAccessError(path, "is no secret", expected=f"{_SIZE} bytes", found=f"{len(found)}")
        return cls(found)

    @classmethod
    def from_hex(cls, text: str) -> Secret:
        """From a private file that holds more than a secret; ValueError if it is none."""
        found = bytes.fromhex(text)
        if len(found) != _SIZE:
            raise ValueError(f"expected a secret of {_SIZE} bytes, found {len(found)}")
        return cls(found)

    def hex(self) -> str:
        """As text, for a private file."""
        return self._secret.hex()

    def tag(self, *parts: bytes) -> bytes:
        """HMAC-SHA-256 of these parts; where one ends and the next begins is a part of it."""
        whole = b"".join(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part))
        return hmac.digest(self._secret, whole, "sha256")

    def seal(self, name: str, text: bytes) -> bytes:
        """What is stored under this name."""
        return self.tag(name.encode(), text) + text

    def open(self, name: str, sealed: bytes) -> bytes:
        """The text that was stored under this name; `Forged` if this job has not written it."""
        tag, text = sealed[:_TAG], sealed[_TAG:]
        if not hmac.compare_digest(tag, self.tag(name.encode(), text)):
            raise Forged(
                f"the store's value of '{name}' was not written by this job (its seal is wrong): somebody else has "
                "access to the store's port. The job ends rather than follow it"
            )
        return text


def write_private(path: Path, content: bytes) -> None:
    """A new file that nobody else can read, from its first byte on; OSError if it is there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)


def read_private(path: Path, longest: int) -> bytes:
    """As many bytes of such a file; `FileAccessError` if it is somebody else's, or if others can read it."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if found.st_uid != os.geteuid() or mode & 0o077:
            raise FileAccessError(
                path, "is no secret", expected="a file of mode 0600 of this user", found=f"{mode:04o} of {found.st_uid}"
            )
        return file.read(longest)


# A connection.
#
#     →  a nonce                    each side, once
#     →  a tag, a space, a message  from then on: the tag is over the speaker, the message's number and its text, by a
#                                   key that is made of the secret and both nonces
#
# Whoever does not know the secret is not heard; what is altered, left out, repeated, recorded earlier or sent back
# ends the connection.
#
# A connection ends at once when the process at its other end does, however it ends; where the whole machine or the
# network is gone, after `SILENCE_S`.


class Wire:
    """One end of a connection; never waits, except in `wait`."""

    def __init__(self, link: socket.socket, secret: Secret, *, is_runner: bool, longest: int) -> None:
        """`longest`: bytes of a message that is received."""
        self.link = link
        self.is_proven = False
        """Whether the other has shown that it knows the secret."""
        self._secret = secret
        self._longest = longest
        self._names = (b"runner", b"worker") if is_runner else (b"worker", b"runner")
        self._nonce = secrets.token_hex(_NONCE).encode()
        self._key: Secret | None = None
        self._said = self._heard = 0
        self._unsealed: list[bytes] = []
        self._incoming = bytearray()
        self._outgoing = bytearray(self._nonce + b"\n")
        link.setblocking(False)
        _watch(link)

    @property
    def has_unsent(self) -> bool:
        """Whether some of what was sent is still here."""
        return bool(self._outgoing)

    def send(self, message: Mapping[str, Json]) -> None:
        """Send it, now or when the other reads."""
        text = json.dumps(message, allow_nan=False).encode()
        if self._key is None:
            self._unsealed.append(text)
        else:
            self._outgoing += self._sealed(self._key, text)
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before; that the other is gone is told by `receive`."""
        with suppress(OSError):
            while self._outgoing:
                del self._outgoing[: self.link.send(self._outgoing)]

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None when the other is gone and all it said was given."""
        read, is_open = bytearray(), True
        with suppress(BlockingIOError):
            while is_open and len(read) <= self._longest:
                try:
                    part = self.link.recv(_READ)
                except BlockingIOError:
                    raise
                except OSError:  # reset, or silent for too long
                    part = b""
                read += part
                is_open = bool(part)
                if not self.is_proven and len(read) > _STRANGER:
                    break
        if not read and not is_open:
            return None
        self._incoming += read
        if b"\n" not in read:
            lines = []
        else:
            *lines, self._incoming = self._incoming.split(b"\n")
        messages = [message for line in lines if (message := self._understood(bytes(line))) is not None]
        longest = self._longest + 2 * _TAG + 1 if self.is_proven else _STRANGER
        if len(self._incoming) > longest:
            raise Garbled(f"sent more than {longest} bytes without an end")
        return messages

    def wait(self, wait_s: float) -> None:
        """Until there is something to receive, or unsent things can go, but not longer than this."""
        poll = select.poll()
        poll.register(self.link, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.poll(wait_s * 1000)
        self.flush()

    def close(self) -> None:
        """End it."""
        self.link.close()

    def _understood(self, line: bytes) -> dict[str, Any] | None:
        if self._key is None:
            self._greet(line)
            return None
        tag, _, text = line.partition(b" ")
        if not hmac.compare_digest(tag, self._tag(self._key, self._names[1], self._heard, text)):
            raise Garbled("sent what is not sealed by our secret")
        self._heard += 1
        self.is_proven = True
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise Garbled("sent what is no message")
        return message

    def _greet(self, nonce: bytes) -> None:
        if len(nonce) != 2 * _NONCE or nonce == self._nonce:
            raise Garbled("sent no nonce")
        runner, worker = (self._nonce, nonce) if self._names[0] == b"runner" else (nonce, self._nonce)
        self._key = Secret(self._secret.tag(b"connection", runner, worker))
        for text in self._unsealed:
            self._outgoing += self._sealed(self._key, text)
        self._unsealed.clear()
        self.flush()

    def _sealed(self, key: Secret, text: bytes) -> bytes:
        line = self._tag(key, self._names[0], self._said, text) + b" " + text + b"\n"
        self._said += 1
        return line

    def _tag(self, key: Secret, speaker: bytes, count: int, text: bytes) -> bytes:
        return key.tag(speaker, b"%d" % count, text).hex().encode()


def _watch(link: socket.socket) -> None:
    """Let the kernel ask whether the other's machine is still there."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)  # also while data are on their way
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
