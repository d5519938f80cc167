"""What the ranks of a broken generation do next: a pure decision from what each of them saw.

The furthest point that a survivor could not pass is where the job goes on. Whoever is behind it goes ahead, since
somebody has passed its point; what the others do depends on the kind of the point and on the strategy:

    kind of point       rollback   forward   restart
    begin, end, join    retry      retry     restart
    step                redo       repair    restart

A place that became vacant is taken by a waiting spare at once, or else it is gone until a spare waits again; only
during a repair nobody comes in: spares are called then, and take the vacant places before the next step. Whoever leaves
in good order does so between two steps, with its work done: nothing of it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from evergrad.recovery.membership import MembershipPlan, PointKind, SurvivorReport, Verdict

Strategy = Literal["rollback", "forward", "restart"]
STRATEGIES: tuple[Strategy, ...] = ("rollback", "forward", "restart")


@dataclass(frozen=True, slots=True)
class StopDecision:
    """The job cannot go on."""

    reason: str
    """What happened: expected and found."""
    advice: str
    """What a person can do."""
    is_mistake: bool = False
    """True if the script is wrong, so that no restart helps."""


def decide(
    plan: MembershipPlan,
    reports: Mapping[int, SurvivorReport],
    *,
    strategy: Strategy,
    spares: Sequence[int] = (),
    min_ranks: int = 1,
    max_ranks: int = 0,
    can_restart: bool = False,
    finished: Set[int] = frozenset(),
    dead: Set[int] = frozenset(),
) -> MembershipPlan | StopDecision:
    """The generation after `plan`, which broke; or that there is none.

    Every member has reported, has finished (it exited with 0) or is dead; one that died after its report is dead.
    Spares are those that wait, in the order in which they are called. A plan to relaunch has no members yet: they are
    whoever lives, and new processes up to the number of ranks that the job began with. Below `max_ranks` (0: never)
    spares get places of their own, unless the ranks' loaders keep their own places in the data. The work is
    linear in the number of ranks and spares.
    """
    assert set(plan.members) <= reports.keys() | finished | dead, "somebody may still report"
    present = {uid: reports[uid] for uid in plan.members if uid in reports and uid not in finished and uid not in dead}
    gone = tuple(uid for uid in plan.members if uid not in present and uid not in finished)
    left = tuple(uid for uid, report in present.items() if report.leaves)
    if finished and present and all(_may_be_passed(report) for report in present.values()):
        return _last(plan, present, gone)

    # Of those without the job's state nothing can be learnt, and nothing be had.
    able = {uid: report for uid, report in present.items() if report.has_state}
    if mixed := _mixed(able):
        return mixed
    staying = {uid: report for uid, report in able.items() if not report.leaves}
    is_planned = not gone and all(report.planned for report in present.values())
    way = _resumption(plan, present, able, strategy, is_planned=is_planned)
    seats = _rank_slots(plan, present.keys() - left, (*gone, *left), spares)
    if not (way.repairs or way.restarts or any(report.keeps_place for report in able.values())):
        seated = {seat.uid for seat in seats}
        waiting = [uid for uid in spares if uid not in seated]
        seats += [_RankSlot(uid, uid, is_new=True) for uid in waiting[: max(0, max_ranks - len(seats))]]
    # Nobody comes in during a repair.
    members = tuple(seat.uid for seat in seats if not (way.repairs and seat.is_new))
    calls = tuple(seat.uid for seat in seats if way.repairs and seat.is_new)
    if not (present.keys() - left if way.restarts else staying) or len(members) + len(calls) < min_ranks:
        if can_restart:
            return _relaunch(plan, way, present.keys() - left, gone, left)
        return _too_few(plan, len(staying), len(spares), min_ranks)

    joiners = tuple(uid for uid in members if uid not in able and not (way.restarts and uid in present))
    after = {seat.uid: seat.after for seat in seats}
    held = {} if way.restarts else _held(plan, staying, way.point, {uid: after[uid] for uid in members})
    return MembershipPlan(
        plan.generation + 1,
        members,
        previous=plan.members,
        joiners=joiners,
        source=_source(members, way.verdicts, staying, way.point) if joiners and not way.restarts else None,
        point=way.point,
        step=max((report.step for report in able.values()), default=plan.step),
        kind=way.kind,
        verdicts=way.verdicts,
        takes={uid: rank for uid in joiners if (rank := plan.rank_of(after[uid])) is not None},
        keepers={uid: held[uid] for uid in joiners if uid in held},
        todo=_todo(members, way.verdicts, present) if way.repairs else (),
        dead=gone,
        left=left,
        restart=way.restarts,
        version=way.version,
        calls=calls,
        vacant=tuple((place, seat.after) for place, seat in enumerate(seats) if way.repairs and seat.is_new),
        held=held,
    )


def with_relaunched_members(
    plan: MembershipPlan, num_ranks: int, spares: Sequence[int], start: Callable[[int, int | None], int]
) -> MembershipPlan:
    """A plan to relaunch with its members: who lives keeps its place, spares and new processes take the others.

    `start` is told the rank that a new process is for, and the uid that had it before, if any has; it gives its uid.
    """
    places: list[int | None] = [*plan.previous, *[None] * (num_ranks - len(plan.previous))]
    waiting, members = iter(spares), []
    for rank, before in enumerate(places):
        if before is not None and before in plan.verdicts:
            members.append(before)
        elif (spare := next(waiting, None)) is not None:
            members.append(spare)
        else:
            members.append(start(rank, before))
    return replace(plan, members=tuple(members), joiners=tuple(uid for uid in members if uid not in plan.verdicts))


def is_exact(plan: MembershipPlan) -> bool:
    """Whether training goes on as if nothing had been lost: every place is taken, with all that was there."""
    if (
        is_after_others_finished(plan) and not plan.dead
    ):  # nothing is left to be trained, unless the script begins another epoch
        return True
    whole = plan.restart or all(uid in plan.keepers for uid in plan.joiners)
    return whole and len(plan.members) == len(plan.previous) and Verdict.REPAIR not in plan.verdicts.values()


def is_after_others_finished(plan: MembershipPlan) -> bool:
    """Return True if these ranks had not heard that the last point was passed when others had finished."""
    ended = set(plan.previous) - set(plan.members) - set(plan.dead) - set(plan.left)
    return plan.kind is PointKind.END and bool(ended) and set(plan.verdicts.values()) == {Verdict.PROCEED}


@dataclass(frozen=True, slots=True)
class _Resumption:
    """Where the job goes on, and what each survivor does to get there."""

    point: int
    kind: PointKind
    verdicts: dict[int, Verdict]
    restarts: bool = False
    version: str = ""
    """What all go back to, if that is agreed; else the newest checkpoint."""
    repairs: bool = False
    """True if some ranks keep what they have reduced."""


def _resumption(
    plan: MembershipPlan,
    present: Mapping[int, SurvivorReport],
    able: Mapping[int, SurvivorReport],
    strategy: Strategy,
    *,
    is_planned: bool,
) -> _Resumption:
    """The way on of those who are present, by the reports of the able; `is_planned`: nobody was lost."""
    furthest = max((report.point for report in able.values()), default=plan.point)
    there = [report for report in able.values() if report.point == furthest]
    # A restart of which nobody has passed the first point is begun again: some may have restored, and others not.
    begun_again = plan.restart and furthest <= plan.point
    back_to = next((report.back_to for report in able.values() if report.back_to), plan.version if begun_again else "")
    if (strategy == "restart" and not is_planned) or begun_again or back_to:
        kind = next((report.kind for report in there), plan.kind)
        return _Resumption(max(plan.point, furthest), kind, dict.fromkeys(present, Verdict.RESTART), True, back_to)
    kind = _kind(there, furthest)
    # Gradients of different tries are of different numbers: none can be kept.
    goes_back = kind is PointKind.STEP and (strategy == "rollback" or len({report.tries for report in there}) > 1)
    if goes_back:
        strategy = "rollback"
        # A step of several points is done again as a whole, or not at all.
        furthest = min((report.begun_at for report in there), default=furthest)
    verdicts = {uid: _verdict(report, furthest, strategy) for uid, report in present.items()}
    return _Resumption(furthest, kind, verdicts, repairs=Verdict.REPAIR in verdicts.values())


def _last(plan: MembershipPlan, present: Mapping[int, SurvivorReport], gone: tuple[int, ...]) -> MembershipPlan:
    """Others have finished, so the last point counts as passed: those who are left proceed."""
    return MembershipPlan(
        plan.generation + 1,
        tuple(present),
        previous=plan.members,
        point=max(report.point for report in present.values()) + 1,
        kind=PointKind.END,
        verdicts=dict.fromkeys(present, Verdict.PROCEED),
        dead=gone,
    )


def _relaunch(
    plan: MembershipPlan, way: _Resumption, staying: Set[int], gone: tuple[int, ...], left: tuple[int, ...]
) -> MembershipPlan:
    """All over again, as far as the newest checkpoint; `with_relaunched_members` gives it its members."""
    return MembershipPlan(
        plan.generation + 1,
        (),
        previous=plan.members,
        point=max(plan.point, way.point),
        verdicts={uid: Verdict.RESTART for uid in plan.members if uid in staying},
        dead=gone,
        left=left,
        restart=True,
        version=way.version,
        relaunch=True,
    )


@dataclass(frozen=True, slots=True)
class _RankSlot:
    """A place in the next generation."""

    uid: int
    after: int
    """Who had it before: itself, if it stays."""
    is_new: bool = False


def _rank_slots(plan: MembershipPlan, present: Set[int], gone: Sequence[int], spares: Sequence[int]) -> list[_RankSlot]:
    """Who sits where, in order. Vacant places are filled from the first on; what no spare is left for vanishes."""
    vacant = {uid for _, uid in plan.vacant} | set(gone)
    waiting, seats = iter(spares), []
    for uid in _places(plan):
        if uid in present:
            seats.append(_RankSlot(uid, uid))
        elif uid in vacant and (spare := next(waiting, None)) is not None:
            seats.append(_RankSlot(spare, uid, is_new=True))
    return seats


def _places(plan: MembershipPlan) -> Iterator[int]:
    """The members and, between them, those whose places are vacant: each inserted at its position, the first first."""
    taken: dict[int, int] = {}
    # From the last one back: whoever was inserted later is at its position, and has moved earlier ones by one.
    for number, (position, uid) in reversed([*enumerate(sorted(plan.vacant))]):
        place = min(position, len(plan.members) + number)
        while place in taken:
            place += 1
        taken[place] = uid
    members = iter(plan.members)
    for place in range(len(plan.members) + len(taken)):
        yield taken[place] if place in taken else next(members)


def _may_be_passed(report: SurvivorReport) -> bool:
    """Whether someone who left in good order can have passed this point: not while gradients of it are missing."""
    if report.kind is PointKind.STEP:
        return report.has_state and len(set(report.done)) == report.buckets
    return report.has_state and report.kind is PointKind.END


def _mixed(able: Mapping[int, SurvivorReport]) -> StopDecision | None:
    """Return why the job cannot go on if ranks take the furthest point for one of different kinds."""
    furthest = max((report.point for report in able.values()), default=0)
    at = {report.kind: report.rank for report in able.values() if report.point == furthest}
    kinds = sorted(at.keys() - {PointKind.JOIN})
    if len(kinds) < 2:
        return None
    words = {
        PointKind.BEGIN: "begins an epoch",
        PointKind.STEP: "is in a step",
        PointKind.END: "has come to the end of an epoch",
    }
    return StopDecision(
        "ranks have not taken equally many batches: "
        + ", and ".join(f"rank {at[kind]} {words[kind]}" for kind in kinds),
        "Decide by what all ranks have alike, such as job.batch_index, where an epoch is left or a batch is skipped.",
        is_mistake=True,
    )


def _kind(there: Sequence[SurvivorReport], furthest: int) -> PointKind:
    kinds = {report.kind for report in there}
    points = kinds - {PointKind.JOIN}  # who stopped before it has not begun it
    assert len(points) <= 1, f"point {furthest} is of kinds {sorted(kinds)}"
    return next(iter(points or kinds), PointKind.BEGIN)


def _verdict(report: SurvivorReport, furthest: int, strategy: Strategy) -> Verdict:
    if not report.has_state:
        return Verdict.RETRY
    if report.point < furthest:
        assert report.point == furthest - 1, f"uid {report.uid} is at {report.point}, another one at {furthest}"
        assert report.kind is not PointKind.JOIN, (
            f"uid {report.uid} had not begun point {report.point}: none can pass it"
        )
        return Verdict.PROCEED
    if report.kind is not PointKind.STEP:
        return Verdict.RETRY
    return Verdict.REPAIR if strategy == "forward" else Verdict.REDO


def _source(
    members: Sequence[int], verdicts: Mapping[int, Verdict], able: Mapping[int, SurvivorReport], furthest: int
) -> int | None:
    """The first rank that stands where the job goes on; rather one that has not done its backward pass."""
    ready = [uid for uid in members if uid in able and able[uid].point >= furthest]
    return min(ready, key=lambda uid: verdicts[uid] is Verdict.REPAIR, default=None)


def _held(
    plan: MembershipPlan, able: Mapping[int, SurvivorReport], furthest: int, after: Mapping[int, int]
) -> dict[int, int]:
    """Who holds what only that member has, of those who live.

    Each rank's things go to the next one when a point is passed. In a generation that has passed none, they lie where
    they lay before, whatever its ranks are.
    """
    if furthest > plan.point:
        following = (*plan.members[1:], plan.members[0])
        held = {uid: holder for uid, holder in zip(plan.members, following, strict=True) if uid != holder}
    else:
        held = plan.held
    return {uid: held[before] for uid, before in after.items() if held.get(before) in able}


def _todo(
    members: Sequence[int], verdicts: Mapping[int, Verdict], reports: Mapping[int, SurvivorReport]
) -> tuple[int, ...]:
    """The buckets to reduce again."""
    repairing = [reports[uid] for uid in members if verdicts.get(uid) is Verdict.REPAIR]
    counts = {report.buckets for report in repairing}
    assert len(counts) == 1, f"ranks differ in their number of buckets: {sorted(counts)}"
    kept: set[int] = set()
    # Whoever comes to this point in the new generation reduces all that it has.
    if len(repairing) == len(members):
        kept = set.intersection(*(set(report.done) for report in repairing))
    return tuple(bucket for bucket in range(counts.pop()) if bucket not in kept)


def _too_few(plan: MembershipPlan, left: int, num_spares: int, min_ranks: int) -> StopDecision:
    return StopDecision(
        f"too few ranks: {left} of {plan.world_size} left, {num_spares or 'no'} spare{'s' * (num_spares > 1)} waiting, "
        f"{max(min_ranks, 1)} needed",
        "Start it again with more spares or a lower --min-ranks; with a checkpointer it goes on where it saved.",
    )
