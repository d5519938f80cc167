"""Arenas that a GPU writes to by itself.

Memory that the driver knows (`cudaHostRegister`) is copied to at the full speed of the bus, and without a thread that
stands by. Making it known takes half a second a gigabyte, so it is done once for each arena, not for each save.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import torch

_log = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of this process
_told: set[str] = set()


class Pinned:
    """A mapped buffer that the driver knows, or would not take. Holds on to the buffer until `close`."""

    def __init__(self, buffer: mmap.mmap, device: torch.device) -> None:
        """Make a buffer known, by way of a device that is in use already. Never raises: see `ok`."""
        self.buffer: mmap.mmap | None = buffer
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        why = _apart(whole.data_ptr(), len(buffer), device)
        self.ok = why is None
        """Whether copies into it need not be waited for."""
        if why is not None and why not in _told:
            _told.add(why)
            _log.warning(
                "an arena of %.3f GB cannot be registered with the CUDA driver (%s): saves from the GPU work, but "
                "make training wait for the copy",
                len(buffer) / 1e9,
                why,
            )
        # The memory must not be unmapped before the driver has let go of it.
        self._release = weakref.finalize(self, _release, whole, device, os.getpid(), self.ok)
        self._release.atexit = False  # the driver itself lets go of everything

    def close(self) -> None:
        """Let go of the buffer; nothing may be on its way into it."""
        self.ok = False
        self.buffer = None
        self._release()


def _release(whole: torch.Tensor, device: torch.device, pid: int, known: bool) -> None:
    if not known or os.getpid() != pid:  # a forked child has neither the memory nor the driver
        return
    why = _guarded(lambda: _unregister(whole.data_ptr(), device))
    if why is not None:
        _log.warning("an arena cannot be taken back from the CUDA driver (%s): its memory stays in use", why)


def _apart(address: int, size: int, device: torch.device) -> str | None:
    """Register from a thread of its own; why not, or None.

    The driver notes a refusal as this thread's last error, and torch would raise it at the next kernel it launches.
    """
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_guarded(lambda: _register(address, size, device))))
    thread.start()
    thread.join()
    return found[0]


def _guarded(call: Callable[[], str | None]) -> str | None:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _register(address: int, size: int, device: torch.device) -> str | None:
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(address, size, _PORTABLE)
        return None if int(code) == 0 else f"{int(code)}: {runtime.cudaGetErrorString(code)}"


def _unregister(address: int, device: torch.device) -> str | None:
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostUnregister(address)
        return None if int(code) == 0 else f"{int(code)}: {runtime.cudaGetErrorString(code)}"
