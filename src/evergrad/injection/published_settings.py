"""The injector settings of the published checkpoint-alteration study (CLUSTER 2021), by their published names.

What the names say is done; what the study's own tool got wrong is not: a precision selects the tensors of that type
(others are left out, and the log says so), arrays of any number of dimensions are hit, and the seed is a number.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from evergrad._files import file_errors, open_file
from evergrad.errors import DamagedFile, UsageError, nearest, said
from evergrad.injection.faults import BitFlip, BitMask, Fault, Scale
from evergrad.wording import install_hint

# Settings files of the published injector: YAML, TOML or JSON, read within bounds; nothing in them is executed.

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


_ALIASES = {"injection_tries": "injection_attempts"}  # what the study's tool calls it


@dataclass(frozen=True, kw_only=True)
class PublishedSettings:
    """One settings file; whatever is wrong in it is one clear line when this is built.

    `injection_attempts` is a number of faults, or with `injection_type` percentage the percent (0.5 is one in 200) of
    the elements that may be hit: those of the chosen locations that have the chosen precision. (The tool takes that
    percent of all entries of the file, whatever is chosen.) Each attempt comes about with `injection_probability`.

    `corruption_mode` may be left out where its value tells: `bit_mask`, `scaling_factor`, or `first_bit` and `last_bit`
    (0 is the sign; both are included). Without any of them, every bit may flip. The `burst` bits of one fault are
    adjacent; the tool draws each anywhere in the range. `allow_sign_change` adds the sign to the bits that may flip.

    A location is drawn first, all alike, then an element of it; `locations_to_corrupt` stand for everything below them.

    >>> settings = PublishedSettings(hdf5_file="m.h5", injection_type="count", injection_attempts=3, bit_mask="1011",
    ...                              use_random_locations=True)
    >>> settings.corruption_mode, settings.to_inject()["fault"]
    ('bit_mask', BitMask(mask='1011', elements=1, stride=1))
    """

    hdf5_file: str
    """The checkpoint, of any format."""
    injection_type: Literal["count", "percentage"]
    injection_attempts: float
    injection_probability: float = 1.0
    float_precision: int | Literal["auto"] = "auto"
    corruption_mode: Literal["bit_mask", "bit_range", "scaling_factor"] | None = None
    """Never None once it is built."""
    bit_mask: str | None = None
    first_bit: int | None = None
    last_bit: int | None = None
    scaling_factor: float | None = None
    burst: int = 1
    allow_sign_change: bool = False
    allow_NaN_values: bool = False  # noqa: N815  # the published name
    locations_to_corrupt: tuple[str, ...] = ()
    use_random_locations: bool = False
    log_file_path: str | None = None
    """Ignored: the log is kept beside the result."""
    save_injection_sequence: bool = False
    injection_sequence_path: str | None = None
    seed: int | None = None
    """Ours; the tool takes the clock."""

    def __post_init__(self) -> None:
        for field in fields(self):
            expected, check = _CHECKS[field.name]
            given = getattr(self, field.name)
            if given is not None or field.default is not None:
                checked = check(given)
                if checked is None:
                    raise _wrong(field.name, expected, found_text(given))
                object.__setattr__(self, field.name, checked)
        object.__setattr__(self, "corruption_mode", self._mode())
        attempts = self.injection_attempts
        if self.injection_type == "count" and not (attempts >= 1 and attempts.is_integer()):
            raise _wrong("injection_attempts", "a whole number from 1 on", f"{attempts:g}")
        if self.injection_type == "percentage" and not 0 < attempts <= 100:
            raise _wrong("injection_attempts", "percent, above 0 and up to 100", f"{attempts:g}")
        self._check_bits()
        if not self.locations_to_corrupt and not self.use_random_locations:
            expected = _CHECKS["locations_to_corrupt"][0]
            raise UsageError(f"locations_to_corrupt is missing: expected {expected}, or use_random_locations: true")
        if self.save_injection_sequence or self.injection_sequence_path:
            name = "save_injection_sequence" if self.save_injection_sequence else "injection_sequence_path"
            raise UsageError(f"{name} is not served: every log holds its sequence, and evergrad replay repeats it")

    @classmethod
    def load(cls, path: str | PathLike[str], *, hdf5_file: str | PathLike[str] | None = None) -> PublishedSettings:
        """Read a file: YAML, TOML or JSON, by its ending; `hdf5_file` stands for the one in it. Nothing is executed."""
        table = dict(read_settings(Path(path)))
        if hdf5_file is not None:
            table["hdf5_file"] = str(hdf5_file)
        try:
            return cls.from_mapping(table)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @classmethod
    def from_mapping(cls, table: Mapping[Any, Any]) -> PublishedSettings:
        """Settings from names and values; a value of None counts as not given."""
        found: dict[str, Any] = {}
        for key, value in table.items():
            name = _ALIASES.get(key, key) if isinstance(key, str) else ""
            if name not in _CHECKS:
                known = [*_CHECKS, *_ALIASES]
                close = nearest(key[:100], known) if isinstance(key, str) else []
                hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"Known: {', '.join(known)}."
                raise UsageError(f"unknown setting {found_text(key)}. {hint}")
            if value is not None and name in found:
                raise UsageError(f"{name} is given twice, also as {' or '.join(_ALIASES)}: choose one")
            if value is not None:
                found[name] = value
        for field in fields(cls):
            if field.default is MISSING and field.name not in found:
                raise UsageError(f"{field.name} is missing: expected {_CHECKS[field.name][0]}")
        return cls(**found)

    def to_inject(self) -> dict[str, Any]:
        """The arguments of `inject` that do what these settings say; `out` or `in_place` is still to be chosen."""
        names = [name.strip("/") for name in self.locations_to_corrupt]
        everything = self.use_random_locations or "" in names  # "/" is everything too
        precisions = (16, 32, 64) if self.float_precision == "auto" else (self.float_precision,)
        percentage = self.injection_type == "percentage"
        return {
            "path": self.hdf5_file,
            "fault": self._fault(),
            **({"fraction": self.injection_attempts / 100} if percentage else {"count": int(self.injection_attempts)}),
            "probability": self.injection_probability,
            "where": None if everything else [_literally(name) for name in names],
            "sampling": "tensor",
            "dtypes": tuple(f"float{precision}" for precision in precisions),
            "allow_nonfinite": self.allow_NaN_values,
            **({"seed": self.seed} if self.seed is not None else {}),
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What the file says that has no effect, or not the one it has in the study's tool; a line each."""
        found = []
        if self.log_file_path:
            found.append("log_file_path is ignored: the log is kept beside the result")
        if self.use_random_locations and self.locations_to_corrupt:
            found.append("locations_to_corrupt is ignored: use_random_locations is true")
        if self.allow_sign_change and self.corruption_mode != "bit_range":
            found.append(f"allow_sign_change is ignored: corruption_mode is {self.corruption_mode}")
        if self.burst > 1:
            found.append("burst: the bits of a fault are adjacent here; the study's tool draws each by itself")
        return tuple(found)

    def _mode(self) -> str:
        """The mode that is stated, or that the values tell; not two of them."""
        told = {
            "bit_mask": self.bit_mask is not None,
            "scaling_factor": self.scaling_factor is not None,
            "bit_range": self.first_bit is not None or self.last_bit is not None,
        }
        given = {name for name, there in told.items() if there}
        mode: str = self.corruption_mode or next(iter(given), "bit_range")
        if len(given | {mode}) > 1:
            raise _wrong("corruption_mode", "one kind of corruption", " and ".join(sorted(given | {mode})))
        if not given and mode != "bit_range":
            raise UsageError(f"{mode} is missing: expected {_CHECKS[mode][0]}, as corruption_mode is {mode}")
        return mode

    def _check_bits(self) -> None:
        """What depends on the precision, and on each other."""
        width = 64 if self.float_precision == "auto" else self.float_precision
        if self.bit_mask is not None and len(self.bit_mask) > width:
            raise _wrong("bit_mask", f"at most the {width} bits of float_precision", f"{len(self.bit_mask)} bits")
        first, last = self.first_bit, self.last_bit
        if first is None and last is None:
            first, last = 0, width - 1
        if first is None or last is None:
            missing = "first_bit" if first is None else "last_bit"
            raise UsageError(f"{missing} is missing: expected first_bit and last_bit, or neither")
        if last >= width:
            raise _wrong("last_bit", f"a bit below {width}, as float_precision is {self.float_precision}", last)
        if first > last:
            raise _wrong("first_bit", f"at most last_bit, which is {last}", first)
        room = last - first + 1 if self.corruption_mode == "bit_range" else 1
        if self.burst > room:
            why = f"as corruption_mode is {self.corruption_mode}" if room == 1 else "the bits of the range"
            raise _wrong("burst", f"at most {room}, {why}", self.burst)
        if self.allow_sign_change and 1 < first < last:
            expected = "false, first_bit 0 or 1, or a single bit"
            raise _wrong("allow_sign_change", expected, f"the sign and bits {first} to {last}, which are not one range")

    def _fault(self) -> Fault:
        if self.bit_mask is not None:
            return BitMask(self.bit_mask)
        if self.scaling_factor is not None:
            return Scale(self.scaling_factor)
        if self.first_bit is None or self.last_bit is None:
            return BitFlip(None, self.burst)
        first, step = self.first_bit, 1
        if self.allow_sign_change and first > 0:  # bit 1 goes on to bit 0; any other is a single one, joined by bit 0
            first, step = 0, first
        return BitFlip(range(first, self.last_bit + 1, step), self.burst)


