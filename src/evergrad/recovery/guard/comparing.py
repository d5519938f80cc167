"""Compares the replicas of all ranks, names what differs, and gives the minority the majority's bytes.

    digests ──root alike──▶ ok
       └─root differs─▶ descend to paths ──majority for each──▶ heal, look again ──▶ degraded
                              └─────────no majority for one──▶ nothing is changed ──▶ failed

A check is collective: every rank calls it when all have applied the same steps, and all get the same answer. If the
group breaks meanwhile it is done again in the next generation: what has been healed by then is the majority's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from evergrad.records import Check, Json
from evergrad.recovery.guard.digest_tree import DigestTree, gather_digests, gather_json
from evergrad.recovery.guard.digests import bytes_of, digest_bytes
from evergrad.recovery.guard.norms import Magnitude, Ranges
from evergrad.recovery.guard.replicas import Change, Replica, change_between, shown_value
from evergrad.recovery.guard.settings import GuardSettings
from evergrad.recovery.transport import Group, swap

_CHUNK_BYTES = 4 << 20
_TOLD = 16
"""How many differences are told one by one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One rank's copy of something is not what it should be."""

    rank: int
    path: str
    what: str
    """How it differs, for people."""
    change: Change | None = None
    """How it differs; None if that was not looked at."""
    healed: bool = False

    def to_json(self) -> dict[str, Json]:
        """As a line of the timeline."""
        return {"rank": self.rank, "path": self.path, "what": self.what, "healed": self.healed}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Difference:
        """Back from all of its fields, as another rank sends them."""
        change = fields["change"]
        return cls(**fields | {"change": None if change is None else Change(**change)})


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check has found; the same on all ranks."""

    status: Check
    """ok · degraded: differed, and was healed · failed: differs, and was left as it is · unknown: one rank alone."""
    step: int
    differences: tuple[Difference, ...] = ()
    suspects: tuple[Magnitude, ...] = ()
    """Parameters that are alike on all ranks, and out of their range."""
    why: str = ""
    """One line, unless all is well."""
    seconds: float = 0.0
    nbytes: int = 0

    @property
    def is_verified(self) -> bool:
        """Whether a version that is saved now can be relied on: all ranks are alike, and nothing is suspicious."""
        return self.status in (Check.OK, Check.DEGRADED) and not self.suspects


class Guard:
    """The checks of one rank."""

    def __init__(self, settings: GuardSettings, tell: Callable[..., None] = lambda *_, **__: None) -> None:
        self.settings = settings
        self._tell = tell
        self._ranges = Ranges(settings.range_factor)

    def is_due(self, step: int) -> bool:
        """Whether the state after so many steps is to be checked."""
        return step > 0 and step % self.settings.every == 0

    def check(self, group: Group, replica: Replica, *, step: int) -> Checked:
        """Compare all ranks' replicas, and heal what a majority can heal; `GroupBroken` if the group breaks."""
        began = time.monotonic()
        tree = DigestTree(replica.digests())
        status, why, differences = self._compare(group, replica, tree)
        suspects: list[Magnitude] = []
        if status is not Check.FAILED:
            of_model = {path: tensor for path, tensor in replica.tensors.items() if path.startswith("model/")}
            suspects = self._ranges.read(of_model)
            self._ranges.accept(suspects)  # said once: what all ranks have alike is what the job has
            why = why or "; ".join(map(str, suspects[:2]))
        took = time.monotonic() - began
        checked = Checked(status, step, tuple(differences), tuple(suspects), why, took, replica.nbytes)
        self._say(group, checked)
        return checked

    def _compare(self, group: Group, replica: Replica, tree: DigestTree) -> tuple[Check, str, list[Difference]]:
        if group.size == 1:
            return Check.UNKNOWN, "one rank: there is nobody to compare with", []
        if len(set(gather_digests(group, tree.root))) == 1:
            return Check.OK, "", []
        if len(set(gather_digests(group, tree.names))) > 1:
            differences = _missing(gather_json(group, sorted(tree.leaves)))
            return Check.FAILED, f"ranks do not have the same tensors: {_first(differences)}", differences
        digests = tree.find(group)
        if not digests:  # the tree was right, and what was first compared was not
            return Check.OK, "", []
        return self._settle(group, replica, tree, digests)

    def _settle(
        self, group: Group, replica: Replica, tree: DigestTree, digests: Mapping[str, Sequence[bytes]]
    ) -> tuple[Check, str, list[Difference]]:
        """Heal what differs, if all of it can be healed; else only name it."""
        agreed = {path: Counter(column).most_common(1)[0] for path, column in digests.items()}
        torn = [path for path, (_, count) in agreed.items() if 2 * count <= group.size]
        fixed = [path for path in digests if path in replica.values and replica.values[path].put is None]
        heals = not torn and not fixed and self.settings.heal == "majority"
        mine: list[Difference] = []
        for path, column in digests.items():
            # Of several that are equally frequent the lowest rank's is compared with; nothing is changed then.
            source = column.index(agreed[path][0])
            others = [rank for rank, digest in enumerate(column) if digest != column[source]]
            change = _exchange(group, replica, path, source, others, heals)
            if change is not None:
                mine.append(Difference(group.rank, path, str(change), change, heals))
        differences = sorted(
            (Difference.from_json(row) for rows in gather_json(group, [asdict(each) for each in mine]) for row in rows),
            key=lambda each: (each.path, each.rank),
        )
        if not heals:
            reason = "no majority of ranks agrees" if torn else "it cannot be set" if fixed else "heal='verified'"
            return Check.FAILED, f"{reason}: {_first(differences, torn or fixed)}", differences
        leaves = tree.leaves | replica.digests(digests)
        if len(set(gather_digests(group, DigestTree(leaves).root))) > 1:
            differences = [replace(each, healed=False) for each in differences]
            return Check.FAILED, f"still different after it was healed: {_first(differences)}", differences
        return Check.DEGRADED, f"healed: {_first(differences)}", differences

    def _say(self, group: Group, checked: Checked) -> None:
        for each in [each for each in checked.differences if each.rank == group.rank][:_TOLD]:
            self._tell("corrupted", step=checked.step, **each.to_json())
        if group.rank == 0:
            self._tell("checked", step=checked.step, status=str(checked.status), why=checked.why,
                       differences=len(checked.differences), suspects=len(checked.suspects),
                       bytes=checked.nbytes, seconds=checked.seconds)  # fmt: skip


