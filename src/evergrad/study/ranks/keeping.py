"""The group of ranks that a worker keeps warm between trials; one at a time, since idle ranks hold memory."""

from __future__ import annotations

from pathlib import Path

from evergrad.study.ranks.group import RankGroup

_kept: dict[tuple[int, str, bool], RankGroup] = {}


def warm_group(ranks: int, device: str, *, pinned: bool = False, folder: Path | None = None) -> RankGroup:
    """The group of that kind: the one that is there, or a new one in its place."""
    key = ranks, device, pinned
    found = _kept.get(key)
    if found is None or found.is_over:
        end_groups()
        found = _kept[key] = RankGroup(ranks, device=device, pinned=pinned, folder=folder)
    return found


def end_groups() -> None:
    """End all ranks that this process keeps warm."""
    for group in _kept.values():
        group.end()
    _kept.clear()
