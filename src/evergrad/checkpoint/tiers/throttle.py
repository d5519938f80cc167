"""A budget of bytes per second for everything that a process uploads to one place."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable

from evergrad.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b(?:ytes)?\s*/\s*s(?:ec)?\s*", re.IGNORECASE)
_shared: dict[tuple[int, str, float], Throttle] = {}
_lock = threading.Lock()


class Throttle:
    """Lets so many bytes a second pass, averaged over the last second or the largest piece."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        """Wait until the bytes before these are paid for; what comes next will wait for these."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + size_bytes / self._rate
        if begin > now:
            self._sleep(begin - now)


def shared_throttle(url: str, bytes_per_s: float | None) -> Throttle | None:
    """The one budget of this process for a URL."""
    if bytes_per_s is None:
        return None
    with _lock:
        return _shared.setdefault((os.getpid(), url, bytes_per_s), Throttle(bytes_per_s))


def parse_bandwidth(value: float | str | None) -> float | None:
    """Bytes per second.

    >>> parse_bandwidth("50 MB/s"), parse_bandwidth("1.5 GiB/s"), parse_bandwidth(1000)
    (50000000.0, 1610612736.0, 1000.0)
    """
    if value is None:
        return None
    rate = 0.0
    if isinstance(value, str):
        if found := _TEXT.fullmatch(value):
            rate = float(found[1]) * _UNITS[(found[2] or "").lower()]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        rate = float(value)
    if not 0 < rate < float("inf"):
        raise UsageError(f"bandwidth={value!r}: expected bytes per second, such as 5e7 or '50 MB/s'")
    return rate
