"""Settings files of the published injector: YAML, TOML or JSON, read within bounds; nothing in them is executed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evergrad.errors import DamagedFile, UsageError, said
from evergrad.formats.data_file import file_errors, open_file
from evergrad.wording import install_hint

_MAX_BYTES = 1 << 20
_MAX_VALUE = 4096
_MAX_DEPTH = 8
_HUGE = 1 << 128


def read_settings(path: Path) -> Mapping[Any, Any]:
    """The table that a file holds, by its ending."""
    kinds = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML", ".json": "JSON"}
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"{path}: expected settings that end in {', '.join(kinds)}, found {path.suffix!r}")
    with file_errors(path), open_file(path) as file:
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise UsageError(f"{path}: expected settings of at most {_MAX_BYTES:,} bytes, found more")
    try:
        text = raw.decode("utf-8-sig")
        table = _yaml(path, text) if kind == "YAML" else tomllib.loads(text) if kind == "TOML" else json.loads(text)
    # PyYAML raises any of these where a value is tagged as what it is not.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFile(path, f"is not {kind}: {said(error) or type(error).__name__}") from None
    if not isinstance(table, dict):
        raise DamagedFile(path, "holds no settings", expected="names with values", found=found_text(table))
    return table


def found_text(value: object) -> str:
    """What was found, in few words, however large it is."""
    if isinstance(value, (str, bool, float)) or (isinstance(value, int) and abs(value) < _HUGE):
        return f"{value!r:.100}"
    kinds = {type(None): "nothing", int: "a huge number", list: "a list", tuple: "a list", dict: "a table"}
    return kinds.get(type(value), type(value).__name__)


def _yaml(path: Path, text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise UsageError(f"{path}: is YAML, and pyyaml is not installed. {install_hint('yaml')}") from None
    try:
        depth = 0
        for token in yaml.scan(text, Loader=yaml.SafeLoader):  # what takes memory or time out of proportion
            depth += isinstance(token, (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken))
            depth -= isinstance(token, (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken))
            long = isinstance(token, yaml.ScalarToken) and len(token.value) > _MAX_VALUE
            if long or depth > _MAX_DEPTH or isinstance(token, yaml.AliasToken):
                found = "an alias, deep nesting or a very long value"
                raise DamagedFile(path, "is no settings file", expected="names with values", found=found)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise DamagedFile(path, f"is not YAML{line}: {getattr(error, 'problem', None) or error}") from None
