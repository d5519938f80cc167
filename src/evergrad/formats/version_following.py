"""Which records of a version follow when tensors change: manifests, those that refer to them, and `COMMIT.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evergrad.formats.data_file import open_file
from evergrad.formats.version_records import COMMIT, MANIFEST, Record, believed, sound

_NO_ELSEWHERE = b'"elsewhere": {}'


def following(news: Mapping[Path, Mapping[str, str]]) -> list[Record]:
    """Every record that has to change, as it has to be, when tensors have other digests: by manifest, by stored name.

    They are read anew, for others may have changed them since. To be saved in this order, and after the tensors: a
    crash then leaves digests that do not hold, which a restore passes over.
    """
    touched: dict[Path, Record] = {}
    changes: dict[tuple[int, str], tuple[str, str]] = {}
    for path, digests in news.items():
        if not digests or (manifest := sound(path)) is None:
            continue
        for stored, place in (believed(manifest.digests) or {}).items():
            if stored in digests:
                manifest.put(place, digests[stored])
                changes[manifest.number("rank"), stored] = place.digest, digests[stored]
        touched[path] = manifest
    if not changes:
        return []
    folder = next(iter(touched)).parent
    for path in sharing(folder):
        record = touched.get(path) or sound(path)
        for stored, (holder, place) in ((believed(record.elsewhere) or {}) if record is not None else {}).items():
            before, after = changes.get((holder, stored), ("", ""))
            if record is not None and place.digest == before:
                touched.setdefault(path, record).put(place, after)
    altered = [(old, new) for old in touched.values() if (new := old.altered) is not None]
    commit = sound(folder / COMMIT)
    if commit is not None:
        manifests = {old.number("rank"): (old.digest, new.digest) for old, new in altered}
        for entry in believed(commit.listed) or ():
            before, after = manifests.get(entry.rank, ("", ""))
            if entry.manifest.digest == before:
                commit.put(entry.manifest, after)
    last = commit.altered if commit is not None else None
    return [*(new for _, new in altered), *([last] if last is not None else [])]


def sharing(folder: Path) -> list[Path]:
    """Manifests that name tensors as held by another rank."""
    beside = sorted(path for path in folder.iterdir() if MANIFEST.fullmatch(path.name))
    return [path for path in beside if _names_others(path)]


def is_listed(commit: Record | None, manifest: Record) -> bool:
    """Whether `COMMIT.json` is sound, and lists this manifest as it is."""
    entries = (believed(commit.listed) if commit is not None else None) or ()
    return (manifest.number("rank"), manifest.digest) in {(entry.rank, entry.manifest.digest) for entry in entries}


def _names_others(manifest: Path) -> bool:
    try:
        with open_file(manifest) as file:
            return _NO_ELSEWHERE not in file.read()
    except OSError:
        return False