def _exchange(
    group: Group, replica: Replica, path: str, source: int, others: Sequence[int], heals: bool
) -> Change | None:
    """Give the source's copy to the others, who note how theirs differs, and take it over if they shall."""
    if path in replica.values:
        value = replica.values[path]
        texts = gather_json(group, value.read())
        if group.rank not in others:
            return None
        if heals and value.put is not None:
            value.put(texts[source])
        return Change(1, -1, shown_value(texts[source]), shown_value(texts[group.rank]))
    if group.rank != source and group.rank not in others:
        return None
    tensor = replica.tensors[path]
    # Of another shape or type no byte has a counterpart: sizes first, so that nobody waits for what never comes.
    kinds = [str(tensor.dtype), *tensor.shape]
    change = Change()
    for other in others if group.rank == source else (group.rank,):
        peer = other if group.rank == source else source
        if _tell_each_other(group, peer, kinds):
            if group.rank == source:
                _send(group, tensor, peer)
            else:
                change = _receive(group, tensor, peer, heals)
        elif group.rank != source:
            change = Change(1, -1, "another type or shape", " ".join(map(str, kinds)))
    return None if group.rank == source else change


def _tell_each_other(group: Group, peer: int, kinds: Sequence[object]) -> bool:
    """Whether both have the same kind of tensor."""
    mine = torch.tensor([int.from_bytes(digest_bytes(" ".join(map(str, kinds)).encode())[:7], "little")])
    theirs = torch.zeros(1, dtype=torch.int64)
    swap(group, mine, peer, theirs, peer)
    return bool(mine == theirs)


def _send(group: Group, tensor: torch.Tensor, to: int) -> None:
    for chunk in torch.split(bytes_of(tensor), _CHUNK_BYTES):
        group.send(chunk.cpu(), to).wait()


def _receive(group: Group, tensor: torch.Tensor, sender: int, heals: bool) -> Change:
    mine = bytes_of(tensor)  # the tensor's own memory, or a copy if its elements are not in order
    change, start = Change(), 0
    for chunk in torch.split(mine, _CHUNK_BYTES):
        expected = torch.empty(chunk.numel(), dtype=torch.uint8)
        group.receive(expected, sender).wait()
        change = change.plus(change_between(expected, chunk, tensor.dtype, start))
        start += chunk.numel() // tensor.element_size()
        if heals:
            chunk.copy_(expected)
    if heals and not tensor.is_contiguous():
        tensor.copy_(mine.view(tensor.dtype).view(tensor.shape))
    return change


def _missing(paths: Sequence[Sequence[str]]) -> list[Difference]:
    """Who has what the most ranks have not, or lacks what they have."""
    sets = [frozenset(each) for each in paths]
    usual = Counter(sets).most_common(1)[0][0]
    found = []
    for rank, mine in enumerate(sets):
        found += [Difference(rank, path, "missing") for path in sorted(usual - mine)]
        found += [Difference(rank, path, "only here") for path in sorted(mine - usual)]
    return found


def _first(differences: Sequence[Difference], paths: Sequence[str] = ()) -> str:
    shown = next((each for each in differences if not paths or each.path in paths), differences[0])
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return f"{shown.path} on rank {shown.rank}, {shown.what}{more}"
