"""Soft errors in checkpoints: drawn from a seed, logged before they happen, applied to any format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.formats import open_checkpoint
from evergrad.formats.checkpoint import Progress
from evergrad.formats.data_file import rehearsal
from evergrad.injection.draws import GENERATOR, Draws
from evergrad.injection.execution import Digest, Outcome, prepare
from evergrad.injection.faults import Fault
from evergrad.injection.log import InjectionLog
from evergrad.injection.plan import plan
from evergrad.injection.population import population
from evergrad.injection.sampling import Amount, Sampling, sample
from evergrad.injection.workplace import Workplace, exclusive
from evergrad.records import Json, Role
from evergrad.state.selection import Where
from evergrad.wording import meant

Selection: TypeAlias = "list[str | re.Pattern[str] | Role]"
"""What `where` names, as a list."""

_MAX_SEED = 1 << 128
_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def inject(
    path: str | PathLike[str],
    fault: Fault,
    *,
    count: int | None = None,
    fraction: float | None = None,
    rate: float | None = None,
    hours: float = 1.0,
    probability: float | None = None,
    where: Where = None,
    sampling: Sampling = "element",
    dtypes: Iterable[str] | None = None,
    allow_nonfinite: bool = True,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    in_place: bool = False,
    log: str | PathLike[str] | None = None,
    stale_checksum: bool = False,
    digest: Digest = "blocks",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> InjectionLog:
    """Put faults into a checkpoint of any format, and return the log of what was done.

    The result goes to a copy, `out`, or with `in_place=True` into the file itself. The log is durable before the first
    byte changes; it is kept at `log`, by default at `<out>.faults.jsonl`, and `eg.undo` and `eg.replay` take it.

    How many: `count` faults, a `fraction` of the selected elements, or a `rate` in FIT per Mbit over `hours`; each
    attempt comes about with `probability`, which alone attempts every element once. Where: the tensors that `where`
    selects (as in `eg.select`), of these `dtypes`; `sampling` draws elements, all different, or, as the literature
    does, a tensor first and then an element of it. `allow_nonfinite=False` draws again what would become NaN or
    infinite. The same seed gives the same bits on every platform.

    Checksums of the container follow, as for an error in memory; `stale_checksum=True` leaves them: rot at rest.

    >>> log = inject("model.h5", BitFlip("exponent"), count=10, seed=7, out="bad.h5")     # doctest: +SKIP
    """
    if not isinstance(fault, Fault):
        raise UsageError(f"fault {fault!r:.80}: expected a fault such as BitFlip(bits='exponent')")
    checked_seed(seed)
    amount = Amount(count, fraction, rate, hours, probability)
    types = None if dtypes is None else dtypes_of(dtypes)
    items = items_of(where)
    given = Path(path)
    outcome = Outcome(
        out=None if out is None else Path(out),
        in_place=in_place,
        log=None if log is None else Path(log),
        stale_checksum=stale_checksum,
        digest=digest,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    draws = Draws(seed)
    with ExitStack() as locks:
        with rehearsal(stale=stale_checksum) as noted, open_checkpoint(given) as ck:
            if in_place:
                locks.enter_context(exclusive(Workplace.of(ck, given).locked))
            chosen = population(ck, fault, items, types)
            sites = sample(chosen, amount, sampling, draws)
            planned = plan(ck, chosen, sites, fault, draws, sampling=sampling, allow_nonfinite=allow_nonfinite)
            settings = settings_told(amount, items, types, sampling, allow_nonfinite, seed)
            job = prepare(
                ck,
                noted,
                given,
                planned,
                outcome,
                attempts=sites.attempts,
                fault=fault.to_json(),
                settings={**settings, "digest": digest},
                left_out=chosen.left_out,
            )
        return job.carry_out(progress)


def checked_seed(seed: object) -> int:
    """A seed that the generator takes; `UsageError` for anything else."""
    if type(seed) is not int or not 0 <= seed < _MAX_SEED:
        raise UsageError(f"seed {seed!r:.60}: expected a whole number from 0 to 2**128 − 1")
    return seed


def dtypes_of(names: Iterable[str]) -> list[DType]:
    """Element types by their names; `UsageError` for one that is none."""
    asked = [names] if isinstance(names, str) else list(names)
    found = [DType.named(name) for name in asked]
    if not found or None in found:
        hint = f".{meant(str(asked[found.index(None)]), [*DType])}" if None in found else ""
        raise UsageError(f"dtypes {names!r:.100}: expected one or more of {', '.join(DType)}{hint}")
    return [kind for kind in found if kind is not None]


def items_of(where: Where) -> Selection | None:
    """The selection as a list, which can be read twice."""
    if where is None:
        return None
    if isinstance(where, (str, re.Pattern)):
        return [where]
    if not isinstance(where, Iterable):
        raise UsageError(f"where {where!r:.100}: expected a name, a pattern, a role or a list of these")
    return list(where)


def selection_told(where: Selection | None) -> Json:
    """The selection as text that selects the same again."""
    if where is None:
        return None
    told: list[Json] = []
    for item in where:
        if isinstance(item, re.Pattern):
            flags = "".join(sign for sign, flag in _FLAGS.items() if item.flags & flag)
            told.append(f"re:{f'(?{flags})' if flags else ''}{item.pattern}")
        else:
            told.append(f"role:{item}" if isinstance(item, Role) else item)
    return told


def settings_told(
    amount: Amount,
    where: Selection | None,
    types: Sequence[DType] | None,
    sampling: Sampling,
    allow_nonfinite: bool,
    seed: int,
) -> dict[str, Json]:
    """What the log says of a drawn injection: enough to draw the same again."""
    return {
        "amount": amount.to_json(),
        "where": selection_told(where),
        **({"dtypes": [str(kind) for kind in types]} if types is not None else {}),
        "sampling": sampling,
        "allow_nonfinite": allow_nonfinite,
        "seed": seed,
        "generator": GENERATOR,
    }
