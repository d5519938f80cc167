"""The sockets that a library opens: found when they are made, and cut from another thread when they must not block.

Neither gloo nor the store's client can be told to give up: whoever waits in them waits for their timeout. Shutting
the connection down under them makes them fail at once, here and at the other end, even if the other end is stopped, or
if a forked child (a data loader's worker) holds a copy of the socket and keeps it open after its parent's death.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Sockets:
    """TCP connections that were made inside of `with sockets.opening():`, by whatever library."""

    def __init__(self, port: int | None = None, *, is_local: bool = False) -> None:
        """Note those to this port only, if one is given, and with `is_local` only those within this machine."""
        self._port, self._is_local = port, is_local
        # Copies of our own: a number that the library has closed may be someone else's file by now.
        self._copies: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_cut = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Note every connection that is there afterwards and was not before.

        Whatever another thread opens meanwhile is taken for the library's too. No lock keeps it from that: what is
        opened here may wait for as long as it likes.
        """
        before = set(_links().values())
        try:
            yield
        finally:
            self._note(before)

    def cut(self) -> None:
        """Shut them all down. From any thread; twice is fine."""
        with self._lock:
            self._is_cut = True
            copies, self._copies = self._copies, []
        for copy in copies:
            with suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)
            copy.close()

    def release(self) -> None:
        """Forget them without touching the connections."""
        with self._lock:
            copies, self._copies = self._copies, []
        for copy in copies:
            copy.close()

    def __del__(self) -> None:
        self.release()

    def _note(self, before: set[str]) -> None:
        copies = [
            copy
            for fd, link in _links().items()
            if link not in before and (copy := _connection(fd, self._port, self._is_local)) is not None
        ]
        with self._lock:
            self._copies += copies
            was_cut = self._is_cut
        if was_cut:
            self.cut()


def _links() -> dict[int, str]:
    """Every open socket of this process, by number, with what tells it from all others."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


def _connection(fd: int, port: int | None, is_local: bool) -> socket.socket | None:
    """A copy of a TCP connection; None for a listening socket (which gloo does not survive to lose) and for others."""
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    try:
        if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
            peer = copy.getpeername()
            is_near = peer[0].removeprefix("::ffff:").startswith("127.") or peer[0] == "::1"
            if (port is None or peer[1] == port) and (is_near or not is_local):
                return copy
    except OSError:
        pass
    copy.close()
    return None
