"""Files that had to be rewritten: which bytes were there before, and how to bring them back."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from evergrad.errors import DamagedFile
from evergrad.formats.data_file import file_errors
from evergrad.injection.log import FileChange, Image
from evergrad.injection.patches import sha256

_BYTES = 1 << 22
_GAP = 256  # ranges that are closer than this are kept as one


def rewritten(old: Path, new: Path, name: str) -> FileChange | None:
    """What became of a file: the bytes that changed, as they were; None if it is the same."""
    images: list[Image] = []
    before, after = hashlib.sha256(), hashlib.sha256()
    size = size_after = 0
    with file_errors(old), old.open("rb") as first, new.open("rb") as second:
        while True:
            a, b = first.read(_BYTES), second.read(_BYTES)
            before.update(a)
            after.update(b)
            if a:
                images += _differences(a, b, size)
            size, size_after = size + len(a), size_after + len(b)
            if not a and not b:
                break
    if not images and size == size_after:
        return None
    digests = before.hexdigest(), after.hexdigest()
    return FileChange(
        name=name,
        size=size,
        before=digests[0],
        after=digests[1],
        rewritten=True,
        size_after=size_after,
        images=tuple(images),
        full_before=digests[0],
        full_after=digests[1],
    )


def restored(path: Path, change: FileChange) -> None:
    """Bring the bytes of a copy back to what they were; `DamagedFile` if that does not give the old file."""
    with file_errors(path, "cannot be written"), path.open("r+b") as file:
        file.truncate(change.size)
        for image in change.images:
            file.seek(image.offset)
            file.write(image.old)
    found = sha256(path)
    if found != change.before:
        raise DamagedFile(path, "cannot be brought back", expected=change.before, found=found)


def _differences(a: bytes, b: bytes, offset: int) -> list[Image]:
    """The ranges of `a` that `b` has not, with small gaps closed."""
    common = min(len(a), len(b))
    here = np.frombuffer(a, np.uint8, common) != np.frombuffer(b, np.uint8, common)
    places = np.flatnonzero(here)
    if len(a) > common:
        places = np.append(places, np.arange(common, len(a)))
    if not len(places):
        return []
    cuts = np.flatnonzero(np.diff(places) > _GAP)
    starts = places[np.append(0, cuts + 1)]
    stops = places[np.append(cuts, len(places) - 1)] + 1
    return [Image(offset + int(s), a[int(s) : int(e)]) for s, e in zip(starts, stops, strict=True)]
