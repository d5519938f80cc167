"""The launcher's store as ranks and launcher use it: every value sealed, and a client that can be made to give up."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from evergrad._wire import Secret
from evergrad.recovery.failures.network import await_healed
from evergrad.recovery.sockets import Sockets

PREFIX = "evergrad"
"""Of all our keys: a script's own process groups are in the same store."""
_FOREVER = timedelta(days=365)
_CONNECT = timedelta(seconds=60)


class SignedStore:
    """Texts in a store, by name. `Forged` where a value is not of this job; without a secret nothing is sealed."""

    def __init__(self, store: Store, secret: Secret | None) -> None:
        self.store, self._secret = store, secret

    def set(self, key: str, text: str) -> None:
        """Set a key."""
        self.store.set(key, self._seal(key, text))

    def set_all(self, texts: Mapping[str, str]) -> None:
        """Set many keys in one go."""
        store: Any = self.store  # torch's annotations do not know of this
        store.multi_set(list(texts), [self._seal(key, text) for key, text in texts.items()])

    def get(self, key: str) -> str:
        """A key's text; waits until there is one."""
        return self._open(key, self.store.get(key))

    def find(self, key: str) -> str | None:
        """A key's text, if it is there."""
        return self.get(key) if self.store.check([key]) else None

    def has(self, *keys: str) -> bool:
        """Whether all of these keys are there, and of this job."""
        if not self.store.check(list(keys)):
            return False
        for key in keys:
            self.get(key)
        return True

    def claim(self, key: str, text: str) -> str:
        """Set a key that has no text yet; the text that it has then, for all alike."""
        return self._open(key, self.store.compare_set(key, "", self._seal(key, text)))

    def _seal(self, key: str, text: str) -> Any:  # bytes, which torch takes for a text
        return text if self._secret is None else self._secret.seal(key, text.encode())

    def _open(self, key: str, found: bytes) -> str:
        return (found if self._secret is None else self._secret.open(key, found)).decode()


class StoreClient(SignedStore):
    """One connection to the store. A call that waits holds it: whoever waits long has one of its own.

    After `cut`, also by another thread, every call fails with a RuntimeError, those under way too.
    """

    def __init__(
        self, host: str, port: int, *, secret: Secret | None, prefix: str = PREFIX, hosts: bool = False
    ) -> None:
        self.host, self.port = host, port
        await_healed(_CONNECT.total_seconds())
        self._sockets = Sockets(port)
        with self._sockets.opening():
            tcp = TCPStore(host, port, None, hosts, _CONNECT, False)
        tcp.set_timeout(_FOREVER)
        super().__init__(PrefixStore(prefix, tcp), secret)

    def reconnect(self) -> StoreClient:
        """Another connection to the same store."""
        return StoreClient(self.host, self.port, secret=self._secret)

    def meeting(self, name: str) -> Store:
        """Where the members of a group find each other's addresses."""
        inside = PrefixStore(name, self.store)
        return inside if self._secret is None else SignedTorchStore(inside, name, self._secret)

    def wait(self, key: str) -> None:
        """Wait until a key is there."""
        self.store.wait([key], _FOREVER)

    def cut(self) -> None:
        """Make whoever waits here, and every later call, fail."""
        self._sockets.cut()


class SignedTorchStore(Store):
    """A store for a library that brings its own keys, such as gloo with the addresses of its ranks."""

    def __init__(self, store: Store, name: str, secret: Secret) -> None:
        super().__init__()
        self._store, self._name, self._secret = store, name, secret

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        sealed: Any = self._secret.seal(f"{self._name}/{key}", value if isinstance(value, bytes) else value.encode())
        self._store.set(key, sealed)

    def get(self, key: str) -> bytes:
        """A key's value; waits until there is one."""
        return self._secret.open(f"{self._name}/{key}", self._store.get(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are there."""
        self._store.wait(keys) if timeout is None else self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these are there."""
        return self._store.check(keys)