def _literally(name: str) -> str:
    """A location as `where` takes it: a name is a name, also one that reads like a pattern."""
    return rf"re:^{re.escape(name)}(?:[/.]|$)" if re.search(r"[*?\[]|^(?:re|role):", name) else name


def _number(low: float, high: float, *, whole: bool = False) -> Callable[[object], float | None]:
    def check(value: object) -> float | None:
        if isinstance(value, str):  # YAML 1.1 takes 1e-8 for text
            try:
                value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
            except ValueError:
                return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            return None
        return float(value) if not whole else int(value) if value == math.floor(value) else None

    return check


def _mask(value: object) -> str | None:
    if type(value) is int and 1 < value < 10**64:  # not quoted in YAML. 1 may have been 01, which has another width
        value = str(value)
    sound = isinstance(value, str) and len(value) <= 64 and not set(value) - set("01") and "1" in value
    return str(value) if sound else None


def _names(value: object) -> object:
    return tuple(value) if isinstance(value, (list, tuple)) and all(map(_text, value)) else None


def _text(value: object) -> object:
    return value if isinstance(value, str) and value and "\0" not in value else None


def _one_of(*choices: object) -> Callable[[object], object]:
    return lambda value: next((choice for choice in choices if value in (choice, str(choice))), None)


def _wrong(name: str, expected: str, found: object) -> UsageError:
    return UsageError(f"{name}: expected {expected}, found {found}")


