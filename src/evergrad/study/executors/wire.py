"""Messages between a runner and its workers on other machines: JSON lines over TCP, sealed with a secret of theirs.

    →  a nonce                     each side, once
    →  a seal, a space, a message  from then on: HMAC-SHA-256 over who speaks, the how manyeth it is, and the message,
                                   by a key that is made of the secret and both nonces

Whoever does not know the secret is not heard; what is altered, left out, repeated, recorded earlier or sent back ends
the connection. Nothing is encrypted: what tasks and results say can be read on the way, as on any file system there.

A connection ends at once when the process at its other end does, however it ends; where the whole machine or the
network is gone, after `SILENCE_S`.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from evergrad.records import Json
from evergrad.study.executors.process import Garbled
from evergrad.study.executors.worker import LONGEST_ANSWER

SILENCE_S = 60
"""How long the other's machine may say nothing at all."""

_NONCE = 16
_SEAL = 64
_STRANGER = 4096
"""Bytes that are kept of one who has not proven anything yet."""
_READ = 1 << 16


class Wire:
    """One end of a connection; never waits, except in `wait`."""

    def __init__(self, link: socket.socket, secret: bytes, *, is_runner: bool) -> None:
        self.link = link
        self.is_proven = False
        """Whether the other has shown that it knows the secret."""
        self._secret = secret
        self._names = (b"runner", b"worker") if is_runner else (b"worker", b"runner")
        self._nonce = secrets.token_hex(_NONCE).encode()
        self._key = b""
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
        if self._key:
            self._outgoing += self._sealed(text)
        else:
            self._unsealed.append(text)
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
            while is_open and len(read) <= LONGEST_ANSWER:
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
        longest = LONGEST_ANSWER + _SEAL + 1 if self.is_proven else _STRANGER
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
        if not self._key:
            self._greet(line)
            return None
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, self._seal(self._names[1], self._heard, text)):
            raise Garbled("sent what is not sealed by our secret")
        self._heard += 1
        self.is_proven = True
        try:
            message = json.loads(text)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise Garbled("sent what is no message")
        return message

    def _greet(self, nonce: bytes) -> None:
        if len(nonce) != 2 * _NONCE or nonce == self._nonce:
            raise Garbled("sent no nonce")
        runner, worker = (self._nonce, nonce) if self._names[0] == b"runner" else (nonce, self._nonce)
        self._key = hmac.digest(self._secret, b"evergrad " + runner + b" " + worker, "sha256")
        for text in self._unsealed:
            self._outgoing += self._sealed(text)
        self._unsealed.clear()
        self.flush()

    def _sealed(self, text: bytes) -> bytes:
        line = self._seal(self._names[0], self._said, text) + b" " + text + b"\n"
        self._said += 1
        return line

    def _seal(self, speaker: bytes, count: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d %s" % (speaker, count, text), "sha256").hex().encode()


def _watch(link: socket.socket) -> None:
    """Let the kernel ask whether the other's machine is still there."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)  # also while data are on their way
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
