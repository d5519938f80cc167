"""Failures as data: which rank or node fails, how, when, and where in a step.

A failure is one line of words, on the command line, in a file, in the environment of a job, and in its log:

    KIND  rank=R | node=N | random=K   step=S | time=SECONDS
          [phase=data|forward|backward|optimizer|checkpoint|agreement|recovery]
          [bucket=B [at=before|during|after]]  [times=N|always]  [seed=S]

The words after the first come in any order. KIND and the words that are its own:

    kill                      SIGKILL: nothing is tidied up
    exception                 an error in the training script, which ends it in order
    stop  [for=SECONDS]       SIGSTOP: everything stands still, and goes on after so long, or never
    slow  by=F [for=SECONDS]  every batch takes F times as long, for so long, or from then on
    cut   [for=SECONDS]       the network is gone, and nobody is told; it comes back after so long, or never
    leave                     SIGTERM: what a preemption sends
    flip  [where=PATTERN] [bits=BITS] [count=N] [fault=FAULT]
                              soft errors in the rank's live state, by the injector

`step` counts from 0; without a phase it is before the backward pass. `time` is in seconds since the job began: it
comes at the first site that a targeted rank reaches then, in the phase that is named, or wherever its main thread is.
`agreement`: the rank has said what it saw of a broken generation, and waits for the plan of the next one; `recovery`:
that is decided, its group is formed and joiners get the state. `where` selects by the paths of the state
(`model/fc.weight`, `optimizer/**`), `bits` is `sign`, `exponent`, `exponent-msb`, `mantissa`, a number or `1-8`, and
FAULT one of the injector's with its settings: `scale:factor=4500`, `stuckat:value=1,bits=exponent`.

A line may also stand for many failures, drawn from a distribution of the time between them (see `distributions`):

    exponential  mean=M  until=END  [unit=steps|seconds]  [kinds=kill:3,stop]  [ranks=N|nodes=N]  [seed=S]
    weibull      mean=M|scale=L  shape=K  until=END  …

Nothing happens here: `injector` carries a schedule out.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from os import PathLike
from typing import Any, Literal, TypedDict, Unpack, get_args, overload

from evergrad.errors import UsageError
from evergrad.wording import checked_choice, did_you_mean, short_repr

# The words that failures are written in: which there are, what each may be, and what to say of a wrong one.

FailureKind = Literal["kill", "exception", "stop", "slow", "cut", "leave", "flip"]
BucketMoment = Literal["before", "during", "after"]

KINDS: tuple[str, ...] = get_args(FailureKind)
LINES = ("exponential", "weibull")
"""What a line may begin with besides a kind: distributions, which stand for many failures."""
TARGETS = ("rank", "node", "random")
LEAST = {"rank": 0, "random": 1, "step": 0, "bucket": 0, "times": 1, "count": 1, "seed": 0}
"""The words that are whole numbers, and the least that each may be."""
ONLY_FOR = {
    "by": ("slow",),
    "for": ("stop", "slow", "cut"),
    "where": ("flip",),
    "bits": ("flip",),
    "count": ("flip",),
    "fault": ("flip",),
}
"""The words that mean something to some kinds alone."""
WORDS = (*TARGETS, "step", "time", "phase", "bucket", "at", "times", *ONLY_FOR, "seed")

_AMOUNTS = {"time": "a number of seconds, 0 or more", "for": "a number of seconds above 0", "by": "a number above 1"}


class Phase(StrEnum):
    """Where in a step: what the rank is about to do when the failure comes."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    AGREEMENT = "agreement"
    """The rank has said what it saw of a broken generation, and waits for the plan of the next one."""
    RECOVERY = "recovery"
    """The next generation is decided; its group is formed and its joiners get the state."""


class FailureWords(TypedDict, total=False):
    """The words of the grammar as keywords: `for_s` is `for`; a phase, and `times="always"`, may be given as text."""

    step: int | None
    time: float | None
    rank: int | None
    node: str | int | None
    random: int | None
    phase: Phase | str | None
    bucket: int | None
    at: BucketMoment | None
    times: int | Literal["always"] | None
    for_s: float | None
    by: float | None
    where: str | None
    bits: str | int | range | None
    count: int | None
    fault: str | None
    seed: int


def read_words(texts: Iterable[str], known: Sequence[str] = WORDS) -> dict[str, Any]:
    """Values by name; what is not a number where one is expected stays text, for the check to name."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"unknown word {short_repr(text)}: expected name=value.{did_you_mean(name, known, '=…')}")
        if name in found:
            raise UsageError(f"{name} is given twice: {name}={found[name]} and {short_repr(text)}")
        if name in LEAST and re.fullmatch("-?[0-9]{1,20}", value):
            found[name] = int(value)
        elif name in _AMOUNTS and re.fullmatch(r"-?[0-9]{1,20}(\.[0-9]{0,20})?(e-?[0-9]{1,3})?", value):
            found[name] = float(value)
        else:
            found[name] = value
    return found


def checked_number(name: str, value: Any, least: int) -> int:
    """A whole number that is not too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number < 1 << 63:
        more = ", or always" if name == "times" else ""
        raise UsageError(f"{name}: expected a whole number, {least} or more{more}, found {short_repr(value)}")
    return number


