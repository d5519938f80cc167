"""A client of the launcher's store, that can be made to give up."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evergrad.recovery.sockets import Sockets

__all__ = ["StoreClient"]

_FOREVER = timedelta(days=365)


class StoreClient:
    """One connection to the store. A call that waits holds it: whoever waits long has one of its own.

    After `cut`, also by another thread, every call fails with a RuntimeError, those under way too.
    """

    def __init__(self, host: str, port: int, *, prefix: str = "evergrad", hosts: bool = False) -> None:
        self.host, self.port = host, port
        self._sockets = Sockets(port)
        with self._sockets.opening():
            tcp = TCPStore(host, port, None, hosts, timedelta(seconds=60), False)
        tcp.set_timeout(_FOREVER)
        self.store: Store = PrefixStore(prefix, tcp)

    def set(self, key: str, text: str) -> None:
        """Set a key."""
        self.store.set(key, text)

    def get(self, key: str) -> str:
        """A key's text; waits until there is one."""
        return self.store.get(key).decode()

    def has(self, *keys: str) -> bool:
        """Whether all of these keys are there."""
        return self.store.check(list(keys))

    def find(self, key: str) -> str | None:
        """A key's text, if it is there."""
        return self.get(key) if self.has(key) else None

    def claim(self, key: str, text: str) -> str:
        """Set a key that has no text yet; the text that it has then, for all alike."""
        return self.store.compare_set(key, "", text).decode()

    def wait(self, key: str) -> None:
        """Wait until a key is there."""
        self.store.wait([key], _FOREVER)

    def cut(self) -> None:
        """Make whoever waits here, and every later call, fail."""
        self._sockets.cut()
