"""A network that is cut: the other end hears nothing, and everything goes on when it is healed. Real processes."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from evergrad.recovery.failures import network

_QUIET_S = 0.3

VICTIM = """
import socket, sys, threading
from evergrad.recovery.failures import network
host, port = sys.argv[1], int(sys.argv[2])
link = socket.create_connection((host, port))
server = socket.create_server((host, 0), family=link.family)
def echo():
    while data := link.recv(100):
        link.sendall(data.upper())
threading.Thread(target=echo, daemon=True).start()
print(server.getsockname()[1], flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "cut":
        network.cut(float(rest[0]) if rest else None, healed=lambda: print("healed", flush=True))
    elif word == "heal":
        network.heal()
    elif word == "send":
        link.sendall(rest[0].encode())
    elif word == "connect":
        late = socket.create_connection((host, port))
    print(word, network.is_cut(), flush=True)
"""


def signs_segments() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        peer = network._address(one.family, one.getpeername())
        try:
            one.setsockopt(socket.IPPROTO_TCP, network._TCP_MD5SIG, network._signature(peer, b"key"))
        except OSError:
            return False
        return True


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not signs_segments(), reason="this kernel signs no segments: a cut is one-way here")


class Victim:
    """A process with a connection to this one."""

    def __init__(self, child: subprocess.Popen[str], server: socket.socket) -> None:
        self.child, self.server = child, server
        self.link, _ = server.accept()
        self.port = int(self._line())

    def _line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def tell(self, *words: object) -> str:
        """Let it do something; returns what it says."""
        assert self.child.stdin is not None
        self.child.stdin.write(" ".join(map(str, words)) + "\n")
        self.child.stdin.flush()
        return self._line()

    def hears(self) -> bytes | None:
        """What arrives here; None if nothing does, not even an end."""
        ready, _, _ = select.select([self.link], [], [], _QUIET_S)
        return self.link.recv(100) if ready else None

    def receive(self, size: int) -> bytes:
        """Wait for so much."""
        found = b""
        while len(found) < size:
            more = self.link.recv(size - len(found))
            assert more, "the other end has closed"
            found += more
        return found


@contextmanager
def victim_at(host: str) -> Iterator[Victim]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        server.settimeout(60)
        with subprocess.Popen(
            [sys.executable, "-c", VICTIM, host, str(server.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                victim = Victim(child, server)
                with victim.link:
                    yield victim
            finally:
                child.kill()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
)
def test_nothing_passes_a_cut_and_everything_arrives_when_it_is_healed(host: str) -> None:
    with victim_at(host) as victim:
        victim.link.sendall(b"a")
        assert victim.receive(1) == b"A"
        assert victim.tell("cut") == "cut True"
        victim.link.sendall(b"b")
        assert victim.tell("send", "c") == "send True"
        assert victim.hears() is None, "neither data nor an end nor an error"
        assert victim.link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        assert victim.link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) == b"\x01", "still established"
        with pytest.raises(TimeoutError):  # not refused: nobody answers
            socket.create_connection((host, victim.port), timeout=_QUIET_S)
        assert victim.tell("heal") == "healed"
        assert victim.receive(2) == b"cB", "both ways, in order"
        victim.link.sendall(b"d")
        assert victim.receive(1) == b"D"


def test_who_dies_during_a_cut_is_not_heard_to_die() -> None:
    with victim_at("127.0.0.1") as victim:
        assert victim.tell("cut") == "cut True"
        victim.child.kill()
        victim.child.wait()
        assert victim.hears() is None
    with victim_at("127.0.0.1") as victim:
        victim.child.kill()
        victim.link.settimeout(60)
        assert victim.link.recv(100) == b"", "without a cut its end is heard"


def test_a_cut_heals_by_itself_when_its_time_is_over() -> None:
    with victim_at("127.0.0.1") as victim:
        said = {victim.tell("cut", 0.2), victim._line()}  # in any order: it may be over before it is told of
        assert "healed" in said
        assert {word.split()[0] for word in said} == {"cut", "healed"}
        victim.link.sendall(b"a")
        assert victim.receive(1) == b"A"


def test_what_is_connected_during_a_cut_is_cut_too() -> None:
    with victim_at("127.0.0.1") as victim:
        assert victim.tell("cut") == "cut True"
        assert victim.tell("connect") == "connect True"  # by who did not ask first
        late, _ = victim.server.accept()
        with late:
            while not _is_signed(late):
                pass
            late.sendall(b"a")
            assert not select.select([late], [], [], _QUIET_S)[0]


def _is_signed(late: socket.socket) -> bool:
    """Whether the other end has stopped to answer: what was sent stays unacknowledged."""
    late.sendall(b"x")
    select.select([], [], [], 0.05)
    info = late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int.from_bytes(info[24:28], sys.byteorder) > 0  # tcpi_unacked


def test_other_sockets_are_left_alone_and_what_is_whole_is_not_cut() -> None:
    assert not network.is_cut()
    assert network.await_healed(0)
    network.heal()
    one, other = socket.socketpair()
    told: list[str] = []
    with one, other:
        network.cut(healed=lambda: told.append("healed"))
        try:
            assert network.is_cut()
            assert not network.await_healed(0)
            one.sendall(b"a")
            assert other.recv(1) == b"a"
            assert told == []
        finally:
            network.heal()
        assert told == ["healed"]
        assert not network.is_cut()
