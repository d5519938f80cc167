"""Schedules drawn from a distribution: how long the job goes well between two failures.

    exponential mean=20 until=1000 kinds=kill:3,stop ranks=8 seed=3
    weibull mean=20 shape=0.7 until=1000 kinds=kill,stop,slow slow.by=4 phase=forward

The same words give the same failures on every platform: the generator is that of `injection.rng`, and logarithms and
powers are taken in decimal arithmetic, which fixes every digit. A line's further words go to the failures: `slow.by=4`
to those of one kind, `phase=forward` to all kinds that take it, `stop.for=none` takes a default away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal, localcontext
from typing import Any

from evergrad.errors import UsageError
from evergrad.injection.rng import Draws
from evergrad.recovery.failures.schedule import (
    KINDS,
    LEAST,
    LINES,
    ONLY_FOR,
    WORDS,
    Failure,
    as_sentence,
    checked_node,
    checked_number,
    read_words,
)
from evergrad.wording import checked_choice, did_you_mean, short_repr

DEFAULTS: dict[str, dict[str, Any]] = {"stop": {"for": 2.0}, "slow": {"by": 3.0, "for": 1.0}, "cut": {"for": 2.0}}
"""The words that drawn failures of a kind have unless others are given."""

_OWN = ("mean", "scale", "shape", "until", "unit", "kinds", "ranks", "nodes", "seed")
_FURTHER = tuple(word for word in WORDS if word not in ("rank", "node", "random", "step", "time", "seed"))
_UNITS = ("steps", "seconds")
_MOST = 10_000
_EXAMPLE = "weibull mean=20 shape=0.7 until=1000 kinds=kill:3,stop seed=3"
_EXACT = Context(prec=20)
_TWO_PI = Decimal("6.283185307179586476925286766559")
# Of Stirling's series: B(2k) / (2k (2k − 1)).
_STIRLING = ((1, 12), (-1, 360), (1, 1260), (-1, 1680), (1, 1188), (-691, 360360), (1, 156))


def draw_failures(
    name: str,
    *,
    until: float,
    mean: float | None = None,
    scale: float | None = None,
    shape: float | None = None,
    unit: str = "steps",
    kinds: str | Sequence[str] | Mapping[str, float] = ("kill",),
    ranks: int | None = None,
    nodes: int | Sequence[str] | None = None,
    seed: int = 0,
    words: Mapping[str, Any] | None = None,
) -> list[Failure]:
    """The failures before `until`, in order.

    - `mean` or `scale`: of the time between two failures, in `unit`.
    - `kinds`: draw_failures alike, or by weights: `{"kill": 3, "stop": 1}`, `"kill:3,stop"`.
    - `ranks`, `nodes`: whom they hit is drawn too, from so many, or from these names; without either, each is
      `random=1`, one of the ranks that there are by then.
    - `words`: further words of the failures, as the line has them: `{"slow.by": 4, "phase": "forward"}`.
    """
    try:
        checked_choice("distribution", name, LINES)
        if checked_choice("unit", unit, _UNITS) and ranks is not None and nodes is not None:
            raise UsageError("expected at most one of ranks and nodes, found both")
        weights = _weights(kinds)
        targets = _targets(ranks, nodes)
        further = {kind: _further(kind, list(weights), words or {}) for kind in weights}
        draws = Draws(checked_number("seed", seed, 0))
        with localcontext(_EXACT):
            length, power = _measure(name, mean, scale, shape)
            end = _positive("until", until)
            if Decimal(end) > _MOST * length * _gamma(1 + power):
                raise UsageError(f"more than {_MOST:,} failures before until={end:g}: expected a longer mean")
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    found: list[Failure] = []
    now = Decimal(0)
    while True:
        # Four outputs each, used or not: another choice of kinds or targets leaves the times as they are.
        when, what, whom, how = draws.raw(4).tolist()
        with localcontext(_EXACT):
            now += _wait(when, length, power)
        if now >= Decimal(end):
            return found
        kind = _chosen(weights, what)
        given: dict[str, Any] = {"step": int(now)} if unit == "steps" else {"time": float(round(now, 3))}
        given |= targets[whom % len(targets)] if targets else {"random": 1, "seed": seed}
        if kind == "flip":  # or each would flip the same bit again
            given["seed"] = 1 + how % ((1 << 31) - 1)
        try:
            found.append(Failure.of(kind, given | further[kind]))
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None


def read_line(text: str) -> list[Failure]:
    """From a line of words."""
    name, *rest = text.split()
    try:
        words = read_words(rest, (*_OWN, *_FURTHER))
        local_state = {word: words.pop(word) for word in _OWN if word in words}
        if "until" not in local_state:
            raise UsageError("until=END is missing: expected where the schedule ends, in steps or seconds")
        for word in ("mean", "scale", "shape", "until", "ranks"):
            if word in local_state:
                local_state[word] = _number(word, local_state[word])
        if "nodes" in local_state:
            nodes = local_state["nodes"]
            local_state["nodes"] = int(nodes) if nodes.isdigit() else nodes.split(",")
        return draw_failures(name, **local_state, words=words)
    except UsageError as error:
        said = as_sentence(error).removeprefix(f"{name}: ")
        raise UsageError(f"failure {short_repr(text)}: {said} Example: {_EXAMPLE}") from None


def _measure(name: str, mean: float | None, scale: float | None, shape: float | None) -> tuple[Decimal, Decimal]:
    """The scale, and the power that an exponential wait of mean 1 is raised to."""
    if name == "exponential":
        if shape is not None or scale is not None:
            raise UsageError(f"{'scale' if shape is None else 'shape'}: expected weibull with it, found exponential")
        if mean is None:
            raise UsageError("mean=M is missing: expected the mean time between two failures")
        return Decimal(_positive("mean", mean)), Decimal(1)
    if shape is None or not 0.1 <= _positive("shape", shape) <= 100:
        raise UsageError(f"shape: expected a number from 0.1 to 100, found {'none' if shape is None else shape}")
    if (mean is None) == (scale is None):
        raise UsageError(f"expected exactly one of mean=M and scale=L, found {'none' if mean is None else 'both'}")
    power = 1 / Decimal(shape)
    if scale is not None:
        return Decimal(_positive("scale", scale)), power
    assert mean is not None
    return Decimal(_positive("mean", mean)) / _gamma(1 + power), power


def _wait(raw: int, scale: Decimal, power: Decimal) -> Decimal:
    """One wait, from one output of the generator."""
    wait = -(Decimal((raw >> 11) + 1) / (1 << 53)).ln()
    if wait and power != 1:
        wait = (power * wait.ln()).exp()
    return scale * wait


def _gamma(z: Decimal) -> Decimal:
    """The gamma function, by Stirling's series far out, where it is exact to more digits than are kept.

    >>> round(_gamma(Decimal(5)), 15), round(_gamma(Decimal("0.5")) ** 2, 12)
    (Decimal('24.000000000000000'), Decimal('3.141592653590'))
    """
    steps, far = Decimal(1), z
    while far < 20:
        steps, far = steps * far, far + 1
    log = (far - Decimal("0.5")) * far.ln() - far + _TWO_PI.ln() / 2
    for k, (top, bottom) in enumerate(_STIRLING):
        log += Decimal(top) / Decimal(bottom) / far ** (2 * k + 1)
    return log.exp() / steps


def _weights(kinds: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    if isinstance(kinds, Mapping):
        pairs: list[tuple[str, Any]] = list(kinds.items())
    else:
        texts = kinds.split(",") if isinstance(kinds, str) else list(kinds)
        parts = [str(text).partition(":") for text in texts]
        pairs = [(kind, _number("kinds", weight) if colon else 1.0) for kind, colon, weight in parts]
    found: dict[str, float] = {}
    for kind, weight in pairs:
        checked_choice("kinds", kind, KINDS)
        if kind in found:
            raise UsageError(f"kinds: {kind} is given twice. Weights are written kill:3")
        found[kind] = _positive(f"kinds: the weight of {kind}", weight)
    if not found:
        raise UsageError("kinds: expected one or more, found none")
    return found


def _chosen(weights: Mapping[str, float], raw: int) -> str:
    share = (raw >> 11) * 2.0**-53 * math.fsum(weights.values())
    for kind, weight in weights.items():
        share -= weight
        if share < 0:
            return kind
    return list(weights)[-1]


def _targets(ranks: int | None, nodes: int | Sequence[str] | None) -> list[dict[str, Any]]:
    if ranks is not None:
        return [{"rank": rank} for rank in range(checked_number("ranks", ranks, 1))]
    if nodes is None:
        return []
    names = range(checked_number("nodes", nodes, 1)) if isinstance(nodes, int) else list(nodes)
    if not names:
        raise UsageError("nodes: expected one or more, found none")
    return [{"node": checked_node(name)} for name in names]


def _further(kind: str, kinds: Sequence[str], words: Mapping[str, Any]) -> dict[str, Any]:
    """The further words of one kind's failures: its own before those of all, and those before the defaults."""
    found, local_state = dict(DEFAULTS.get(kind, {})), dict[str, Any]()
    for given, value in words.items():
        first, dot, word = given.rpartition(".")
        word = "for" if word == "for_s" else word
        if word not in _FURTHER or (dot and first not in kinds):
            known = [*_OWN, *_FURTHER, *(f"{one}.{name}" for one in kinds for name in _FURTHER)]
            expected = f"{', '.join((*_OWN, *_FURTHER))}, or KIND.word of a kind that is drawn"
            raise UsageError(
                f"unknown word {short_repr(given)}: expected one of {expected}.{did_you_mean(given, known)}"
            )
        takers = ONLY_FOR.get(word, KINDS)
        if not dot and not set(takers) & set(kinds):
            raise UsageError(f"{given}: expected {' or '.join(takers)} among kinds with it")
        if kind == first or (not dot and kind in takers):
            (local_state if dot else found)[word] = _value(word, value)
    return {word: value for word, value in (found | local_state).items() if value is not None}


def _value(word: str, value: Any) -> Any:
    """What `read_words` leaves as text behind a dot: a number, if it is one; None for `none`."""
    if value == "none":
        return None
    if isinstance(value, str) and (word in LEAST or word in ("for", "by")):
        return read_words([f"{word}={value}"])[word]
    return value


def _number(name: str, value: Any) -> Any:
    """A number that was written as text; a whole one is an int."""
    try:
        return int(value) if str(value).isdigit() else float(value)
    except ValueError:
        raise UsageError(f"{name}: expected a number, found {short_repr(value)}") from None


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e15:
        raise UsageError(f"{name}: expected a number above 0, found {short_repr(value)}")
    return float(value)
