"""A run in words: only what its timeline says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evergrad.report.markup import literal
from evergrad.report.run_story import Interruption, RunStory
from evergrad.wording import counted

CLOCKS_DISAGREE = "clocks disagree"
"""What stands where a length of time would be less than nothing."""

_TOLD = 4  # failures that the answer tells one by one
_BAD_ENDS = ("failed", "fatal", "too-few")
_VERDICTS = {
    "redo": "did the mini-batch again",
    "repair": "reduced what was missing of its gradients without the lost rank",
    "retry": "went on at the next step",
    "restart": "went back to a checkpoint",
    "proceed": "went on",
}


def duration(seconds: float | None) -> str:
    """A length of time in a person's units.

    >>> duration(0.0031), duration(0.0972), duration(1.5), duration(75.2), duration(7300), duration(None)
    ('3.1 ms', '97 ms', '1.50 s', '75.2 s', '2 h 2 min', '?')
    """
    if seconds is None:
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 600:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def summary(story: RunStory) -> str:
    """One line: who, how much, how it ended, and what failures took."""
    who = counted(story.num_ranks, "rank")
    if story.num_spares:
        who += f" and {counted(story.num_spares, 'spare')}"
    steps = counted(story.steps, "step") if story.steps is not None else "no step on record"
    return f"{who}, {steps} in {duration(story.seconds)}: {story.outcome or 'no end on record'}; {_failures(story)}"


def answer(story: RunStory) -> list[str]:
    """Paragraphs for the head of the page, the one to remember first."""
    told = [f"**{literal(_capital(summary(story)))}.**", *map(literal, story.notes)]
    if story.outcome not in ("", "finished") and story.message:
        told.append(f"It ended because of this: {literal(story.message.rstrip('.'))}.")
    told += [_failure(story, each) for each in story.failures[:_TOLD]]
    more = len(story.failures) - _TOLD
    if more > 0:
        told.append(f"{counted(more, 'more failure')}: see the table below.")
    return [*told, *_planned(story), *_result(story)]


def caveats(story: RunStory) -> list[str]:
    """What a reader has to know of how far durations can be trusted."""
    if not story.is_spread:
        return []
    told = "Several machines: durations are differences of their wall clocks, which may not agree."
    wrong = sum(each.clocks_disagree for each in story.failures)
    if wrong:
        what = f"of {counted(wrong, 'failure')} a moment lies before what led to it, and such times are left out"
        told = f"{told.rstrip('.')}: {what}."
    return [told]


def course_of(each: Interruption) -> str:
    """From the failure to the next step, in words: what is not on record is left out."""
    told = []
    by = f" by {each.seen_by}" if each.seen_by else ""
    phases = {phase.name: duration(phase.seconds) for phase in each.phases}
    if "unseen" in phases:
        told.append(f"seen{by} after {phases['unseen']}")
    elif each.failed_s is not None and each.seen_s is not None:
        told.append(f"seen{by}, by a clock that disagrees with that of the failure")
    elif each.seen_s is not None:
        told.append(f"seen first{by} (when it failed is not on record)")
    if "agreeing" in phases:
        told.append(f"the next plan {phases['agreeing']} later")
    if "recovering" in phases:
        told.append(f"the next step applied after another {phases['recovering']}")
    if each.seconds is not None and len(phases) > 1:
        told.append(f"{duration(each.seconds)} in all")
    if each.overtaken:
        told.append("the next generation broke, too, before a step was applied")
    return ", ".join(told)


def then(each: Interruption) -> str:
    """What became of it, short: for a table."""
    if each.ranks is None:
        return "no plan"
    if each.overtaken:
        return "overtaken"
    told = [each.verdict or "plan", *each.joined[:2]]
    if len(each.joined) > 2:
        told.append(f"{len(each.joined) - 2} more")
    if each.ranks != each.ranks_before:
        told.append(counted(each.ranks, "rank"))
    return ", ".join(told)


def _failures(story: RunStory) -> str:
    lost = sum(len(each.lost) for each in story.failures)
    nobody = "no rank was lost" if story.outcome in _BAD_ENDS and not lost else ""
    if not story.failures:
        return nobody or "no failure"
    chains = _chains(story)
    count, more = len(chains), len(story.failures) - len(chains)
    told = counted(count, "failure")
    if more:
        told += f" and {more:,} more before {'it was' if count == 1 else 'those were'} over,"
    if lost and lost != count:
        told += f" that took {counted(lost, 'rank')}"
    told = told.rstrip(",") + (f" ({nobody})" if nobody else "")
    known = [seconds for seconds in map(_seconds, chains) if seconds is not None]
    if not known:
        return told
    in_all = f"{duration(sum(known))} to the next step" if count == 1 else f"{duration(sum(known))} to the next steps"
    return f"{told}, {in_all}" + (f" ({len(known)} of {count} known)" if len(known) < count else "")


def _chains(story: RunStory) -> list[list[Interruption]]:
    """Failures, each with those that came before it was over: the job stood still once."""
    chains: list[list[Interruption]] = []
    for each in story.interruptions:
        last = chains[-1][-1] if chains else None
        if last is not None and last.overtaken and last.generation + 1 == each.generation:
            chains[-1].append(each)
        elif each.kind == "failure":
            chains.append([each])
    return chains


def _seconds(chain: Sequence[Interruption]) -> float | None:
    """From the first failure to the next applied step."""
    begin_s, end_s = chain[0].begin_s, chain[-1].going_on_s
    if begin_s is None or end_s is None or any(each.clocks_disagree for each in chain) or end_s < begin_s:
        return None
    return end_s - begin_s


def _failure(story: RunStory, each: Interruption) -> str:
    after = "" if each.step is None else f"after step {each.step:,} "
    on_purpose = sorted({loss.injected for loss in each.lost if loss.injected})
    why = f" (on purpose: {', '.join(on_purpose)})" if on_purpose else ""
    course = course_of(each)
    told = f"{literal(_capital(f'{after}{each.what}{why}'))}{': ' + literal(course) if course else ''}."
    if each.ranks is None:
        return f"{told} {'There was no further generation.' if story.outcome else 'No further plan is on record.'}"
    if each.overtaken:  # what was planned did not come about
        return told
    joined = f", {literal(_and(each.joined))} joined" if each.joined else ""
    told += f" Those left {_VERDICTS.get(each.verdict, 'went on')}{joined}: on with {counted(each.ranks, 'rank')}."
    if each.steps_redone is not None and each.steps_redone > 1:
        told += f" {counted(each.steps_redone, 'step')} had to be done again."
    return told


def _planned(story: RunStory) -> Iterator[str]:
    planned = [each for each in story.interruptions if each.kind == "planned"]
    if planned:
        shown = "; ".join(each.what for each in planned[:3]) + ("; …" if len(planned) > 3 else "")
        yield f"{counted(len(planned), 'planned change')} of who trains: {literal(shown)}."


def _result(story: RunStory) -> Iterator[str]:
    bad = sum(each.mark == "bad" for each in story.noticed)
    healed = sum(each.what.endswith("; healed") for each in story.noticed)
    if healed:
        yield f"A guard found ranks whose state differed, and healed {counted(healed, 'tensor')}."
    if story.inexact:
        yield f"Not as without failures: {literal(story.inexact.rstrip('.'))}."
    elif story.failures and story.exact:
        yield "The run went on as it would have without failures, to the last bit; all ranks were compared at its end."
    elif story.failures and story.unverified and story.outcome == "finished":
        yield f"Not verified to be as without failures: {story.unverified.rstrip('.')}."
    if story.samples_lost:
        yield f"{counted(story.samples_lost, 'sample')} went with a lost rank and into no step."
    if bad:
        yield f"{counted(bad, 'other thing')} to look at, under “What else was noticed”."
    yield from caveats(story)


def _and(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
