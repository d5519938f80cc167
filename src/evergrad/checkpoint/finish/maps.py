"""Arenas as the agent sees them: mapped for reading, and kept mapped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from evergrad.checkpoint.arena import ArenaFiles, populate
from evergrad.errors import TierError
from evergrad.formats.data_file import open_regular


class ArenaMaps:
    """The maps of a node's arenas. Faulting one in costs as much as hashing it, so it is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}

    def view(self, files: ArenaFiles, size: int) -> memoryview:
        """The bytes of an arena of that size."""
        fd = open_regular(files.shard)
        try:
            status = os.fstat(fd)
            if status.st_size != size:
                raise TierError(f"{files.shard}: has {status.st_size} bytes, {size} were announced")
            inode, kept = self._maps.get(files.shard.name, (0, None))
            if kept is None or inode != status.st_ino or len(kept) != size:
                kept = mmap.mmap(fd, size, prot=mmap.PROT_READ)
                populate(kept)
                self._maps[files.shard.name] = (status.st_ino, kept)
            return memoryview(kept)
        finally:
            os.close(fd)

    def drop_replaced(self) -> None:
        """Let go of arenas that were replaced or removed: a map would keep their memory."""
        for name, (inode, _) in list(self._maps.items()):
            path = self._folder / name
            if not path.exists() or path.stat().st_ino != inode:
                del self._maps[name]
