"""How a trial's faults get into its training: which ranks they hit, with which draws, and when.

Faults in the state at the restart are the same as in a checkpoint file: the same seed hits the same elements and bits.
Faults that happen later, or to what is never in a checkpoint, are scheduled by `inject_live`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evergrad.errors import StudyError, UsageError
from evergrad.injection import InjectionLog
from evergrad.injection.bit_changes import Plan
from evergrad.injection.faults import fault_of
from evergrad.records import Json
from evergrad.study.trials import PASSING, TARGETS, Trial
from evergrad.study.warming import Warm

if TYPE_CHECKING:
    from evergrad.injection import LiveInjection

STATE_TARGETS = tuple(target for target in TARGETS if target not in PASSING)
"""What is in a checkpoint."""


def hit_ranks(seed: int, count: int, ranks: int) -> list[int]:
    """Which ranks are hit: drawn, since rank 0 is not like the others.

    >>> hit_ranks(7, 2, 8)
    [2, 6]
    """
    return sorted(sorted(range(ranks), key=lambda rank: _mixed(seed, rank, "hit"))[:count])


def rank_seed(seed: int, rank: int, count: int) -> int:
    """What a rank's faults are drawn from: each has its own, and a single one has the trial's."""
    return seed if count == 1 else _mixed(seed, rank, "draws")


@dataclass(slots=True)
class Struck:
    """What a trial's faults have come to on this rank."""

    rank: int = 0
    places: int = 0
    """Bits that they could have hit, where that is known."""
    done: Plan | None = None
    live: LiveInjection | None = None

    @property
    def injected(self) -> int:
        """Faults that have happened so far."""
        found = self._found
        return 0 if found is None else found.injected

    @property
    def changed(self) -> int:
        """Of those, the ones that changed a bit."""
        found = self._found
        return 0 if found is None else found.changed

    def hits(self) -> list[Json]:
        """Each of them, in words and as data."""
        found = self._found
        columns = () if found is None else found.columns
        return [{"rank": self.rank, "words": str(hit), **hit.to_json()} for column in columns for hit in column.hits()]

    def check(self) -> None:
        """`StudyError` if the training has ended, and its faults have not happened."""
        if self.live is not None and not self.live.done:
            raise StudyError("the training has ended before its faults happened: choose an earlier step")

    def end(self) -> None:
        """Nothing more is scheduled."""
        if self.live is not None:
            self.live.remove()

    @property
    def _found(self) -> Plan | InjectionLog | None:
        return self.done if self.live is None else self.live.log


def strike(loaded: Warm, trial: Trial, struck: Struck, *, rehearsal: bool = False) -> None:
    """Let a trial's faults happen on this rank, now or when their step comes; a rehearsal only tries where they aim."""
    session = loaded.session
    struck.rank = session.rank
    mine = session.rank in hit_ranks(trial.seed, trial.ranks, session.ranks)
    seed = rank_seed(trial.seed, session.rank, trial.ranks)
    if trial.target in STATE_TARGETS and trial.step == 0:
        aim = loaded.aim(trial)
        struck.places = aim.population.bits
        numbers = int(aim.population.sizes.sum())
        if trial.flips > numbers:
            raise UsageError(f"flips: expected at most {numbers:,}, the numbers that there are, found {trial.flips:,}")
        if mine and not rehearsal:
            struck.done = aim.hit(trial.flips, seed)
    elif mine or rehearsal:
        from evergrad.injection import inject_live

        struck.live = inject_live(
            session.module,
            session.optimizer,
            fault_of(trial.fault),
            target=trial.target,
            where=loaded.names(trial) if trial.target in STATE_TARGETS else trial.where or None,
            step=trial.step,
            count=trial.flips,
            seed=seed,
        )
        if rehearsal:
            struck.end()


def _mixed(seed: int, rank: int, what: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {rank} {what}".encode(), digest_size=7).digest(), "big")
