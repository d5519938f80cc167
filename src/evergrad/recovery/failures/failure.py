"""One failure: its words checked, and the ranks that it hits. The grammar is that of `failures`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

from evergrad.errors import UsageError
from evergrad.recovery.failures.words import (
    KINDS,
    LEAST,
    LINES,
    ONLY_FOR,
    TARGETS,
    WORDS,
    At,
    Kind,
    Phase,
    amount_text,
    checked_amount,
    checked_node,
    checked_number,
    checked_where,
    ended,
    read_words,
)
from evergrad.wording import checked_choice, meant, shown

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

    kind: Kind
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
    at: At | None = None
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
            checked_choice("at", self.at, get_args(At))
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
            raise UsageError(f"failure {shown(text)}: {ended(error)} Example: {_EXAMPLE}") from None

    @classmethod
    def of(cls, kind: Any, words: Mapping[str, Any]) -> Failure:
        """From words whose values have their types."""
        for name in words:
            if name not in WORDS:
                raise UsageError(f"unknown word {shown(name)}: expected one of {', '.join(WORDS)}.{meant(name, WORDS)}")
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
