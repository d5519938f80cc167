"""Removing a version by hand: what stands against it, and doing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evergrad.checkpoint.catalogue.records import CatalogueEntry
from evergrad.checkpoint.catalogue.survey import Found, Survey
from evergrad.checkpoint.locks import is_locked
from evergrad.checkpoint.version import Version
from evergrad.errors import UsageError


@dataclass(frozen=True, slots=True)
class Removal:
    """The copies that go, and those that cannot."""

    entry: CatalogueEntry
    going: tuple[Found, ...]
    held: tuple[Found, ...] = ()
    """In the memory of a running trainer: its next saves overwrite them."""
    left: tuple[str, ...] = ()
    """Damaged records of the version whose shards cannot be found through them and stay."""

    def run(self) -> None:
        """Remove them; `TierError` if that cannot be done. Each manifest goes first: a rest is no version."""
        for found in self.going:
            found.store.drop(found.copy)


def plan_removal(
    entry: CatalogueEntry, entries: Sequence[CatalogueEntry], seen: Survey, *, tier: str | None, force: bool
) -> Removal:
    """What removing a version would do; `UsageError` if it is pinned, or the last that a restore would take."""
    name = entry.version.name
    # Without a record it is no version, and yet the next restore commits what is whole.
    there = [*seen.shards.get(entry.version, []), *seen.begun.get(entry.version, [])]
    copies = [found for found in there if tier in (None, found.copy.tier)]
    begun = {found.copy.tier for found in seen.begun.get(entry.version, [])}
    damaged = seen.damaged.get(entry.version, {})
    left = tuple(why for kind, why in damaged.items() if tier in (None, kind) and kind not in begun)
    if not copies:
        where = f"in tier {tier}" if tier is not None else "left"
        why = f" that can be removed: {'; '.join(left)}. Remove that by hand." if left else ""
        raise UsageError(f"{name}: nothing of it is {where}{why}")
    if entry.pinned:
        tags = f" (tag {', '.join(entry.tags)})" if entry.tags else ""
        raise UsageError(f"{name} is pinned{tags}: unpin it first, with 'evergrad checkpoints pin … {name} --unpin'")
    usable = [each.version for each in entries if each.restorable]
    begun_whole = [each.version for each in entries if seen.is_begun(each.version, each.world_size)]
    newest = {max(versions, key=Version.age) for versions in (usable, usable + begun_whole) if versions}
    rest = {found.copy.rank for found in there if tier is not None and found.copy.tier != tier}
    stays = rest >= set(range(entry.world_size))
    if entry.version in newest and not stays and not force:
        raise UsageError(f"{name} is the newest version that can be restored: to remove it all the same, say --force")
    held = tuple(found for found in copies if _is_held(found))
    return Removal(entry, tuple(found for found in copies if found not in held), held, left)


def _is_held(found: Found) -> bool:
    """Whether a running trainer may write to the copy at any moment, with a manifest of something newer."""
    return found.copy.generation is not None and is_locked(found.copy.shard.with_suffix(".ticket"))
