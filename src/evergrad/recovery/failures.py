"""Failures as data: which rank or node fails, how, at which step, and where in that step.

A failure is one line of words, on the command line, in a file, in the environment of a job, and in its log:

    kill|exception  rank=R | node=N | random=K  step=S
                    [phase=data|forward|backward|optimizer|checkpoint]
                    [bucket=B [at=before|during|after]]  [times=N|always]  [seed=S]

`kill` is SIGKILL: nothing is tidied up. `exception` is an error in the training script, and ends it in order. The words
after the first come in any order. Nothing happens here: `triggers` is what acts.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Required, TypedDict, Unpack, get_args, overload

from evergrad.errors import DamagedFile, FileAccessError, UsageError, nearest

__all__ = ["SCHEMA_VERSION", "At", "Failure", "Failures", "Kind", "Phase", "Words"]

SCHEMA_VERSION = 1

Kind = Literal["kill", "exception"]
At = Literal["before", "during", "after"]

_TARGETS = ("rank", "node", "random")
_LEAST = {"rank": 0, "random": 1, "step": 0, "bucket": 0, "times": 1, "seed": 0}
"""The words that are whole numbers, and the least that each may be."""
_WORDS = (*_TARGETS, "step", "phase", "bucket", "at", "times", "seed")
_EXAMPLE = "kill rank=1 step=7 bucket=2 at=during"


class Phase(StrEnum):
    """Where in a step: what the rank is about to do when the failure comes."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"