_BIT = ("a bit from 0 (the sign) to 63", _number(0, 63, whole=True))
_SWITCH = ("true or false", lambda value: value if isinstance(value, bool) else None)
_PATH = ("a path", lambda value: value if isinstance(value, str) else None)
# Every setting: what is expected, and what becomes of a value; None if it is not that.
_CHECKS: dict[str, tuple[str, Callable[[object], object]]] = {
    "hdf5_file": ("the path of a checkpoint", _text),
    "injection_type": ("count or percentage", _one_of("count", "percentage")),
    "injection_attempts": ("a number, of faults or of percent", _number(-sys.maxsize, sys.maxsize)),
    "injection_probability": ("a number from 0 to 1", _number(0, 1)),
    "float_precision": ("16, 32, 64 or auto", _one_of(16, 32, 64, "auto")),
    "corruption_mode": ("bit_mask, bit_range or scaling_factor", _one_of("bit_mask", "bit_range", "scaling_factor")),
    "bit_mask": ("up to 64 zeros and ones in quotes, such as '101101', with at least one 1", _mask),
    "first_bit": _BIT,
    "last_bit": _BIT,
    "scaling_factor": ("a finite number", _number(-sys.float_info.max, sys.float_info.max)),
    "burst": ("a number of bits from 1 to 64", _number(1, 64, whole=True)),
    "allow_sign_change": _SWITCH,
    "allow_NaN_values": _SWITCH,
    "locations_to_corrupt": ("a list of names, such as ['/predictor/conv1']", _names),
    "use_random_locations": _SWITCH,
    "log_file_path": _PATH,
    "save_injection_sequence": _SWITCH,
    "injection_sequence_path": _PATH,
    "seed": ("a whole number from 0 to 2**128 − 1", _number(0, (1 << 128) - 1, whole=True)),
}
