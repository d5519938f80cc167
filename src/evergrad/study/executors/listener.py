"""Where workers on other machines report: whoever does not prove the secret on its `_wire` gets no further.

A stranger costs little: some bytes, for some seconds, and there are never more than a few.
"""

from __future__ import annotations

import selectors
import socket
import time
from contextlib import suppress
from typing import Any

from evergrad._wire import Garbled, Secret, Wire
from evergrad.errors import UsageError
from evergrad.study.executors.worker import LONGEST_ANSWER
from evergrad.wording import short_repr

_STRANGER_S = 30.0
_STRANGERS = 64
_BACKLOG = 512


class WorkerListener:
    """Listens on every address of this machine, or on that of `host` alone."""

    def __init__(self, host: str | None = None) -> None:
        self.secret = Secret.new()
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
                self.update_events(wire)
            if events & selectors.EVENT_READ and owner is not None:
                ready.append(owner)
            elif events & selectors.EVENT_READ and (message := self._first(wire)) is not None:
                came.append((wire, message))
        now = time.monotonic()
        for wire in [wire for wire, since in self._since.items() if now - since > _STRANGER_S]:
            self.drop(wire)
        return came, ready

    def assign(self, wire: Wire, owner: object) -> None:
        """Who has come is somebody's."""
        self._selector.modify(wire.link, selectors.EVENT_READ, (wire, owner))

    def send(self, wire: Wire, message: dict[str, Any]) -> None:
        """Send it, all of it as soon as possible."""
        wire.send(message)
        self.update_events(wire)

    def update_events(self, wire: Wire) -> None:
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
            wire = Wire(link, self.secret, is_runner=True, longest=LONGEST_ANSWER)
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
        raise UsageError(f"host: cannot listen on {short_repr(host)} ({error})") from error


def _addresses() -> tuple[str, ...]:
    """By which this machine may be known: its name, and the address that it has on the way out."""
    found = [socket.gethostname()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))  # sends nothing
        found.append(probe.getsockname()[0])
    return tuple(found)