class Words(TypedDict, total=False):
    """The words of the grammar as keywords; a phase, and `times="always"`, may be given as text."""

    step: Required[int]
    rank: int | None
    node: str | int | None
    random: int | None
    phase: Phase | str
    bucket: int | None
    at: At | None
    times: int | Literal["always"] | None
    seed: int


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that goes wrong; `str` gives its words, without those that are the default.

    >>> failure = Failure.parse("kill node=1 step=7 bucket=2")
    >>> failure.node, failure.phase.value, failure.at
    ('n1', 'backward', 'before')
    >>> print(failure)
    kill node=n1 step=7 bucket=2
    """

    kind: Kind
    _: KW_ONLY
    step: int
    """Counted from 0, as the job counts steps."""
    rank: int | None = None
    """The rank that fails: whoever has this rank when the step comes."""
    node: str | int | None = None
    """All ranks of a node, by its name; the index 1 stands for `n1`, and is `n1` from then on."""
    random: int | None = None
    """So many ranks, drawn with `seed`."""
    phase: Phase = Phase.BACKWARD
    bucket: int | None = None
    """The gradient bucket at whose all-reduce it comes; None: before the backward pass."""
    at: At | None = None
    """Before the all-reduce of the bucket starts, while it is under way, or after it; None where there is no bucket."""
    times: int | None = 1
    """How often in a run; None: whenever the step comes."""
    seed: int = 0

    def __post_init__(self) -> None:
        _checked_choice("kind", self.kind, get_args(Kind))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name in ("step", "seed"):
                object.__setattr__(self, name, _checked_number(name, value, least))
        if self.node is not None:
            object.__setattr__(self, "node", _checked_node(self.node))
        given = [f"{name}={getattr(self, name)}" for name in _TARGETS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise UsageError(f"expected exactly one of rank=R, node=N and random=K, found {found}")
        object.__setattr__(self, "phase", Phase(_checked_choice("phase", self.phase, list(Phase))))
        if self.bucket is not None and self.phase is not Phase.BACKWARD:
            raise UsageError(f"bucket={self.bucket}: expected phase=backward with it, found phase={self.phase}")
        if self.at is not None:
            _checked_choice("at", self.at, get_args(At))
            if self.bucket is None:
                raise UsageError(f"at={self.at}: expected bucket=B with it, found none")
        elif self.bucket is not None:
            object.__setattr__(self, "at", "before")
        if self.seed and self.random is None:
            raise UsageError(f"seed={self.seed}: expected random=K with it, found {given[0]}")

    @classmethod
    def parse(cls, text: str) -> Failure:
        """From the words of the grammar."""
        try:
            if not isinstance(text, str):
                raise UsageError(f"expected text, found {type(text).__name__}")
            kind, *rest = text.split() or [""]
            _checked_choice("kind", kind, get_args(Kind))
            return _failure(kind, _read_words(rest))
        except UsageError as error:
            raise UsageError(f"failure {_shown(text)}: {_ended(error)} Example: {_EXAMPLE}") from None

    def __str__(self) -> str:
        target = next(name for name in _TARGETS if getattr(self, name) is not None)
        words = [self.kind, f"{target}={getattr(self, target)}", f"step={self.step}"]
        if self.phase is not Phase.BACKWARD:
            words.append(f"phase={self.phase}")
        if self.bucket is not None:
            words.append(f"bucket={self.bucket}")
        if self.at not in (None, "before"):
            words.append(f"at={self.at}")
        if self.times != 1:
            words.append(f"times={'always' if self.times is None else self.times}")
        if self.seed:
            words.append(f"seed={self.seed}")
        return " ".join(words)

    def targets(self, members: Sequence[int], nodes: Sequence[str], step: int, *, index: int = 0) -> tuple[int, ...]:
        """The ranks that it hits at a step, ascending; uids and node names are by rank, `index` is its place.

        Random ranks depend on seed, step, index and the number of ranks alone: every rank draws the same ones.
        """
        assert len(members) == len(nodes), "one node for each rank"
        if step != self.step:
            return ()
        if self.rank is not None:
            return (self.rank,) if self.rank < len(members) else ()
        if self.node is not None:
            return tuple(rank for rank, name in enumerate(nodes) if name == self.node)
        # By hash, not by a generator whose draws may differ between versions of Python.
        drawn = f"{self.seed}/{step}/{index}/{len(members)}"
        order = sorted(range(len(members)), key=lambda rank: hashlib.blake2b(f"{drawn}/{rank}".encode()).digest())
        return tuple(sorted(order[: self.random]))


class Failures(Sequence[Failure]):
    """A schedule: failures in an order that never changes, so that each is known by its index.

    >>> print(Failures().kill(rank=1, step=7).exception(node=0, step=9, phase="forward", times=2))
    kill rank=1 step=7
    exception node=n0 step=9 phase=forward times=2
    """

    __slots__ = ("_all",)

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self._all = tuple(failures)
        for one in self._all:
            if not isinstance(one, Failure):
                raise UsageError(f"schedule: expected failures, found {_shown(one)}. Failures.parse([…]) takes texts.")

    def kill(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: SIGKILL, by the words of the grammar."""
        return self._with("kill", words)

    def exception(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: an exception in the training script, by the words of the grammar."""
        return self._with("exception", words)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Failures:
        """From texts of the grammar, as `--fail` takes them."""
        return cls(Failure.parse(text) for text in ([texts] if isinstance(texts, str) else texts))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Failures:
        """From TOML: `failures = ["kill rank=1 step=7", …]`, or a `[[failure]]` each with kind, rank, step, …"""
        table = _read_toml(Path(path))
        try:
            for key in table:
                if key not in ("failures", "failure"):
                    raise UsageError(f"unknown key {_shown(key)}.{_meant(key, ('failures', 'failure'))}")
            if len(table) != 1:
                raise UsageError(f"expected either failures = […] or [[failure]], found {'both' if table else 'none'}")
            ((key, rows),) = table.items()
            kind, what = (str, "texts") if key == "failures" else (dict, "tables, each under [[failure]]")
            if not isinstance(rows, list) or not all(isinstance(row, kind) for row in rows):
                raise UsageError(f"{key}: expected a list of {what}, found {_shown(rows)}")
            return cls.parse(rows) if key == "failures" else cls(map(_read_table, range(1, len(rows) + 1), rows))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @property
    def texts(self) -> list[str]:
        """Each one's words."""
        return [str(one) for one in self._all]

    def check(self, *, ranks: int, nodes: int | Sequence[str] | None = None) -> None:
        """Refuse what can never happen in a job of so many ranks, on so many nodes or nodes of these names."""
        names = [f"n{index}" for index in range(nodes)] if isinstance(nodes, int) else nodes
        for one in self._all:
            wrong = ""
            if one.rank is not None and one.rank >= ranks:
                wrong = f"rank={one.rank}: the job has {_ranks(ranks)}"
            elif one.random is not None and one.random > ranks:
                wrong = f"random={one.random}: the job has {_ranks(ranks)}"
            elif one.node is not None and names is not None and one.node not in names:
                wrong = f"node={one.node}: the job has nodes {_nodes(names)}.{_meant(str(one.node), names)}"
            if wrong:
                raise UsageError(f"failure '{one}': {wrong}")

    def to_json(self) -> str:
        """As text, for the environment of a job."""
        return json.dumps({"schema_version": SCHEMA_VERSION, "failures": self.texts})

    @classmethod
    def from_json(cls, text: str | bytes) -> Failures:
        """Back from text."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        version = found.get("schema_version") if isinstance(found, dict) else None
        if version != SCHEMA_VERSION:
            wanted = f'{{"schema_version": {SCHEMA_VERSION}, "failures": […]}}'
            raise UsageError(f"schedule: expected {wanted}, found {_shown(text)}")
        texts = found.get("failures")
        if not isinstance(texts, list):
            raise UsageError(f"schedule: expected a list of failures, found {_shown(texts)}")
        return cls.parse(texts)

    def _with(self, kind: Kind, words: Words) -> Failures:
        try:
            return Failures([*self._all, _failure(kind, words)])
        except UsageError as error:
            raise UsageError(f"{kind}: {error}") from None

    @overload
    def __getitem__(self, index: int) -> Failure: ...
    @overload
    def __getitem__(self, index: slice) -> Failures: ...
    def __getitem__(self, index: int | slice) -> Failure | Failures:
        return Failures(self._all[index]) if isinstance(index, slice) else self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return self._all == other._all if isinstance(other, Failures) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return f"Failures.parse({self.texts})"

    def __str__(self) -> str:
        return "\n".join(self.texts)


def _failure(kind: Any, words: Mapping[str, Any]) -> Failure:
    """From words whose values have their types."""
    for name in words:
        if name not in _WORDS:
            raise UsageError(f"unknown word {_shown(name)}: expected one of {', '.join(_WORDS)}.{_meant(name, _WORDS)}")
    if "step" not in words:
        raise UsageError("step=S is missing: expected the step at which it happens, from 0")
    given = dict(words)
    if given.get("times") == "always":
        given["times"] = None
    return Failure(kind, **given)


def _read_words(texts: Iterable[str]) -> dict[str, Any]:
    """Values by name; what is not a number where one is expected stays text, for the check to name."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"unknown word {_shown(text)}: expected name=value.{_meant(name, _WORDS, '=…')}")
        if name in found:
            raise UsageError(f"{name} is given twice: {name}={found[name]} and {_shown(text)}")
        is_number = name in _LEAST and re.fullmatch("-?[0-9]{1,20}", value)
        found[name] = int(value) if is_number else value
    return found


def _read_table(number: int, table: dict[str, Any]) -> Failure:
    try:
        words = dict(table)
        kind = words.pop("kind", "")
        _checked_choice("kind", kind, get_args(Kind))
        return _failure(kind, words)
    except UsageError as error:
        raise UsageError(f"failure {number}: {error}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"is no TOML: {error}") from None


def _checked_number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number < 1 << 63:
        more = ", or always" if name == "times" else ""
        raise UsageError(f"{name}: expected a whole number, {least} or more{more}, found {_shown(value)}")
    return number


def _checked_node(node: Any) -> str:
    text = str(node) if isinstance(node, int) and not isinstance(node, bool) else node
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", text):
        raise UsageError(f"node: expected an index such as 1 or a name such as n1, found {_shown(node)}")
    return f"n{int(text)}" if text.isdigit() else text


def _checked_choice(name: str, value: Any, known: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in known:
        found = _shown(value) if value != "" else "nothing"
        choices = f"{', '.join(known[:-1])} or {known[-1]}"
        raise UsageError(f"{name}: expected {choices}, found {found}.{_meant(str(value), known)}")
    return value


def _ranks(count: int) -> str:
    return "rank 0 alone" if count == 1 else f"ranks 0 to {count - 1}"


def _nodes(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", … {names[-1]}" if len(names) > 8 else "")


def _meant(asked: str, known: Iterable[str], more: str = "") -> str:
    close = nearest(asked[:100].lower(), known, count=1)
    return f" Did you mean '{close[0]}{more}'?" if close else ""


def _shown(value: object) -> str:
    """What was found, short enough to leave room for the rest of the line."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:118]}…{text[-1]}"


def _ended(error: UsageError) -> str:
    text = str(error)
    return text if text.endswith((".", "?")) else f"{text}."
