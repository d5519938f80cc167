"""Schedules of failures: their words, their files, whom they hit, and how often."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evergrad.errors import EvergradError, FileAccessError, UsageError
from evergrad.recovery.failures.injector import FailureSites, FailureTrigger, InjectedFailure
from evergrad.recovery.failures.schedule import Failure, Failures, Phase
from refusals import refusal

MEMBERS, NODES = (10, 11, 12, 13), ("n0", "n0", "n1", "n1")

numbers = st.integers(0, (1 << 63) - 1)
names = st.one_of(st.integers(0, 999), st.from_regex(r"[a-z][a-z0-9._-]{0,9}", fullmatch=True))
targets = st.one_of(
    st.builds(lambda rank: {"rank": rank}, numbers),
    st.builds(lambda node: {"node": node}, names),
    st.builds(lambda count, seed: {"random": count, "seed": seed}, st.integers(1, 99), numbers),
)
sites = st.one_of(
    st.builds(lambda phase: {"phase": phase}, st.sampled_from(Phase)),
    st.builds(lambda bucket, at: {"bucket": bucket, "at": at}, numbers, st.sampled_from(["before", "during", "after"])),
)
seconds = st.floats(0.001, 1e6)
some_bits = st.one_of(st.sampled_from(["sign", "exponent", "exponent-msb", "mantissa", "3-8"]), st.integers(0, 63))
some_faults = st.sampled_from(["bitmask:mask=101", "scale:factor=4500", "stuckat:value=1,bits=exponent", "bitflip"])
# Each kind with the words that are its own.
own_words: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "kill": st.just({}),
    "exception": st.just({}),
    "leave": st.just({}),
    "stop": st.fixed_dictionaries({}, optional={"for_s": seconds}),
    "cut": st.fixed_dictionaries({}, optional={"for_s": seconds}),
    "slow": st.fixed_dictionaries({"by": st.floats(1.01, 100)}, optional={"for_s": seconds}),
    "flip": st.one_of(
        st.fixed_dictionaries(
            {}, optional={"where": st.sampled_from(["model/**", "re:fc$", "optimizer"]), "bits": some_bits,
                          "count": st.integers(1, 9), "seed": numbers}
        ),
        st.fixed_dictionaries({"fault": some_faults}),
    ),
}  # fmt: skip
whens = st.one_of(
    st.builds(lambda step, site: {"step": step, **site}, numbers, sites),
    st.builds(lambda time, site: {"time": time, **site}, st.floats(0, 1e6), st.one_of(st.just({}), sites)),
)
words = st.builds(
    lambda target, when, times: {**target, **when, "times": times},
    *(targets, whens, st.one_of(st.none(), st.integers(1, 9))),
)
kinds_and_words = st.sampled_from(sorted(own_words)).flatmap(
    lambda kind: st.builds(lambda own, given: (kind, {**given, **own}), own_words[kind], words)
)
schedules = st.lists(st.builds(lambda pair: Failure(pair[0], **pair[1]), kinds_and_words), max_size=5)


class SimulatedRank:
    """One rank of a job of four; processes that share `claims` see each other's. Its own acts: it notes them."""

    reaches_others = True

    def __init__(self, failures: Failures, rank: int, claims: dict[str, str]) -> None:
        self.rank, self.calls, self.killed, self.seeds = rank, [], [], []
        self.claims, self.now = claims, 0.0
        self.trigger = FailureTrigger(failures, claim=self._claim, acts=self, clock=lambda: self.now)

    def signal(self, kind: str, ranks: Sequence[int], for_s: float | None, *, whole_node: bool = False) -> None:
        self.killed.append(list(ranks))

    def slow(self, rank: int, by: float, for_s: float | None) -> None:
        self.killed.append([rank])

    def cut(self, rank: int, for_s: float | None) -> None:
        self.killed.append([rank])

    def flip(self, rank: int, failure: Failure, seed: int) -> None:
        self.killed.append([rank])
        self.seeds.append(seed)

    def _claim(self, key: str, value: str) -> str:
        self.calls.append(key)
        return self.claims.setdefault(key, value)

    def reach(self, phase: Phase = Phase.BACKWARD, *, step: int = 7, generation: int = 0, **more: Any) -> None:
        """Come to a site; with `members` and `nodes` as they are after a loss, if given."""
        rank = more.pop("rank", self.rank)
        there: dict[str, Any] = {"members": MEMBERS, "nodes": NODES, **more}
        self.trigger.reach(phase, step=step, generation=generation, rank=rank, **there)

    def fails(self, *arguments: Any, **more: Any) -> bool:
        """Whether something came of a visit."""
        before = len(self.killed)
        try:
            self.reach(*arguments, **more)
        except InjectedFailure:
            return True
        return len(self.killed) > before