def checked_amount(name: str, value: Any) -> float:
    """The seconds or the factor of a word."""
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    sound = number >= 0 if name == "time" else number > 0 if name == "for" else number > 1
    if not sound or number > 1e9:
        raise UsageError(f"{name}: expected {_AMOUNTS[name]}, found {short_repr(value)}")
    return number


def amount_text(value: float) -> str:
    """A number as a word has it.

    >>> amount_text(3.0), amount_text(0.25)
    ('3', '0.25')
    """
    return str(int(value)) if value == int(value) else repr(float(value))


def checked_node(node: Any) -> str:
    """The name of a node; an index is one too."""
    text = str(node) if isinstance(node, int) and not isinstance(node, bool) else node
    if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", text):
        raise UsageError(f"node: expected an index such as 1 or a name such as n1, found {short_repr(node)}")
    return f"n{int(text)}" if text.isdigit() else text


def checked_where(where: Any) -> str:
    """A selection of tensors that is one word."""
    if not isinstance(where, str) or not where.isprintable() or not where or len(where.split()) != 1 or " " in where:
        hint = "a path or a glob such as model/**, without spaces (? stands for any character)"
        raise UsageError(f"where: expected {hint}, found {short_repr(where)}")
    if where.startswith("re:"):
        try:
            re.compile(where.removeprefix("re:"))
        except re.error as error:
            raise UsageError(f"where: {short_repr(where)} is no regular expression: {error}") from None
    return where


def as_sentence(error: UsageError) -> str:
    """A message as a whole sentence."""
    text = str(error)
    return text if text.endswith((".", "?")) else f"{text}."


# One failure: its words checked, and the ranks that it hits. The grammar is that of `failures`.

