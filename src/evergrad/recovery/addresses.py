"""By which address this machine is reached: from itself, on the way to another one, from all others."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

from evergrad.errors import UsageError

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
        raise UsageError(f"--host {host}: expected an IPv4 address or a name of this machine ({why})") from None
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
