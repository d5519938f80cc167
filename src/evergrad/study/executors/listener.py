"""Where workers on other machines report: whoever does not prove the secret on its `wire` gets no further.

A stranger costs little: some bytes, for some seconds, and there are never more than a few.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.study.executors.worker import LONGEST_ANSWER
from evergrad.study.executors.worker_process import Garbled
from evergrad.wording import shown

# Messages between a runner and its workers on other machines: JSON lines over TCP, sealed with a secret of theirs.
#
#     →  a nonce                     each side, once
#     →  a seal, a space, a message  from then on: HMAC-SHA-256 over who speaks, the how manyeth it is, and the message,
#                                    by a key that is made of the secret and both nonces
#
# Whoever does not know the secret is not heard; what is altered, left out, repeated, recorded earlier or sent back
# ends the connection. Nothing is encrypted: what tasks and results say can be read on the way, as on any file system
# there.
#
# A connection ends at once when the process at its other end does, however it ends; where the whole machine or the
# network is gone, after `SILENCE_S`.

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


_STRANGER_S = 30.0
_STRANGERS = 64
_BACKLOG = 512


class Reception:
    """Listens on every address of this machine, or on that of `host` alone."""

    def __init__(self, host: str | None = None) -> None:
        self.secret = secrets.token_bytes(32)
        self._listener = _listener(host)
        self.addresses = (host,) if host else _addresses()
        self.port: int = self._listener.getsockname()[1]
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._since: dict[Wire, float] = {}

    def wait(self, wait_s: float) -> tuple[list[tuple[Wire, dict[str, Any]]], list[Any]]:
        """Who has come, each with its first message; and whose wires have something to say, as `admit` was told."""
        came: list[tuple[Wire, dict[str, Any]]] = []
        ready: list[Any] = []
        for key, events in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
                continue
            wire, owner = key.data
            if events & selectors.EVENT_WRITE:
                wire.flush()
                self.mind(wire)
            if events & selectors.EVENT_READ and owner is not None:
                ready.append(owner)
            elif events & selectors.EVENT_READ and (message := self._first(wire)) is not None:
                came.append((wire, message))
        now = time.monotonic()
        for wire in [wire for wire, since in self._since.items() if now - since > _STRANGER_S]:
            self.drop(wire)
        return came, ready

    def admit(self, wire: Wire, owner: object) -> None:
        """Who has come is somebody's."""
        self._selector.modify(wire.link, selectors.EVENT_READ, (wire, owner))

    def send(self, wire: Wire, message: dict[str, Any]) -> None:
        """Send it, all of it as soon as possible."""
        wire.send(message)
        self.mind(wire)

    def mind(self, wire: Wire) -> None:
        """Wake up when it can be written to, as long as something is to be."""
        key = self._selector.get_key(wire.link)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.has_unsent else 0)
        if key.events != wanted:
            self._selector.modify(wire.link, wanted, key.data)

    def drop(self, wire: Wire) -> None:
        """End a connection."""
        self._since.pop(wire, None)
        self._selector.unregister(wire.link)
        wire.close()

    def close(self) -> None:
        """End all of them, and listen no more."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self.drop(key.data[0])
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again
            link, _ = self._listener.accept()
            if len(self._since) >= _STRANGERS:
                self.drop(next(iter(self._since)))
            wire = Wire(link, self.secret, is_runner=True)
            wire.flush()
            self._since[wire] = time.monotonic()
            self._selector.register(link, selectors.EVENT_READ, (wire, None))

    def _first(self, wire: Wire) -> dict[str, Any] | None:
        if wire not in self._since:  # came, and was not admitted
            return None
        try:
            messages = wire.receive()
        except Garbled:
            messages = None
        if messages is None:
            self.drop(wire)
        if not messages:
            return None
        del self._since[wire]
        return messages[0]  # it says no more before it was greeted


def _listener(host: str | None) -> socket.socket:
    try:
        if host is None and socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET
        return socket.create_server((host or "", 0), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host: cannot listen on {shown(host)} ({error})") from error


def _addresses() -> tuple[str, ...]:
    """By which this machine may be known: its name, and the address that it has on the way out."""
    found = [socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))  # sends nothing
        found.append(probe.getsockname()[0])
    return tuple(found)
