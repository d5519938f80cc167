"""Versions that retention leaves alone, and the names that people give them.

    <run folder>/catalogue/pins/v0000000120-02        a pin: its name says everything
    <run folder>/catalogue/tags/best.json             a tag: the version that it stands for

One small file each, which appears whole or not at all: several processes may pin at the same time, and a crash
leaves what was there. Looking needs no lock, and costs a listing and a short read a tag.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from evergrad import _files
from evergrad._files import open_file
from evergrad.checkpoint.catalogue.history import FOLDER
from evergrad.checkpoint.run_folder import time_now
from evergrad.checkpoint.version import Version
from evergrad.errors import FileAccessError, UsageError, nearest, reason, said
from evergrad.formats.version_records import read_record, record_bytes
from evergrad.wording import did_you_mean

_log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_LATEST = "latest"
_MAX_TAG_BYTES = 4096
_GUARDED, _GUARDED_BEFORE = "guarded", "guarded-before"


class Pins:
    """The pins and tags of a run folder. Making one touches nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._pins = run_dir / FOLDER / "pins"
        self._tags = run_dir / FOLDER / "tags"

    def pin(self, version: Version) -> None:
        """Keep a version until it is unpinned. It may be pinned already."""
        self._publish(self._pins / version.name, {"version": version.name})

    def unpin(self, version: Version) -> None:
        """Let a version go: its pin, and every tag on it."""
        for name, tagged in self.tags().items():
            if tagged == version:
                self.untag(name)
        self._remove(self._pins / version.name)

    def tag(self, version: Version, name: str) -> None:
        """Give a version a name, which pins it too; a name that another version had goes over to this one."""
        self._publish(self._tags / f"{_checked(name)}.json", {"tag": name, "version": version.name})

    def untag(self, name: str) -> None:
        """Take a name away; `UsageError` if there is none such."""
        known = self.tags()
        if name not in known and not self.is_damaged(name):
            there = ", ".join(sorted(known)) or "none"
            raise UsageError(f"there is no tag {name!r}.{did_you_mean(name, known)} There are {there}.")
        self._remove(self._tags / f"{name}.json")

    def is_damaged(self, name: str) -> bool:
        """True if there is a tag of that name which does not say what it stands for."""
        there = bool(_TAG.fullmatch(name)) and os.path.lexists(self._tags / f"{name}.json")
        return there and name not in self.tags()

    def pinned(self, tags: Mapping[str, Version] | None = None) -> set[Version]:
        """The versions that must stay: pinned, or tagged. Without `tags` they are read; a damaged one is an error."""
        found = {Version.parse(name) for name in _names(self._pins, strict=tags is None)}
        return {version for version in found if version is not None} | set(
            (self.tags(strict=True) if tags is None else tags).values()
        )

    def tags(self, *, strict: bool = False) -> dict[str, Version]:
        """The tags, by name. One that is none, or is closed, is left out with a warning, or, if strict, an error."""
        found = {}
        for entry in _names(self._tags, strict=strict):
            name, dot, ending = entry.rpartition(".")
            if not dot or ending != "json" or not _TAG.fullmatch(name):
                continue
            path = self._tags / entry
            try:
                with open_file(path) as file:
                    version = _version_of(file.read(_MAX_TAG_BYTES))
            except FileNotFoundError:
                continue  # taken away meanwhile
            except OSError as error:
                _left_out(path, error, strict=strict)
                continue
            except ValueError as error:
                if strict:
                    raise FileAccessError(path, f"is no tag: {said(error)}. Tag the version again.") from error
                _log.warning("%s: is no tag: %s. Tag the version again.", path, said(error))
                continue
            found[name] = version
        return found

    def _publish(self, path: Path, record: dict[str, object]) -> None:
        text = record_bytes({"schema_version": SCHEMA_VERSION, **record, "time": time_now()})
        try:
            for folder in (path.parent.parent, path.parent):
                if _files.make_folder(folder):
                    _files.fsync_folder(folder.parent)
            _files.publish(path, text)
        except OSError as error:
            raise FileAccessError(path, f"cannot be written: {reason(error)}") from error

    def _remove(self, path: Path) -> None:
        try:
            _files.remove(path)
            if path.parent.is_dir():
                _files.fsync_folder(path.parent)
        except OSError as error:
            raise FileAccessError(path, f"cannot be removed: {reason(error)}") from error


def keep_guarded(pins: Pins, version: Version, whole: Iterable[Version]) -> None:
    """Let retention spare the newest version that a guard vouches for, and the newest of those that is `whole`.

    A disk that is full costs that, and a warning.
    """
    try:
        before = pins.tags().get(_GUARDED)
        if before is not None and before != version and before in set(whole):
            pins.tag(before, _GUARDED_BEFORE)
        pins.tag(version, _GUARDED)
    except FileAccessError as error:
        _log.warning("%s may be retired before the next version that a guard vouches for: %s", version.name, error)


def resolve(text: str, known: Iterable[Version], tags: dict[str, Version], usable: Iterable[Version]) -> Version:
    """The version that a person means: a step, a version's name, a tag, or "latest".

    A step that several attempts have saved means the newest of them, of those that are usable if there are any.
    `UsageError`, with the nearest ones, if there is none such.

    >>> resolve("120", [Version(120, 1), Version(120, 2)], {}, []).name
    'v0000000120-02'
    """
    known, usable = set(known), set(usable)
    if text in tags:
        return tags[text]
    if text == _LATEST:
        if usable:
            return max(usable, key=Version.age)
        raise UsageError("there is no latest version: none can be restored")
    named = Version.parse(text)
    if named is not None and named in known:
        return named
    if text.isdecimal():
        found = {version for version in known if version.step == int(text)}
        if found:
            return max(found & usable or found, key=Version.age)
    raise UsageError(f"there is no version {text!r}. {_hint(text, known, tags)}")


def _hint(text: str, known: set[Version], tags: dict[str, Version]) -> str:
    if not known:
        return "There are none."
    asked = int(text) if text.isdecimal() else named.step if (named := Version.parse(text)) else None
    if asked is not None:
        close = sorted(known, key=lambda version: (abs(version.step - asked), version.step, -version.attempt))[:3]
        return f"The nearest are {', '.join(version.name for version in close)}."
    alike = nearest(text, [*tags, *(version.name for version in known), _LATEST])
    if alike:
        return f"Did you mean {' or '.join(map(repr, alike))}?"
    newest = sorted(known, key=Version.age, reverse=True)[:3]
    return f"Name a step, a version, a tag or 'latest'. There are {', '.join(version.name for version in newest)}, …"


def _version_of(data: bytes) -> Version:
    """Return the version that a tag's record names; `ValueError` says why it names none."""
    if not data.strip():
        raise ValueError("it is empty")
    try:
        version = Version.parse(str(read_record(data).get("version")))
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    if version is None:
        raise ValueError("it names no version")
    return version


def _checked(name: str) -> str:
    if not _TAG.fullmatch(name) or name.isdecimal() or name == _LATEST or Version.parse(name) is not None:
        raise UsageError(
            f"tag {name[:80]!r}: expected letters, digits, '.', '_' and '-', at most 64, and neither a number, a "
            "version's name nor 'latest'"
        )
    return name


def _names(folder: Path, *, strict: bool) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        _left_out(folder, error, strict=strict)
        return []


def _left_out(path: Path, error: OSError, *, strict: bool) -> None:
    """Warn that pins or tags are not known; an error if strict, or if this process can open no file at all."""
    if strict or error.errno in (errno.EMFILE, errno.ENFILE):
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
    _log.warning("%s: cannot be read: %s. It is left out.", path, reason(error))
