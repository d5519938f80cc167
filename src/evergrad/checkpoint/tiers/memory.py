"""The memory tier: the arena itself is the checkpoint. It survives the trainer and the agent, not a reboot."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from evergrad import _files
from evergrad._files import open_file
from evergrad.checkpoint.arena import ArenaFiles, open_files_hint
from evergrad.checkpoint.run_folder import find_arenas
from evergrad.checkpoint.shard_layout import shard_record
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers.base import Copy, Site, Store, Tier, Torn, Work
from evergrad.checkpoint.version import Version
from evergrad.errors import FormatError, TierError


class ArenaContent(NamedTuple):
    """The content of an arena as its shard's header names it; the bytes may be damaged or incomplete."""

    version: Version
    world_size: int


def read_arena_content(files: ArenaFiles, job: str) -> ArenaContent | None:
    """Return the version that an arena's header names; None if the header is damaged or another job's."""
    with suppress(FormatError, OSError, ValueError, KeyError, TypeError):
        with open_file(files.shard) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            shard = shard_record(view, files.shard)
        if (shard["job"], shard["rank"]) == (job, files.rank):
            return ArenaContent(Version(int(shard["step"]), int(shard["attempt"])), int(shard["world_size"]))
    return None


@dataclass(frozen=True, slots=True)
class Memory(Tier):
    """Keep the newest version in shared memory: no second copy, found again by the next trainer on the node.

    >>> Memory().to_json()
    {'kind': 'memory', 'keep': 1}
    """

    kind: ClassVar[str] = "memory"
    survives_reboot: ClassVar[bool] = False
    keep: int = 1

    def __post_init__(self) -> None:
        if self.keep != 1:
            raise TierError(f"Memory keeps the newest version, in one of two arenas: keep={self.keep!r} cannot be")

    def store(self, site: Site) -> Store:
        """The arenas of a job on this node."""
        return _MemoryStore(site)


class _MemoryStore(Store):
    def __init__(self, site: Site) -> None:
        self._site = site

    def check(self) -> None:
        if not self._site.arenas.is_dir():
            raise TierError(f"{self._site.arenas}: the folder of the arenas is gone")

    def put(self, work: Work) -> None:
        manifest = replace(work.manifest, generation=work.ticket.generation)
        try:
            _files.publish(work.files.manifest, manifest.to_bytes())
        except OSError as error:
            raise TierError(f"{work.files.manifest}: cannot be written: {open_files_hint(error)}") from error

    def find(self, rank: int | None = None) -> list[Copy]:
        return [copy for files in find_arenas(self._site.arenas, rank) if (copy := self._copy(files))]

    def torn(self, rank: int) -> dict[Version, Torn]:
        found = {}
        for files in find_arenas(self._site.arenas, rank, rests=True):
            ticket = files.read_ticket()
            if ticket is None:
                what = f"{files.ticket}: {'is not as it was written' if files.ticket.exists() else 'is gone'}"
                held = read_arena_content(files, self._site.job)
                try:
                    digested = Manifest.read(files.manifest, digests=False).version
                except (FormatError, FileNotFoundError):
                    digested = None
                if digested is not None and (held is None or held.version == digested):
                    found[digested] = Torn(what, was_complete=True)
                elif held is not None and held.version not in found:  # complete or not: the catalogue knows
                    stale = f"is that of {digested}" if digested is not None else "is not sound"
                    found[held.version] = Torn(f"{what}, and its manifest {stale}")
            elif ticket.captured and self._copy(files) is None:
                found[ticket.version] = Torn(f"{files.manifest}: no manifest of this capture")
        return found

    def drop(self, copy: Copy) -> None:
        # The next save overwrites the arena anyway; only its claim to be a checkpoint is taken back.
        _files.remove(copy.manifest)

    def _copy(self, files: ArenaFiles) -> Copy | None:
        ticket = files.read_ticket()
        if ticket is None or not ticket.captured:
            return None
        try:
            manifest = Manifest.read(files.manifest, digests=False)
            if manifest.generation != ticket.generation or manifest.version != ticket.version:
                return None  # of what was in the arena before
        except FileNotFoundError:
            return None  # not digested yet
        except FormatError:
            pass  # damaged: whoever reads it says so
        return Copy("memory", ticket.version, files.rank, files.shard, files.manifest, ticket.generation)
