"""Where else a job can begin from: another job's run folder, the URL of a persistent tier, a DCP folder."""

from __future__ import annotations

import os
from pathlib import Path

from evergrad.checkpoint.catalogue.pins import Pins, resolve
from evergrad.checkpoint.catalogue.survey import find_home, reached, sites
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Store, Tier, Torn, Work
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError, UsageError


def is_dcp_folder(source: str | os.PathLike[str]) -> bool:
    """Whether this is a checkpoint of torch.distributed.checkpoint."""
    return "://" not in os.fspath(source) and Path(source, ".metadata").is_file()


def named_version(text: str, run_dir: Path | None, usable: list[Version]) -> Version:
    """The version that a name, a tag or a step in words stands for; of another job, whose tags are its own, a name."""
    if run_dir is not None:
        return resolve(text, usable, Pins(run_dir).tags(), usable)
    known = Version.parse(text)
    if known is None:
        raise UsageError(f"version={text!r}: of another job, expected a step, or a name such as {Version(120, 1).name}")
    return known


def stores_of(source: str | os.PathLike[str], tiers: list[Tier]) -> tuple[str, dict[str, Store]]:
    """Another job, and its tiers as far as they are seen here, nearest first.

    `tiers` are this job's: one with the same URL, or in the same bucket, has the settings that it takes to get in.
    """
    text = os.fspath(source)
    home = find_home(text, tiers if "://" in text else ())
    stores: dict[str, Store] = {}
    for tier in (reached(each, tiers) for each in home.tiers):
        parts = [tier.store(site) for site in sites(home, tier)]
        known = stores.get(tier.kind)
        if parts:
            parts = parts if known is None else [known, *parts]
            stores[tier.kind] = _Several(parts) if len(parts) > 1 else parts[0]
    return home.job, stores


class _Several(Store):
    """The same tier on several nodes, or in several places, to read from."""

    def __init__(self, parts: list[Store]) -> None:
        self._parts = parts
        self._homes: dict[Copy, Store] = {}

    def check(self) -> None:
        for part in self._parts:
            part.check()

    def put(self, work: Work) -> None:
        raise TierError(f"{work.version}: another job's tier is only read from")

    def find(self, rank: int | None = None) -> list[Copy]:
        found = {copy: part for part in self._parts for copy in part.find(rank)}
        self._homes |= found
        return list(found)

    def read_manifest(self, copy: Copy, *, digests: bool = True) -> Manifest:
        return self._homes[copy].read_manifest(copy, digests=digests)

    def fetch(self, copy: Copy, folder: Path) -> Copy:
        return self._homes[copy].fetch(copy, folder)

    def torn(self, rank: int) -> dict[Version, Torn]:
        return {version: torn for part in self._parts for version, torn in part.torn(rank).items()}

    def drop(self, copy: Copy) -> None:
        raise TierError(f"{copy.version}: another job's tier is only read from")
