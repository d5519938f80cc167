"""The network of this process, gone as if its cable were pulled: nothing comes in, nothing goes out, nobody is told.

Needs no privilege. Every TCP socket of the process gets a filter that drops what arrives (a classic BPF program that
accepts nothing); a filter sees only what comes in, so connections also get a key for signed segments (RFC 2385) that
the other end does not have: its kernel drops, without an answer, whatever we send, down to the FIN of a process that
is killed meanwhile. Connections stay established: when the key and the filter are gone, both ends send again what was
not acknowledged, and the streams go on where they were.

What is opened during a cut is found within moments and cut too; whoever connects can ask `is_cut` first. What had
arrived before can still be read. Other sockets (Unix, UDP) are left alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_log = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_TCP_MD5SIG = 14
_KEY = b"evergrad"
_SWEEP_S = 0.02
# One instruction, `ret #0`: keep no byte of the packet.
_NOTHING = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0), 8)
_PROGRAM = struct.pack("@HP", 1, ctypes.addressof(_NOTHING))

_lock = threading.Lock()
_present: _Cut | None = None


def is_cut() -> bool:
    """Whether the network of this process is gone: no new connection may be made."""
    return _present is not None


def await_healed(timeout_s: float) -> bool:
    """Wait until the network is there; False if it still is not when the time is over. As connecting would."""
    present = _present
    return present is None or present.healed.wait(timeout_s)


def cut(for_s: float | None = None, *, healed: Callable[[], None] | None = None) -> None:
    """Cut the network, for so many seconds or for good; `healed` is called, by another thread, when it is back.

    A cut during a cut takes its place: it lasts as long as the later one says.
    """
    global _present  # noqa: PLW0603 (a process has one network)
    with _lock:
        if _present is None:
            _present = _Cut()
            _present.sweep()
            _present.thread.start()
        _present.until = None if for_s is None else time.monotonic() + for_s
        if healed is not None:
            _present.tells.append(healed)


def heal() -> None:
    """Bring the network back at once. Where nothing is cut, nothing happens."""
    global _present
    with _lock:
        present, _present = _present, None
        if present is not None:
            present.undo()
    if present is not None:
        for tell in present.tells:
            tell()


class _Cut:
    """The sockets that are cut, by what tells them from all others, and the thread that looks for more."""

    def __init__(self) -> None:
        self.until: float | None = None
        self.tells: list[Callable[[], None]] = []
        self.healed = threading.Event()
        self.thread = threading.Thread(target=self._run, name="evergrad-cut", daemon=True)
        # Copies of our own: whoever closes a socket meanwhile has its number taken by something else.
        self._copies: dict[str, socket.socket] = {}
        self._signed: set[str] = set()
        self._has_warned = False

    def _run(self) -> None:
        while not self.healed.wait(_SWEEP_S):
            if self.until is not None and time.monotonic() >= self.until:
                heal()
                return
            with _lock:
                if not self.healed.is_set():
                    self.sweep()

    def sweep(self) -> None:
        """Cut every TCP socket that is not cut yet."""
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:") and link not in self._signed:
                    self._take(int(name), link)

    def _take(self, fd: int, link: str) -> None:
        copy = self._copies.get(link)
        if copy is None:
            copy = socket.socket(fileno=os.dup(fd))
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                copy.close()
                return
            copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _PROGRAM)
            self._copies[link] = copy
        try:
            peer = _address(copy.family, copy.getpeername())
        except OSError:  # it listens, or is not connected yet
            return
        self._signed.add(link)
        try:
            copy.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG, _signature(peer, _KEY))
        except OSError as error:
            if not self._has_warned:
                _log.warning("the network is cut one way only: this kernel signs no segments (%s)", error.strerror)
            self._has_warned = True

    def undo(self) -> None:
        """Let everything through again."""
        self.healed.set()
        for link, copy in self._copies.items():
            with suppress(OSError):
                if link in self._signed:
                    peer = _address(copy.family, copy.getpeername())
                    copy.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG, _signature(peer, b""))
            with suppress(OSError):
                copy.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
            copy.close()
        self._copies.clear()


def _address(family: int, peer: tuple[str, int, int, int] | tuple[str, int]) -> bytes:
    """A peer as the kernel's sockaddr_storage."""
    packed = socket.inet_pton(family, peer[0].partition("%")[0])
    port = struct.pack("!H", peer[1])
    if family == socket.AF_INET:
        return (struct.pack("=H", family) + port + packed).ljust(128, b"\0")
    scope = peer[3] if len(peer) == 4 else 0
    return (struct.pack("=H", family) + port + b"\0" * 4 + packed + struct.pack("=I", scope)).ljust(128, b"\0")


def _signature(peer: bytes, key: bytes) -> bytes:
    """The kernel's tcp_md5sig; an empty key takes the one that is there away."""
    return peer + struct.pack("=BBHi", 0, 0, len(key), 0) + key.ljust(80, b"\0")