def rank_of(text: str, rank: int, claims: dict[str, str] | None = None) -> SimulatedRank:
    return SimulatedRank(Failures.parse([text]), rank, {} if claims is None else claims)


# The words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill rank=1 step=7", Failure("kill", rank=1, step=7)),
        ("exception node=1 step=0 phase=data", Failure("exception", node="n1", step=0, phase=Phase.DATA)),
        ("kill node=n3 step=2", Failure("kill", node=3, step=2)),
        ("kill node=gpu-17.local step=2", Failure("kill", node="gpu-17.local", step=2)),
        ("kill random=2 step=5 seed=9 times=3", Failure("kill", random=2, step=5, seed=9, times=3)),
        ("kill rank=0 step=1 bucket=2", Failure("kill", rank=0, step=1, bucket=2, at="before")),
        ("  kill  at=during bucket=0\tstep=1 rank=0 ", Failure("kill", rank=0, step=1, bucket=0, at="during")),
        ("kill rank=0 step=1 phase=backward bucket=2 at=after", Failure("kill", rank=0, step=1, bucket=2, at="after")),
        ("kill rank=0 step=1 phase=data times=always", Failure("kill", rank=0, step=1, phase=Phase.DATA, times=None)),
    ],
)
def test_words_say_what_fails(text: str, expected: Failure) -> None:
    assert Failure.parse(text) == expected


def test_what_is_not_said_is_once_before_the_backward_pass() -> None:
    failure = Failure.parse("kill rank=1 step=7")
    assert (failure.phase, failure.bucket, failure.at, failure.times) == (Phase.BACKWARD, None, None, 1)
    assert str(failure) == "kill rank=1 step=7"


@given(schedules)
def test_every_schedule_comes_back_from_its_words_and_from_json(failures: list[Failure]) -> None:
    schedule = Failures(failures)
    assert Failures.parse(schedule.texts) == schedule
    assert Failures.from_json(schedule.to_json()) == schedule
    assert str(schedule).splitlines() == schedule.texts


@given(kinds_and_words)
def test_keywords_and_words_mean_the_same(pair: tuple[str, dict[str, Any]]) -> None:
    kind, given = pair
    (one,) = getattr(Failures(), kind)(**given)
    assert one == Failure.parse(str(one))


def test_a_schedule_grows_into_a_new_one() -> None:
    none = Failures()
    one = none.kill(rank=1, step=7)
    two = one.exception(node=0, step=3, phase="forward", times="always")
    assert (len(none), len(one), len(two)) == (0, 1, 2)
    assert two[0] == one[0]
    assert two[1:] == Failures().exception(node="n0", step=3, phase=Phase.FORWARD, times=None)
    assert two.index(Failure("kill", rank=1, step=7)) == 0
    assert hash(two) == hash(Failures(two))
    assert two != one
    assert str(two) == "kill rank=1 step=7\nexception node=n0 step=3 phase=forward times=always"


