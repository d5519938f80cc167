"""The words that failures are written in: which there are, what each may be, and what to say of a wrong one."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal, TypedDict, get_args

from evergrad.errors import UsageError
from evergrad.wording import meant, shown

Kind = Literal["kill", "exception", "stop", "slow", "cut", "leave", "flip"]
At = Literal["before", "during", "after"]

KINDS: tuple[str, ...] = get_args(Kind)
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


class Words(TypedDict, total=False):
    """The words of the grammar as keywords: `for_s` is `for`; a phase, and `times="always"`, may be given as text."""

    step: int | None
    time: float | None
    rank: int | None
    node: str | int | None
    random: int | None
    phase: Phase | str | None
    bucket: int | None
    at: At | None
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
            raise UsageError(f"unknown word {shown(text)}: expected name=value.{meant(name, known, '=…')}")
        if name in found:
            raise UsageError(f"{name} is given twice: {name}={found[name]} and {shown(text)}")
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
        raise UsageError(f"{name}: expected a whole number, {least} or more{more}, found {shown(value)}")
    return number


def checked_amount(name: str, value: Any) -> float:
    """The seconds or the factor of a word."""
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    sound = number >= 0 if name == "time" else number > 0 if name == "for" else number > 1
    if not sound or number > 1e9:
        raise UsageError(f"{name}: expected {_AMOUNTS[name]}, found {shown(value)}")
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
        raise UsageError(f"node: expected an index such as 1 or a name such as n1, found {shown(node)}")
    return f"n{int(text)}" if text.isdigit() else text


def checked_where(where: Any) -> str:
    """A selection of tensors that is one word."""
    if not isinstance(where, str) or not where.isprintable() or not where or len(where.split()) != 1 or " " in where:
        hint = "a path or a glob such as model/**, without spaces (? stands for any character)"
        raise UsageError(f"where: expected {hint}, found {shown(where)}")
    if where.startswith("re:"):
        try:
            re.compile(where.removeprefix("re:"))
        except re.error as error:
            raise UsageError(f"where: {shown(where)} is no regular expression: {error}") from None
    return where


def ended(error: UsageError) -> str:
    """A message as a whole sentence."""
    text = str(error)
    return text if text.endswith((".", "?")) else f"{text}."
