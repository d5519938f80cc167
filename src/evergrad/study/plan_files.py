"""Plans as TOML: which tables and keys there are, and the line of each, so that a wrong one can be pointed at."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from evergrad._files import read_small
from evergrad.errors import FileAccessError, UsageError, reason
from evergrad.wording import did_you_mean, short_repr

GALLERY = "evergrad.study.gallery"

_MOST_BYTES = 1 << 20
_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"""^\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_.-]+))\s*=""")
_PARTS = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^.\s]+))\s*(?:\.|$)""")


LocatedValues: TypeAlias = "Mapping[str, tuple[Any, tuple[str, ...]]]"
"""Values by key, and where each is written."""


@dataclass(frozen=True, slots=True)
class PlanText:
    """A plan as it was written."""

    name: str
    """What errors call it: the file's path."""
    text: str
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    """From the path of a table or a key to its line."""
    base: str = ""
    """The folder that paths in it start from: the plan's own; empty for the gallery, which names none."""

    def fail(self, place: tuple[str, ...], message: str) -> NoReturn:
        """Say what is wrong, and in which line: that of the key, or of what it is in."""
        raise UsageError(f"{self.name}{self.where(place)}: {message}")

    def where(self, place: tuple[str, ...]) -> str:
        """`, line 7`, if it is in the text at all."""
        for length in range(len(place), 0, -1):
            if line := self.lines.get(place[:length]):
                return f", line {line}"
        return ""

    def table(self, *place: str) -> Mapping[str, Any]:
        """A table; empty if there is none."""
        found: Any = self.values
        for depth, name in enumerate(place, 1):
            found = found.get(name, {})
            if not isinstance(found, Mapping):
                self.fail(place[:depth], f"{'.'.join(place[:depth])}: expected a table, found {short_repr(found)}")
        table: Mapping[str, Any] = found
        return table

    def check_keys(self, place: tuple[str, ...], known: list[str]) -> None:
        """Every key of a table is one of these."""
        for key in self.table(*place):
            if key not in known:
                table = f"[{'.'.join(place)}]" if place else "a plan"
                allowed = ", ".join(known)
                self.fail(
                    (*place, key),
                    f"unknown key {short_repr(key)} in {table}.{did_you_mean(key, known)} Allowed: {allowed}",
                )


def gallery() -> list[str]:
    """The names of the studies that come with Evergrad."""
    found = (one.name for one in resources.files(GALLERY).iterdir() if one.name.endswith(".toml"))
    return sorted(name.removesuffix(".toml") for name in found)


def read_plan_text(name_or_path: str | Path) -> PlanText:
    """A study of the gallery by its name, or a plan in a file."""
    known = gallery()
    if isinstance(name_or_path, str) and name_or_path in known:
        text = (resources.files(GALLERY) / f"{name_or_path}.toml").read_text(encoding="utf-8")
        return parse(text, name_or_path)
    path = Path(name_or_path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path}: is larger than any plan: expected at most {_MOST_BYTES:,} bytes")
        text = read_small(path).decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        hint = f"{did_you_mean(str(path), known)} The gallery has {', '.join(known)}."
        raise UsageError(f"{path}: neither a study of the gallery nor a file.{hint}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is no text in UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
    return parse(text, str(path), str(path.absolute().parent))


def parse(text: str, name: str, base: str = "") -> PlanText:
    """TOML, with the line of each key."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name}: {error}. A plan is TOML; 'evergrad study show bitflip-nev' shows one.") from None
    except RecursionError:
        raise UsageError(f"{name}: is nested more deeply than any plan") from None
    return PlanText(name, text, values, _lines(text), base)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Where tables and keys begin. Lines inside of a longer value may look like keys: the first that fits counts."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _split(header[1])
            for length in range(1, len(table) + 1):
                found.setdefault(table[:length], number)
        elif key := _KEY.match(line):
            dotted = _split(line[: key.end() - 1])
            for length in range(1, len(dotted) + 1):
                found.setdefault((*table, *dotted[:length]), number)
    return found


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(next(part for part in match.groups() if part is not None) for match in _PARTS.finditer(dotted))
