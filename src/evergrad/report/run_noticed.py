"""What a timeline tells besides interruptions: soft errors, late ranks, saves that were left out, lost spares."""

from __future__ import annotations

from collections.abc import Iterator

from evergrad.report.run_course import Course
from evergrad.report.run_moments import Moment, number, text, whole
from evergrad.report.run_story import Noticed, Shade


def notice(course: Course) -> Iterator[Noticed]:
    """In the order of time; what several ranks say alike only once."""
    said: set[tuple[str, str]] = set()
    for moment in course.moments:
        found = _notice(course, moment)
        if found is None:
            continue
        what, mark = found
        key = moment.event, what
        if moment.event in ("suspicious", "goes back", "not saved", "begins anew", "restored"):
            if key in said:
                continue
            said.add(key)
        who = "launcher" if moment.uid is None else course.label(moment.uid)
        yield Noticed(moment.at_s, who, what, mark)


def _notice(course: Course, moment: Moment) -> tuple[str, Shade] | None:
    fields = moment.fields
    match moment.event:
        case "flipped":
            before, after = fields.get("before"), fields.get("after")
            return f"a bit of {_place(moment)} was flipped on purpose: {_value(before)} → {_value(after)}", ""
        case "corrupted":
            healed = fields.get("healed") is True
            told = f"{text(fields, 'path')} on rank {whole(fields, 'rank')}: {text(fields, 'what')}"
            return f"{told}; {'healed' if healed else 'not healed'}", "good" if healed else "bad"
        case "ranks differ":
            joined = text(fields, "joined")
            return f"ranks differ{f' after {joined} joined' if joined else ''}: {text(fields, 'why')}", "bad"
        case "unverified":
            return f"nobody can tell whether the run is exact: {text(fields, 'reason')}", ""
        case "suspicious":
            step = whole(fields, "step")
            return f"step {'?' if step is None else step + 1} was suspicious: {text(fields, 'why')}", ""
        case "goes back":
            return f"all go back to {text(fields, 'version')}: {text(fields, 'why')}", "bad"
        case "restored":
            step = whole(fields, "step")
            return ("no checkpoint to restore" if step is None else f"restored step {step}"), ""
        case "slowed":
            by, for_s = number(fields, "by"), number(fields, "for_s")
            lasting = f" for {for_s:g} s" if for_s is not None else ""
            return f"rank {whole(fields, 'rank')} was made {by or 0:g} times as slow{lasting}", ""
        case "healed":
            return f"rank {whole(fields, 'rank')} has its network again", "good"
        case "straggler" | "late":
            return _late(course, moment), ""
        case "all wait":
            return f"every rank waits for another one: {text(fields, 'why')}", "bad"
        case "not saved":
            return f"step {whole(fields, 'step')} was not saved: {text(fields, 'reason')}", "bad"
        case "begins anew":
            return f"starts its script anew: {text(fields, 'reason')}", ""
        case "stuck":
            return f"gave itself up: {text(fields, 'why')}", "bad"
        case "unguarded":
            return f"no guard: {text(fields, 'why')}", ""
        case "node gone":
            return f"node {text(fields, 'node')} is gone: {text(fields, 'why') or 'it has left'}", "bad"
        case "signal":
            return f"the launcher was sent {text(fields, 'signal')}", ""
        case "death" if whole(fields, "rank") is None:
            uid = whole(fields, "uid")
            return f"{course.label(-1 if uid is None else uid)} died ({text(fields, 'how')}) without a rank", "bad"
        case "spare_ended":
            uid = whole(fields, "uid")
            return f"{course.label(-1 if uid is None else uid)} ended its script without a rank", "bad"
        case "cannot_grow":
            return text(fields, "reason"), ""
        case _:
            return None


def _late(course: Course, moment: Moment) -> str:
    if "uids" in moment.fields:
        uids = moment.fields["uids"]
        who = ", ".join(course.label(uid) for uid in uids if isinstance(uid, int)) if isinstance(uids, list) else "?"
        return f"{who}: no report {number(moment.fields, 'waited_s') or 0:g} s after the generation broke"
    return f"rank {whole(moment.fields, 'rank')} {text(moment.fields, 'why')}"


def _place(moment: Moment) -> str:
    path, rank = text(moment.fields, "path"), whole(moment.fields, "rank")
    return f"{path}[{whole(moment.fields, 'index')}] on rank {rank}"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
