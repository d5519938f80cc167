"""The sockets that a library opens: found when they are made, and cut from another thread when they must not block.

Neither gloo nor the store's client can be told to give up: whoever waits in them waits for their timeout. Shutting
the connection down under them makes them fail at once, here and at the other end, even if the other end is stopped, or
if a forked child (a data loader's worker) holds a copy of the socket and keeps it open after its parent's death.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from evergrad.errors import UsageError


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


# By which address this machine is reached: from itself, on the way to another one, from all others.

LOOPBACK = "127.0.0.1"

_SIOCGIFADDR = 0x8915
# Nothing is sent there (addresses for documentation): the kernel is asked by which interface it would be.
_ELSEWHERE = "198.51.100.1"


def is_loopback(host: str) -> bool:
    """Whether this is the machine itself, by a name that nobody has to look up."""
    return host in (LOOPBACK, "localhost", "::1")


def address_towards(host: str) -> str:
    """Our own address on the way to another machine; empty if there is no way."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def own_address(others: Sequence[str] = ()) -> str:
    """The address by which the other nodes reach this one, as far as that can be known from here.

    `others` are their names; those that cannot be looked up are passed over. Then the way to anywhere; then the first
    interface, as in a cluster that leads nowhere else. The loopback is left where all nodes are on one machine.
    """
    for name in others:
        with suppress(OSError, UnicodeError):
            found = address_towards(str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_DGRAM)[0][4][0]))
            if found and not found.startswith("127."):
                return found
    return address_towards(_ELSEWHERE) or next(_interfaces(), LOOPBACK)


def listening(host: str | None, names: Sequence[str]) -> tuple[socket.socket, str]:
    """A socket that other machines reach, and the address by which they do: `host`, or what can be found out."""
    listener = socket.create_server(("", 0), backlog=1024)
    if host is None:
        return listener, own_address(names[1:])
    try:
        address = str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (OSError, UnicodeError) as error:
        listener.close()
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"--master-addr {host}: expected an IPv4 address or a name of this machine ({why})") from None
    return listener, address


def _interfaces() -> Iterator[str]:
    """The address of each interface that has one, but the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                asked = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(asked[20:24])
                if not address.startswith("127."):
                    yield address