_EXAMPLE = "kill rank=1 step=7 bucket=2 at=during"


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that goes wrong; `str` gives its words, without those that are the default.

    >>> failure = Failure.parse("kill node=1 step=7 bucket=2")
    >>> failure.node, failure.phase.value, failure.at
    ('n1', 'backward', 'before')
    >>> print(failure)
    kill node=n1 step=7 bucket=2
    >>> print(Failure("stop", rank=1, time=20, for_s=1.5))
    stop rank=1 time=20 for=1.5
    """

    kind: FailureKind
    _: KW_ONLY
    step: int | None = None
    """Counted from 0, as the job counts steps; None if it comes at a time."""
    time: float | None = None
    """Seconds since the job began; None if it comes at a step."""
    rank: int | None = None
    """The rank that fails: whoever has this rank when the step comes."""
    node: str | int | None = None
    """All ranks of a node, by its name; the index 1 stands for `n1`, and is `n1` from then on."""
    random: int | None = None
    """So many ranks, drawn with `seed`."""
    phase: Phase | None = None
    """With a step: before the backward pass, if none is given. With a time None is any site of the main thread."""
    bucket: int | None = None
    """The gradient bucket at whose all-reduce it comes; None: before the backward pass."""
    at: BucketMoment | None = None
    """Before the all-reduce of the bucket starts, while it is under way, or after it; None where there is no bucket."""
    times: int | None = 1
    """How often in a run; None: whenever the step comes."""
    for_s: float | None = None
    """How long a stop, a cut or slowness lasts; None: for good. The word is `for`."""
    by: float | None = None
    """How many times as long everything takes."""
    where: str | None = None
    """The tensors that soft errors may hit; None: all."""
    bits: str | int | range | None = None
    """The bits that may flip, as text from then on; None: all."""
    count: int | None = None
    """How many soft errors; 1 if none is given."""
    fault: str | None = None
    """A fault of the injector, in words; None: bits flip."""
    seed: int = 0

    def __post_init__(self) -> None:
        checked_choice("kind", self.kind, KINDS)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None or name == "seed":
                object.__setattr__(self, name, checked_number(name, value, least))
        for name in ("time", "for_s", "by"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checked_amount(name.removesuffix("_s"), value))
        if self.node is not None:
            object.__setattr__(self, "node", checked_node(self.node))
        target = self._exactly_one(TARGETS, "rank=R, node=N and random=K")
        self._exactly_one(("step", "time"), "step=S and time=SECONDS")
        self._check_site()
        self._check_own_words()
        if self.seed and self.random is None and self.kind != "flip":
            raise UsageError(f"seed={self.seed}: expected random=K with it, found {target}")

    def _exactly_one(self, names: Sequence[str], said: str) -> str:
        given = [f"{name}={_text(getattr(self, name))}" for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise UsageError(f"expected exactly one of {said}, found {' and '.join(given) or 'none'}")
        return given[0]

    def _check_site(self) -> None:
        if self.phase is not None:
            object.__setattr__(self, "phase", Phase(checked_choice("phase", self.phase, list(Phase))))
        elif self.step is not None or self.bucket is not None:
            object.__setattr__(self, "phase", Phase.BACKWARD)
        if self.bucket is not None and self.phase is not Phase.BACKWARD:
            raise UsageError(f"bucket={self.bucket}: expected phase=backward with it, found phase={self.phase}")
        if self.at is not None:
            checked_choice("at", self.at, get_args(BucketMoment))
            if self.bucket is None:
                raise UsageError(f"at={self.at}: expected bucket=B with it, found none")
        elif self.bucket is not None:
            object.__setattr__(self, "at", "before")

    def _check_own_words(self) -> None:
        for word, kinds in ONLY_FOR.items():
            value = getattr(self, "for_s" if word == "for" else word)
            if value is not None and self.kind not in kinds:
                raise UsageError(f"{word}={_text(value)}: expected {' or '.join(kinds)} with it, found {self.kind}")
        if self.kind == "slow" and self.by is None:
            raise UsageError("slow: expected by=F with it, how many times as long everything takes, found none")
        if self.kind == "flip":
            from evergrad.injection.faults import bits_text, fault_of

            object.__setattr__(self, "count", 1 if self.count is None else self.count)
            if self.where is not None:
                checked_where(self.where)
            object.__setattr__(self, "bits", bits_text(self.bits))
            fault_of(self.fault, self.bits)

    @classmethod
    def parse(cls, text: str) -> Failure:
        """From the words of the grammar."""
        try:
            if not isinstance(text, str):
                raise UsageError(f"expected text, found {type(text).__name__}")
            kind, *rest = text.split() or [""]
            checked_choice("kind", kind, KINDS, LINES)
            return cls.of(kind, read_words(rest))
        except UsageError as error:
            raise UsageError(f"failure {short_repr(text)}: {as_sentence(error)} Example: {_EXAMPLE}") from None

    @classmethod
    def of(cls, kind: Any, words: Mapping[str, Any]) -> Failure:
        """From words whose values have their types."""
        for name in words:
            if name not in WORDS:
                raise UsageError(
                    f"unknown word {short_repr(name)}: expected one of {', '.join(WORDS)}.{did_you_mean(name, WORDS)}"
                )
        given = {("for_s" if name == "for" else name): value for name, value in words.items()}
        if given.get("times") == "always":
            given["times"] = None
        return cls(kind, **given)

    def __str__(self) -> str:
        words: list[str] = [self.kind]
        default = {
            "phase": Phase.BACKWARD if self.step is not None or self.bucket is not None else None,
            "at": "before" if self.bucket is not None else None,
            "times": 1,
            "count": 1 if self.kind == "flip" else None,
            "seed": 0,
        }
        for word in WORDS:
            value = getattr(self, "for_s" if word == "for" else word)
            if value != default.get(word):
                words.append(f"{word}={_text(value)}")
        return " ".join(words)

    def targets(self, members: Sequence[int], nodes: Sequence[str], *, index: int = 0) -> tuple[int, ...]:
        """The ranks that fail, of these members on these nodes, both by rank; `index` is its place in the schedule.

        Random ranks depend on seed, step or time, index and the number of ranks alone: every rank draws the same ones.
        """
        assert len(members) == len(nodes), "one node for each rank"
        if self.rank is not None:
            return (self.rank,) if self.rank < len(members) else ()
        if self.node is not None:
            return tuple(rank for rank, name in enumerate(nodes) if name == self.node)
        # By hash, not by a generator whose draws may differ between versions of Python.
        when = self.step if self.time is None else f"{amount_text(self.time)}s"
        drawn = f"{self.seed}/{when}/{index}/{len(members)}"
        order = sorted(range(len(members)), key=lambda rank: hashlib.blake2b(f"{drawn}/{rank}".encode()).digest())
        return tuple(sorted(order[: self.random]))


def _text(value: object) -> str:
    """A value as its word has it."""
    return "always" if value is None else amount_text(value) if isinstance(value, float) else str(value)


SCHEMA_VERSION = 1


class Failures(Sequence[Failure]):
    """A schedule: failures in an order that never changes, so that each is known by its index.

    >>> print(Failures().kill(rank=1, step=7).exception(node=0, step=9, phase="forward", times=2))
    kill rank=1 step=7
    exception node=n0 step=9 phase=forward times=2
    >>> print(Failures().slow(rank=2, step=5, by=3, for_s=1).flip(random=1, step=8, where="model/**", bits="exponent"))
    slow rank=2 step=5 by=3 for=1
    flip random=1 step=8 where=model/** bits=exponent
    """

    __slots__ = ("_all",)

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self._all = tuple(failures)
        for one in self._all:
            if not isinstance(one, Failure):
                raise UsageError(
                    f"schedule: expected failures, found {short_repr(one)}. Failures.parse([…]) takes texts."
                )

    def kill(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: SIGKILL, by the words of the grammar."""
        return self._with("kill", words)

    def exception(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: an exception in the training script, by the words of the grammar."""
        return self._with("exception", words)

    def stop(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: SIGSTOP, until `for_s` seconds are over, by the words of the grammar."""
        return self._with("stop", words)

    def slow(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: everything takes `by` times as long, by the words of the grammar."""
        return self._with("slow", words)

    def cut(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: no network, until `for_s` seconds are over, by the words of the grammar."""
        return self._with("cut", words)

    def leave(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: SIGTERM, by the words of the grammar."""
        return self._with("leave", words)

    def flip(self, **words: Unpack[FailureWords]) -> Failures:
        """A schedule with one more: soft errors in the live state, by the words of the grammar."""
        return self._with("flip", words)

    @classmethod
    def exponential(cls, *, mean: float, until: float, **more: Any) -> Failures:
        """Failures without memory, one in `mean` steps on average, before `until`; more as `chances.drawn` takes it.

        >>> print(Failures.exponential(mean=20, until=70, ranks=4, seed=5))
        kill rank=0 step=4
        kill rank=0 step=62
        """
        from evergrad.recovery.failures.distributions import draw_failures

        return cls(draw_failures("exponential", mean=mean, until=until, **more))

    @classmethod
    def weibull(cls, *, shape: float, until: float, **more: Any) -> Failures:
        """As `exponential`, of given shape: below 1 failures come in clusters. `mean` or `scale` says how often."""
        from evergrad.recovery.failures.distributions import draw_failures

        return cls(draw_failures("weibull", shape=shape, until=until, **more))

    @classmethod
    def trace(cls, path: str | PathLike[str], speed: float = 1.0) -> Failures:
        """From CSV with the header `time,node,kind`, further words in further columns; `speed` times as fast."""
        from evergrad.recovery.failures.schedule_files import read_trace

        return cls(read_trace(path, speed))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Failures:
        """From texts of the grammar, as `--fail` takes them; a distribution's line becomes what is drawn from it."""
        found: list[Failure] = []
        for text in [texts] if isinstance(texts, str) else texts:
            if isinstance(text, str) and text.split()[:1] and text.split()[0] in LINES:
                from evergrad.recovery.failures.distributions import read_line

                found += read_line(text)
            else:
                found.append(Failure.parse(text))
        return cls(found)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Failures:
        """From TOML: `failures = ["kill rank=1 step=7", …]`, or a `[[failure]]` each with kind, rank, step, …

        A file whose name ends in `.csv` is a trace.
        """
        from evergrad.recovery.failures.schedule_files import read_toml

        if str(path).lower().endswith(".csv"):
            return cls.trace(path)
        rows = read_toml(path)
        try:
            return cls(failure for row in rows for failure in (cls.parse([row]) if isinstance(row, str) else [row]))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    @property
    def texts(self) -> list[str]:
        """Each one's words."""
        return [str(one) for one in self._all]

    def check(self, *, ranks: int, nodes: int | Sequence[str] | None = None) -> None:
        """Refuse what can never happen in a job of so many ranks, on so many nodes or nodes of these names."""
        names = [f"n{index}" for index in range(nodes)] if isinstance(nodes, int) else nodes
        has = "rank 0 alone" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        for one in self._all:
            wrong = ""
            if one.rank is not None and one.rank >= ranks:
                wrong = f"rank={one.rank}: the job has {has}"
            elif one.random is not None and one.random > ranks:
                wrong = f"random={one.random}: the job has {has}"
            elif one.node is not None and names is not None and one.node not in names:
                few = ", ".join(names[:8]) + (f", … {names[-1]}" if len(names) > 8 else "")
                wrong = f"node={one.node}: the job has nodes {few}.{did_you_mean(str(one.node), names)}"
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
            raise UsageError(f"schedule: expected {wanted}, found {short_repr(text)}")
        texts = found.get("failures")
        if not isinstance(texts, list):
            raise UsageError(f"schedule: expected a list of failures, found {short_repr(texts)}")
        return cls.parse(texts)

    def _with(self, kind: FailureKind, words: FailureWords) -> Failures:
        try:
            given = {("for" if name == "for_s" else name): value for name, value in words.items()}
            return Failures([*self._all, Failure.of(kind, given)])
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