WRONG_WORDS = [
    ("", "kind: expected kill, exception, stop, slow, cut, leave or flip, found nothing"),
    (
        "kil rank=1 step=7",
        "kind: expected kill, exception, stop, slow, cut, leave or flip, found 'kil'. Did you mean 'kill'?",
    ),
    ("KILL rank=1 step=7", "Did you mean 'kill'?"),
    ("rank=1 step=7", "kind: expected kill, exception, stop, slow, cut, leave or flip, found 'rank=1'."),
    ("kill rank=1", "expected exactly one of step=S and time=SECONDS, found none"),
    ("kill rank=1 step=7 time=3", "found step=7 and time=3"),
    ("kill step=7", "expected exactly one of rank=R, node=N and random=K, found none"),
    ("kill rank=1 node=1 step=7", "found rank=1 and node=n1"),
    ("kill rnk=1 step=7", "unknown word 'rnk': expected one of rank, node, random, step, time, phase, bucket, at"),
    ("kill rnk=1 step=7", "Did you mean 'rank'?"),
    ("kill rank=1 7", "unknown word '7': expected name=value."),
    ("kill rank=1 stepp", "Did you mean 'step=…'?"),
    ("kill rank=1 rank=2 step=7", "rank is given twice: rank=1 and 'rank=2'"),
    ("kill rank=one step=7", "rank: expected a whole number, 0 or more, found 'one'"),
    ("kill rank=-1 step=7", "rank: expected a whole number, 0 or more, found -1"),
    ("kill rank= step=7", "rank: expected a whole number, 0 or more, found ''"),
    ("kill rank=1_0 step=7", "found '1_0'"),
    ("kill rank=1 step=7.5", "step: expected a whole number, 0 or more, found '7.5'"),
    ("kill rank=1 step=99999999999999999999", "step: expected a whole number, 0 or more, found 9999"),
    ("kill random=0 step=7", "random: expected a whole number, 1 or more, found 0"),
    ("kill rank=1 step=7 times=0", "times: expected a whole number, 1 or more, or always, found 0"),
    ("kill rank=1 step=7 times=allways", "or always, found 'allways'"),
    ("kill node=n/1 step=7", "node: expected an index such as 1 or a name such as n1, found 'n/1'"),
    ("kill rank=1 step=7 phase=foward", "found 'foward'. Did you mean 'forward'?"),
    ("kill rank=1 step=7 phase=lunch", "optimizer, checkpoint, agreement or recovery, found 'lunch'."),
    ("kill rank=1 step=7 phase=data bucket=1", "bucket=1: expected phase=backward with it, found phase=data"),
    ("kill rank=1 step=7 at=during", "at=during: expected bucket=B with it, found none"),
    ("kill rank=1 step=7 bucket=1 at=dring", "at: expected before, during or after, found 'dring'. Did you mean"),
    ("kill rank=1 step=7 seed=3", "seed=3: expected random=K with it, found rank=1"),
    ("stop rank=1 step=7 for=0", "for: expected a number of seconds above 0, found 0.0"),
    ("stop rank=1 step=7 for=ever", "for: expected a number of seconds above 0, found 'ever'"),
    ("stop rank=1 step=7 by=2", "by=2: expected slow with it, found stop"),
    ("kill rank=1 step=7 for=1.5", "for=1.5: expected stop or slow or cut with it, found kill"),
    ("slow rank=1 step=7", "slow: expected by=F with it"),
    ("slow rank=1 step=7 by=1", "by: expected a number above 1, found 1.0"),
    ("kill rank=1 time=-1", "time: expected a number of seconds, 0 or more, found -1.0"),
    ("kill rank=1 time=soon", "found 'soon'"),
    ("kill rank=1 time=1e999", "found inf"),
    ("kill rank=1 step=7 bits=sign", "bits=sign: expected flip with it, found kill"),
    ("flip rank=1 step=7 bits=exponnt", "one of sign, exponent, exponent-msb, mantissa"),
    ("flip rank=1 step=7 count=0", "count: expected a whole number, 1 or more, found 0"),
    ("flip rank=1 step=7 where=", "where: expected a path or a glob such as model/**"),
    ("flip rank=1 step=7 where=re:(", "'re:(' is no regular expression"),
    ("flip rank=1 step=7 fault=scal", "bitflip, bitmask, scale, setvalue or stuckat, found 'scal'. Did you mean"),
    ("flip rank=1 step=7 fault=scale", "expected a setting as in fault=scale:factor=4500, found none"),
    (
        "flip rank=1 step=7 fault=scale:fctor=2",
        "expected factor=…, elements=…, stride=…, each once, found 'fctor=2'.",
    ),
    ("flip rank=1 step=7 fault=scale:factor=x", "fault=scale: factor: expected a number, found 'x'"),
    ("flip rank=1 step=7 fault=stuckat:value=2", "stuck at 2: expected 0 or 1"),
    ("flip rank=1 step=7 bits=3 fault=scale:factor=2", "bits=3: expected within the fault"),
    ("weibul mean=3", "Did you mean 'weibull'?"),
    ("kill rank=1 step=7\x1b[2J\nbucket", "unknown word 'bucket'"),
]


