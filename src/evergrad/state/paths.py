"""One address space for every format: keys of nested containers joined by `/`.

A `/` inside a key is written `%2F` and a `%` is written `%25`, so that a path always splits back into its
keys. What a key was (an int or a string) is in the skeleton, not in the path.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = "."
"""The path of a tensor that has no name because it is the whole state."""

MAX_PATH_CHARS = 4096


def escape(key: str) -> str:
    """A key as one segment of a path.

    >>> escape("a/b"), escape("100%")
    ('a%2Fb', '100%25')
    """
    if "%" in key or "/" in key:
        return key.replace("%", "%25").replace("/", "%2F")
    return key


def unescape(segment: str) -> str:
    """The key that a segment stands for."""
    return segment.replace("%2F", "/").replace("%25", "%") if "%" in segment else segment


def join(parent: str | None, segment: str) -> str:
    """The path of an escaped segment below a parent; None is the root."""
    return segment if parent is None else f"{parent}/{segment}"


def split(path: str) -> list[str]:
    """The keys of a path, unescaped."""
    return [unescape(segment) for segment in path.split("/")]


def _written(key: object) -> str:
    """A key as text; a tuple of long strings is not worth writing out, its path would be refused anyway."""
    if isinstance(key, tuple) and sum(len(part) for part in key if isinstance(part, (str, bytes))) > MAX_PATH_CHARS:
        return "(" + "…" * MAX_PATH_CHARS
    return str(key)


def segments(keys: Iterable[object]) -> dict[object, str]:
    """A distinct segment for each key of one dict.

    Strings keep their own name. Any other key is written as `str` writes it, and carries its type when a
    string already has that name: `{1: …, "1": …}` gives `1%int` and `1`.
    """
    keys = list(keys)
    named: dict[object, str] = {key: escape(key) for key in keys if isinstance(key, str)}
    if len(named) == len(keys):
        return named
    taken = set(named.values())
    for key in keys:
        if not isinstance(key, str):
            named[key] = segment_beside(taken, key)
    return named


def segment_beside(taken: set[str], key: object) -> str:
    """The segment for a key that is no string, beside others that are `taken`; it is added to them."""
    segment = escape(key.decode("latin-1") if isinstance(key, bytes) else _written(key))
    if segment in taken:
        # Unambiguous: a literal % in a key would have been written %25.
        segment = f"{segment}%{type(key).__name__}"
    taken.add(segment)
    return segment
