"""Schedules in files: TOML by words or tables, and traces of what happened elsewhere, as CSV.

A trace has a header and a row for each failure; `time` is in seconds since its beginning, `node` a name or a number:

    time,node,kind,for
    12.5,0,kill,
    80,n1,stop,3

Further columns are further words of the grammar, and an empty cell is a word that is not there.
"""

from __future__ import annotations

import csv
import io
import tomllib
from os import PathLike
from pathlib import Path
from typing import Any

from evergrad._files import read_small
from evergrad.errors import DamagedFile, FileAccessError, UsageError, reason, said
from evergrad.recovery.failures.schedule import KINDS, TARGETS, WORDS, Failure, read_words
from evergrad.wording import checked_choice, did_you_mean, short_repr

_COLUMNS = ("kind", *(word for word in WORDS if word != "step"))


def read_toml(path: str | PathLike[str]) -> list[str | Failure]:
    """Lines as they are, or the failures of tables."""
    table = _toml(Path(path))
    try:
        for key in table:
            if key not in ("failures", "failure"):
                raise UsageError(f"unknown key {short_repr(key)}.{did_you_mean(key, ('failures', 'failure'))}")
        if len(table) != 1:
            raise UsageError(f"expected either failures = […] or [[failure]], found {'both' if table else 'none'}")
        ((key, rows),) = table.items()
        kind, what = (str, "texts") if key == "failures" else (dict, "tables, each under [[failure]]")
        if not isinstance(rows, list) or not all(isinstance(row, kind) for row in rows):
            raise UsageError(f"{key}: expected a list of {what}, found {short_repr(rows)}")
        return rows if key == "failures" else [_of_table(number, row) for number, row in enumerate(rows, 1)]
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def read_trace(path: str | PathLike[str], speed: float = 1.0) -> list[Failure]:
    """The failures of a trace, in its order; at `speed` 60 an hour of it takes a minute, and so do its durations."""
    if not isinstance(speed, (int, float)) or isinstance(speed, bool) or not 0 < speed < 1e9:
        raise UsageError(f"trace: speed: expected a number above 0, found {short_repr(speed)}")
    try:
        rows = list(csv.reader(io.StringIO(_bytes(Path(path)).decode("utf-8-sig"), newline=""), strict=True))
    except (ValueError, csv.Error) as error:
        raise DamagedFile(path, f"is no CSV: {said(error)}") from None
    if not rows:
        raise UsageError(f"{path}: expected the header time,node,kind, found nothing")
    header = [name.strip().lower() for name in rows[0]]
    if wrong := _wrong_header(header):
        raise UsageError(f"{path}: row 1: {wrong}")
    found = []
    for number, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        try:
            found.append(_of_row(header, row, speed))
        except UsageError as error:
            raise UsageError(f"{path}: row {number}: {error}") from None
    return found


def _wrong_header(header: list[str]) -> str:
    for name in header:
        if name not in _COLUMNS:
            return (
                f"unknown column {short_repr(name)}: expected time,node,kind and more words."
                f"{did_you_mean(name, _COLUMNS)}"
            )
        if header.count(name) > 1:
            return f"column {name} is there twice"
    if "time" not in header or "kind" not in header or not set(TARGETS) & set(header):
        return f"expected the header time,node,kind, found {short_repr(','.join(header))}"
    return ""


def _of_row(header: list[str], row: list[str], speed: float) -> Failure:
    if len(row) != len(header):
        raise UsageError(f"expected {len(header)} cells, found {len(row)}")
    cells = {name: cell.strip() for name, cell in zip(header, row, strict=True) if cell.strip()}
    kind = cells.pop("kind", "")
    checked_choice("kind", kind, KINDS)
    words = read_words(f"{name}={cell}" for name, cell in cells.items())
    for name in ("time", "for"):
        if isinstance(words.get(name), float):
            words[name] = round(words[name] / speed, 6)
    if "time" not in words:
        raise UsageError("time is missing: expected seconds since the beginning")
    return Failure.of(kind, words)


def _of_table(number: int, table: dict[str, Any]) -> Failure:
    try:
        words = dict(table)
        kind = words.pop("kind", "")
        checked_choice("kind", kind, KINDS)
        return Failure.of(kind, words)
    except UsageError as error:
        raise UsageError(f"failure {number}: {error}") from None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_bytes(path).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"is no TOML: {said(error)}") from None


def _bytes(path: Path) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from None