def test_wrong_words_are_named_in_one_line() -> None:
    for text, says in WRONG_WORDS:
        message = refusal(partial(Failure.parse, text))
        assert says in message or says in message.replace("\\x1b[2J", ""), f"{text!r}: {message}"
        assert message.startswith(f"failure {text!r}: "), message
        assert message.endswith("Example: kill rank=1 step=7 bucket=2 at=during"), message
        assert message.isprintable(), repr(message)
        Failure.parse(message.rpartition("Example: ")[2])


def test_a_long_text_leaves_room_for_what_is_wrong_with_it() -> None:
    with pytest.raises(UsageError, match=r"unknown word 'x+….*Example: kill"):
        Failure.parse("kill " + "x" * 5000)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Failures().kill(rank=1), "kill: expected exactly one of step=S and time=SECONDS, found none"),
        (lambda: Failures().kill(rank="1", step=7), "kill: rank: expected a whole number, 0 or more, found '1'"),
        (lambda: Failures().kill(rank=True, step=7), "found True"),
        (lambda: Failures().kill(rank=1, stepp=7), "unknown word 'stepp'.* Did you mean 'step'?"),
        (lambda: Failures().exception(node=1.5, step=7), "exception: node: expected .* found 1.5"),
        (lambda: Failures().exception(node=-1, step=7), "node: expected .* found -1"),
        (lambda: Failures().kill(rank=1, step=7, phase=3), "phase: expected .* found 3"),
        (lambda: Failures().kill(rank=1, step=None), "exactly one of step=S and time=SECONDS, found none"),
        (lambda: Failures(["kill rank=1 step=7"]), r"expected failures, found 'kill rank=1 step=7'. Failures.parse"),
        (lambda: Failures.parse([7]), "failure 7: expected text, found int"),
        (lambda: Failure("kil", rank=1, step=7), "Did you mean 'kill'"),
        (lambda: Failures.from_json("[]"), r"expected {\"schema_version\": 1, .* found '\[\]'"),
        (lambda: Failures.from_json("nonsense"), "found 'nonsense'"),
        (lambda: Failures.from_json('{"schema_version": 2, "failures": []}'), "expected .*: 1,"),
        (lambda: Failures.from_json('{"schema_version": 1}'), "expected a list of failures, found None"),
        (lambda: Failures.from_json('{"schema_version": 1, "failures": [{}]}'), "expected text, found dict"),
    ],
)
def test_wrong_arguments_are_one_line(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


# Files


def test_a_file_holds_words_or_tables(tmp_path: Path) -> None:
    expected = Failures().kill(rank=1, step=10, bucket=2).exception(random=2, step=3, times="always", seed=4)
    (tmp_path / "words.toml").write_text(f"# why not\nfailures = {json.dumps(expected.texts)}\n")
    (tmp_path / "tables.toml").write_text(
        '[[failure]]\nkind = "kill"\nrank = 1\nstep = 10\nbucket = 2\n'
        '[[failure]]\nkind = "exception"\nrandom = 2\nstep = 3\ntimes = "always"\nseed = 4\n'
    )
    (tmp_path / "none.toml").write_text("failures = []\n")
    assert Failures.load(tmp_path / "words.toml") == expected
    assert Failures.load(str(tmp_path / "tables.toml")) == expected
    assert Failures.load(tmp_path / "none.toml") == Failures()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('failurs = ["kill rank=1 step=1"]', "unknown key 'failurs'. Did you mean 'failures'?"),
        ("", "expected either failures = […] or [[failure]], found none"),
        ('failures = []\n[[failure]]\nkind = "kill"', "found both"),
        ('failures = "kill rank=1 step=1"', "failures: expected a list of texts, found 'kill rank=1 step=1'"),
        ("failures = [1]", "failures: expected a list of texts, found [1]"),
        ('[failure]\nkind = "kill"', "failure: expected a list of tables, each under [[failure]], found {'kind'"),
        ('failures = ["kill rank=1"]', "failure 'kill rank=1': expected exactly one of step=S and time"),
        ("[[failure]]\nrank = 1\nstep = 1", "failure 1: kind: expected kill, exception, stop, slow, cut,"),
        ('[[failure]]\nkind = "kill"\nrank = "1"\nstep = 1', "failure 1: rank: expected a whole number, 0 or"),
        ('[[failure]]\nkind = "kill"\nrank = 1\nstep = 1\n[[failure]]\nkind = "kill"\nrank = 1\nstp = 1',
         "failure 2: unknown word 'stp': expected one of rank, node,"),
        ('[[failure]]\nkind = "kill"\nrank = 1\nstep = 1\ntimes = "ever"', "or always, found 'ever'"),
        ("failures = [", "is no TOML"),
        ("failures = ['\xff']".encode("latin-1"), "is no TOML: expected UTF-8 text, found the byte 0xff at offset 13"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_in_one_line(tmp_path: Path, content: str | bytes, says: str) -> None:
    path = tmp_path / "failures.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(EvergradError) as caught:
        Failures.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match=r"none\.toml: cannot be read: no such file"):
        Failures.load(tmp_path / "none.toml")


# Whom they hit


@pytest.mark.parametrize(
    ("text", "job", "says"),
    [
        ("kill rank=7 step=1", {"ranks": 4}, r"'kill rank=7 step=1': rank=7: the job has ranks 0 to 3"),
        ("kill rank=1 step=1", {"ranks": 1}, "rank=1: the job has rank 0 alone"),
        ("kill random=5 step=1", {"ranks": 4}, "random=5: the job has ranks 0 to 3"),
        ("kill node=2 step=1", {"ranks": 4, "nodes": 2}, "node=n2: the job has nodes n0, n1"),
        ("kill node=gpu7 step=1", {"ranks": 4, "nodes": ["gpu1", "gpu2"]}, "nodes gpu1, gpu2. Did you mean 'gpu"),
    ],
)
def test_what_can_never_happen_is_refused(text: str, job: dict[str, Any], says: str) -> None:
    schedule = Failures.parse(["kill rank=0 step=1", text])
    with pytest.raises(UsageError, match=says):
        schedule.check(**job)


def test_what_can_happen_is_not_refused() -> None:
    schedule = Failures.parse(["kill rank=3 step=1", "kill random=4 step=1", "kill node=1 step=1"])
    schedule.check(ranks=4, nodes=2)
    schedule.check(ranks=4, nodes=["n0", "n1"])
    schedule.check(ranks=4)


def hit(text: str, *, index: int = 0, ranks: int = 4) -> tuple[int, ...]:
    nodes = [f"n{rank // 2}" for rank in range(ranks)]
    return Failure.parse(text).targets(range(100, 100 + ranks), nodes, index=index)


def test_a_failure_hits_its_rank_or_the_ranks_of_its_node() -> None:
    assert hit("kill rank=2 step=7") == (2,)
    assert hit("kill node=1 step=7") == (2, 3)
    assert hit("stop rank=2 time=8") == (2,)


def test_nobody_is_hit_where_rank_or_node_are_gone() -> None:
    assert hit("kill rank=3 step=7", ranks=3) == ()
    assert hit("kill node=n1 step=7", ranks=2) == ()


@given(st.integers(1, 40), st.integers(1, 40), numbers, st.integers(0, 5))
def test_random_ranks_are_distinct_and_drawn_alike_by_all(count: int, ranks: int, seed: int, index: int) -> None:
    text = f"kill random={count} step=7 seed={seed}"
    drawn = hit(text, index=index, ranks=ranks)
    assert list(drawn) == sorted(set(drawn))
    assert len(drawn) == min(count, ranks)
    assert set(drawn) <= set(range(ranks))
    assert drawn == hit(text, index=index, ranks=ranks)


def test_random_ranks_are_the_same_wherever_they_are_drawn() -> None:
    assert hit("kill random=3 step=7 seed=1", ranks=16) == (1, 13, 14)
    assert hit("exception random=3 step=7 seed=1 phase=data", ranks=16) == (1, 13, 14)


def test_other_seeds_indices_and_numbers_of_ranks_draw_others() -> None:
    draws = {
        "seed": {hit(f"kill random=3 step=7 seed={seed}", ranks=64) for seed in range(20)},
        "index": {hit("kill random=3 step=7", index=index, ranks=64) for index in range(20)},
        "ranks": {hit("kill random=3 step=7", ranks=ranks) for ranks in range(64, 84)},
    }
    assert {name: len(found) for name, found in draws.items()} == dict.fromkeys(draws, 20)


def test_every_rank_is_drawn_alike_often() -> None:
    counts = [0] * 8
    for seed in range(800):
        for rank in hit(f"kill random=2 step=7 seed={seed}", ranks=8):
            counts[rank] += 1
    assert all(150 <= count <= 250 for count in counts), counts  # 200 each, and 4 standard deviations


# When they happen


def test_a_kill_comes_at_its_step_site_and_rank_alone() -> None:
    victim, other = (rank_of("kill rank=1 step=7 phase=optimizer", rank) for rank in (1, 2))
    for phase in Phase:
        assert not victim.fails(phase, step=6)
        assert not other.fails(phase)
        assert victim.fails(phase) == (phase is Phase.OPTIMIZER)
    assert victim.killed == [[1]]
    assert other.calls == []


def test_a_bucket_has_three_sites_and_is_not_the_pass_itself() -> None:
    sites: list[dict[str, Any]] = [{}, {"bucket": 1}]
    sites += [{"bucket": bucket, "at": at} for bucket in (1, 2) for at in ("before", "during", "after")]
    for text, places in {
        "kill rank=1 step=7": [0],
        "kill rank=1 step=7 bucket=1": [1, 2],  # before, unless said otherwise
        "kill rank=1 step=7 bucket=1 at=during": [3],
        "kill rank=1 step=7 bucket=1 at=after": [4],
        "kill rank=1 step=7 bucket=2 at=before": [5],
    }.items():
        rank = rank_of(f"{text} times=always", 1)
        assert [place for place, site in enumerate(sites) if rank.fails(**site)] == places


def test_the_first_of_a_node_takes_the_others_along_and_itself_last() -> None:
    claims: dict[str, str] = {}
    first, late = (rank_of("kill node=1 step=7 times=2", rank, claims) for rank in (2, 3))
    assert first.fails()
    assert first.killed == [[3, 2]]
    assert not late.fails(), "it is being killed, and kills nobody"
    # The second time is not used up by the race of the first.
    assert late.fails(generation=1, rank=2, members=(10, 11, 13), nodes=("n0", "n0", "n1"))
    assert late.killed == [[2]]


def test_random_victims_are_killed_by_whoever_of_them_gets_there_first() -> None:
    text = "kill random=3 step=7"
    drawn = hit(text)
    claims: dict[str, str] = {}
    ranks = [rank_of(text, rank, claims) for rank in reversed(range(4))]
    assert [rank.rank for rank in ranks if rank.fails()] == [drawn[-1]]
    assert [rank.killed for rank in ranks if rank.killed] == [[[drawn[0], drawn[1], drawn[2]]]]


def test_each_random_failure_of_a_schedule_draws_for_itself() -> None:
    schedule = Failures.parse(["kill random=1 step=7"] * 6)
    ranks = [SimulatedRank(schedule, rank, {}) for rank in range(4)]
    met = [sum(rank.fails(generation=generation) for generation in range(9)) for rank in ranks]
    drawn = [hit("kill random=1 step=7", index=index) for index in range(6)]
    assert len(set(drawn)) > 1
    assert met == [drawn.count((rank,)) for rank in range(4)]


def test_an_exception_names_its_words_and_where_it_came() -> None:
    rank = rank_of("exception rank=1 step=7 phase=forward", 1)
    with pytest.raises(
        InjectedFailure, match=r"'exception rank=1 step=7 phase=forward' \(rank 1, step 7, generation 3"
    ):
        rank.reach(Phase.FORWARD, generation=3)
    assert rank.killed == []


def test_an_exception_on_a_node_comes_on_each_of_its_ranks() -> None:
    claims: dict[str, str] = {}
    ranks = [rank_of("exception node=1 step=7", rank, claims) for rank in range(4)]
    assert [rank.fails() for rank in ranks] == [False, False, True, True]
    assert [rank.fails() for rank in ranks] == [False] * 4


def test_who_did_not_get_there_in_time_is_spared() -> None:
    claims: dict[str, str] = {}
    first, late = (rank_of("exception node=1 step=7", rank, claims) for rank in (2, 3))
    assert first.fails()
    assert not late.fails(generation=1, rank=2, members=(10, 11, 13), nodes=("n0", "n0", "n1"))


@pytest.mark.parametrize("kind", ["kill", "exception"])
@pytest.mark.parametrize("target", ["rank=1", "node=0", "random=1", "random=2"])
def test_a_step_that_comes_again_passes(kind: str, target: str) -> None:
    text = f"{kind} {target} step=7"
    claims: dict[str, str] = {}
    ranks = [rank_of(text, rank, claims) for rank in range(4)]
    failed = [rank.fails() for rank in ranks]
    assert True in failed
    # The survivors do it again: with fewer ranks other ones would be drawn, and others have the dead one's rank.
    for place, rank in enumerate(ranks[1:]):
        assert not rank.fails(rank=place, generation=1, members=MEMBERS[1:], nodes=NODES[1:])
    # Everyone starts anew, with the same uids, and remembers nothing.
    assert not any(rank_of(text, rank, claims).fails(generation=2) for rank in range(4))


@pytest.mark.parametrize("kind", ["kill", "exception"])
def test_twice_is_twice_and_always_is_always(kind: str) -> None:
    def happened(times: str) -> list[bool]:
        claims: dict[str, str] = {}
        return [rank_of(f"{kind} rank=1 step=7 {times}", 1, claims).fails(generation=g) for g in range(5)]

    assert happened("") == [True, False, False, False, False]
    assert happened("times=2") == [True, True, False, False, False]
    assert happened("times=always") == [True] * 5


def test_times_are_counted_within_a_generation_too() -> None:
    rank = rank_of("exception rank=1 step=7 times=2", 1)
    assert [rank.fails() for _ in range(4)] == [True, True, False, False]


def test_of_two_that_fit_one_happens_at_a_visit() -> None:
    schedule = Failures.parse(["kill rank=1 step=7"] * 2 + ["exception rank=1 step=7"])
    claims: dict[str, str] = {}
    rank = SimulatedRank(schedule, 1, claims)
    rank.reach()
    rank.reach(generation=1)
    assert rank.killed == [[1], [1]]
    with pytest.raises(InjectedFailure):
        rank.reach(generation=2)
    rank.reach(generation=3)
    assert sorted(claims.values()) == ["0/11", "1/11", "2/11"]


def test_nothing_is_claimed_before_all_else_fits() -> None:
    rank = rank_of("kill rank=1 step=7 bucket=1 at=during", 1)
    rank.reach(bucket=1, at="before")
    rank.reach(bucket=0, at="during")
    rank.reach(Phase.FORWARD)
    assert rank.calls == []
    rank.reach(bucket=1, at="during")
    rank.reach(bucket=1, at="during", generation=1)
    assert rank.calls == ["fired/0/0"]


def test_it_is_armed_at_its_steps_until_used_up() -> None:
    assert not FailureTrigger(Failures(), claim={}.setdefault).is_armed(0)
    schedule = Failures().kill(rank=1, step=7, times=2).exception(rank=1, step=9).kill(rank=1, step=9, times="always")
    rank = SimulatedRank(schedule, 1, {})

    def armed() -> list[int]:
        return [step for step in range(12) if rank.trigger.is_armed(step)]

    assert armed() == [7, 9]
    rank.reach()
    assert armed() == [7, 9]
    rank.reach(generation=1)
    assert armed() == [9]
    assert rank.fails(step=9)
    assert rank.fails(step=9, generation=1)
    assert armed() == [9], "what always happens is never used up"


def test_what_others_have_used_up_is_not_armed_once_that_is_known() -> None:
    claims: dict[str, str] = {}
    assert rank_of("kill rank=1 step=7", 1, claims).fails()
    anew = rank_of("kill rank=1 step=7", 1, claims)
    assert anew.trigger.is_armed(7)
    assert not anew.fails(generation=1)
    assert not anew.trigger.is_armed(7)


def test_without_a_way_to_kill_others_each_rank_ends_itself_and_no_torch_is_needed() -> None:
    code = """
import sys
from evergrad.recovery.failures.schedule import Failures, Phase
from evergrad.recovery.failures.injector import FailureTrigger
assert "torch" not in sys.modules
claims = {"fired/0/0": "0/10"}  # the other rank of the node was first
trigger = FailureTrigger(Failures().kill(node=0, step=7), claim=claims.setdefault)
print("before", flush=True)
trigger.reach(Phase.BACKWARD, step=7, generation=0, rank=1, members=(10, 11), nodes=("n0", "n0"))
print("after", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "before\n"
    assert "rank 1, step 7, generation 0: injected failure 'kill node=n0 step=7': ending this rank" in done.stderr


def test_an_evaluation_is_no_place_of_a_step() -> None:
    sites = FailureSites.__new__(FailureSites)
    sites._trigger = FailureTrigger(Failures(), claim={}.setdefault)
    net: Any = nn.Linear(2, 1)
    net.require_backward_grad_sync = True
    reached: list[Phase] = []
    in_step = [True]
    sites.watch(net, reached.append, lambda: in_step[0])
    net(torch.ones(1, 2))
    assert reached == [Phase.FORWARD, Phase.BACKWARD]
    with torch.no_grad():
        net(torch.ones(1, 2))
    in_step[0] = False
    net(torch.ones(1, 2))
    in_step[0] = True
    net.eval()(torch.ones(1, 2))
    assert reached == [Phase.FORWARD, Phase.BACKWARD]
