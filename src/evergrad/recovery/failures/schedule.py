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

A line may also stand for many failures, drawn from a distribution of the time between them (see `chances`):

    exponential  mean=M  until=END  [unit=steps|seconds]  [kinds=kill:3,stop]  [ranks=N|nodes=N]  [seed=S]
    weibull      mean=M|scale=L  shape=K  until=END  …

Nothing happens here: `triggers` says when, and `acts` does it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Unpack, overload

from evergrad.errors import UsageError
from evergrad.recovery.failures.failure import Failure
from evergrad.recovery.failures.words import LINES, Kind, Words
from evergrad.wording import meant, shown

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
                raise UsageError(f"schedule: expected failures, found {shown(one)}. Failures.parse([…]) takes texts.")

    def kill(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: SIGKILL, by the words of the grammar."""
        return self._with("kill", words)

    def exception(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: an exception in the training script, by the words of the grammar."""
        return self._with("exception", words)

    def stop(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: SIGSTOP, until `for_s` seconds are over, by the words of the grammar."""
        return self._with("stop", words)

    def slow(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: everything takes `by` times as long, by the words of the grammar."""
        return self._with("slow", words)

    def cut(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: no network, until `for_s` seconds are over, by the words of the grammar."""
        return self._with("cut", words)

    def leave(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: SIGTERM, by the words of the grammar."""
        return self._with("leave", words)

    def flip(self, **words: Unpack[Words]) -> Failures:
        """A schedule with one more: soft errors in the live state, by the words of the grammar."""
        return self._with("flip", words)

    @classmethod
    def exponential(cls, *, mean: float, until: float, **more: Any) -> Failures:
        """Failures without memory, one in `mean` steps on average, before `until`; more as `chances.drawn` takes it.

        >>> print(Failures.exponential(mean=20, until=70, ranks=4, seed=5))
        kill rank=0 step=4
        kill rank=0 step=62
        """
        from evergrad.recovery.failures.chances import drawn

        return cls(drawn("exponential", mean=mean, until=until, **more))

    @classmethod
    def weibull(cls, *, shape: float, until: float, **more: Any) -> Failures:
        """As `exponential`, of given shape: below 1 failures come in clusters. `mean` or `scale` says how often."""
        from evergrad.recovery.failures.chances import drawn

        return cls(drawn("weibull", shape=shape, until=until, **more))

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
                from evergrad.recovery.failures.chances import read_line

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
                wrong = f"node={one.node}: the job has nodes {few}.{meant(str(one.node), names)}"
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
            raise UsageError(f"schedule: expected {wanted}, found {shown(text)}")
        texts = found.get("failures")
        if not isinstance(texts, list):
            raise UsageError(f"schedule: expected a list of failures, found {shown(texts)}")
        return cls.parse(texts)

    def _with(self, kind: Kind, words: Words) -> Failures:
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
