"""Scripts in the idiom of public projects under random schedules of failures, compared with plain DDP bit for bit.

`python tests/recovery/idiom_sweep.py` runs 40 schedules for each of two scripts and prints a table; `--only nano:7`
runs one of them and keeps its folder. The same number gives the same schedule everywhere. `test_idioms.py` runs a few.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from evergrad.testing import JobRun, close_forkserver, run_job

SCRIPTS = Path(__file__).parent / "idioms"
SCHEDULES = 40
_PHASES = ("data", "forward", "backward", "optimizer")
_STEPS = {("nano", 2): 12, ("nano", 3): 12, ("mini", 2): 18, ("mini", 3): 12}
_PER_EPOCH = {("mini", 2): 6, ("mini", 3): 4}
_TIMEOUT_S = float(os.environ.get("EVERGRAD_TEST_LIMIT_S", "60"))
_LATE, _TOO_FEW, _PREEMPTED = 1, 4, 75


@dataclass(frozen=True)
class Case:
    """One job, or two launches of it, under a schedule of failures."""

    script: str
    number: int = -1
    """Of a drawn schedule."""
    ranks: int = 2
    spares: int = 0
    strategy: str = "rollback"
    failures: tuple[str, ...] = ()
    options: tuple[object, ...] = ()
    arguments: tuple[str, ...] = ()
    """The script's own, besides the folder of results."""
    dies: str = ""
    """`PLACE:RANK`: a rank that kills itself outside of a step."""
    awaits: str = ""
    """`STEP:UID`: before this step all wait until a process that was started later waits to join."""
    relaunched: bool = False
    """All ranks are asked to leave, and a second launch goes on from the checkpoint."""
    may_end: bool = False
    """No rank that has the state may be left: the job ends with code 4 then."""
    must_be_exact: bool = False
    """Documented to end as without failures, to the last bit."""

    @property
    def name(self) -> str:
        """`nano:7`, as `--only` takes it."""
        return f"{self.script}:{self.number}"

    def __str__(self) -> str:
        words = [f"-n {self.ranks}", f"--spares {self.spares}", f"--strategy {self.strategy}"]
        words += [f'--fail "{failure}"' for failure in self.failures]
        words += [str(option) for option in self.options]
        words += [f"{self.script}_trainer.py", *self.arguments]
        words += [f"dies={self.dies}"] if self.dies else []
        words += [f"awaits={self.awaits}"] if self.awaits else []
        words += ["relaunched"] if self.relaunched else []
        return " ".join(words)


@dataclass
class Outcome:
    """How a case ended."""

    wrong: list[str] = field(default_factory=list)
    exact: object = None
    """As the summary of the run says."""
    reason: str = ""
    """Why it is not exact, or why that is not known."""
    same: bool | None = None
    """Whether all ranks ended as in plain DDP; None where that cannot be said."""
    said: str = ""
    seconds: float = 0.0


def draw(script: str, number: int) -> Case:
    """The schedule of this number: the kinds take turns, and everything else is drawn."""
    drawn = random.Random(f"{script} {number}")
    kind = list(_DRAW)[number % len(_DRAW)]
    ranks = drawn.choice((2, 3))
    case = {"script": script, "number": number, "ranks": ranks} | _DRAW[kind](drawn, script, ranks)
    arguments = list(case.pop("arguments", ()))
    if script == "nano":
        arguments += [f"--lr_first={drawn.randrange(2)}", f"--ddp_by_env={drawn.randrange(2)}"]
    else:
        arguments += [f"--careful={drawn.randrange(2)}"]
    return Case(arguments=tuple(arguments), **case)


def cases(script: str, count: int = SCHEDULES, first: int = 0) -> list[Case]:
    """So many schedules of a script."""
    return [draw(script, number) for number in range(first, first + count)]


def _step(drawn: random.Random, script: str, ranks: int) -> int:
    """A step: the first, the last, one at either end of an epoch, or any."""
    steps, per_epoch = _STEPS[script, ranks], _PER_EPOCH.get((script, ranks), 4)
    edges = [0, 1, steps - 1, steps - 2, per_epoch - 1, per_epoch, 2 * per_epoch - 1, 2 * per_epoch]
    return drawn.choice([*edges, *(drawn.randrange(steps) for _ in edges)])


def _lost(drawn: random.Random, script: str, ranks: int, kinds: tuple[str, ...] = ("kill", "exception", "stop")) -> str:
    kind, step = drawn.choice(kinds), _step(drawn, script, ranks)
    return f"{kind} rank={drawn.randrange(ranks)} step={step} phase={drawn.choice(_PHASES)}"


def _saving(drawn: random.Random, script: str) -> list[str]:
    every = drawn.choice((1, 3, 5))
    names = ("checkpoints", "checkpoint_interval") if script == "nano" else ("checkpoints", "every")
    return [f"--{names[0]}={{folder}}/versions", f"--{names[1]}={every}"]


def _replaced(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    return {"spares": 1, "failures": (_lost(drawn, script, ranks),), "must_be_exact": True}


def _left(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    return {"spares": 1, "failures": (_lost(drawn, script, ranks, ("leave",)),), "must_be_exact": True}


def _fewer(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    kinds = ("kill", "exception", "stop", "leave")
    return {
        "failures": (_lost(drawn, script, ranks, kinds),),
        "options": ("--batch-policy", drawn.choice(("shrink", "constant", "scale_lr"))),
    }


def _forward(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    failure = _lost(drawn, script, ranks)
    if drawn.random() < 0.5:
        failure = failure.partition(" phase")[0] + f" bucket=0 at={drawn.choice(('before', 'during', 'after'))}"
    return {"strategy": "forward", "spares": drawn.randrange(2), "failures": (failure,)}


def _twice(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    steps = _STEPS[script, ranks]
    first = drawn.randrange(steps - 3)
    second = drawn.randrange(first + 2, steps)
    texts = [
        f"{drawn.choice(('kill', 'leave', 'exception'))} rank={drawn.randrange(ranks)} step={step} "
        f"phase={drawn.choice(_PHASES)}"
        for step in (first, second)
    ]
    return {"spares": 2, "failures": tuple(texts), "must_be_exact": True}


def _together(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    first = _lost(drawn, script, ranks, ("kill",))
    step, rank = _step(drawn, script, ranks), drawn.randrange(ranks)
    if drawn.random() < 0.6:
        step = int(first.split("step=")[1].split()[0])
        second = f"kill rank={rank} step={step} phase={drawn.choice(('agreement', 'recovery'))}"
    else:
        second = f"kill rank={rank} step={step} phase={drawn.choice(_PHASES)}"
    return {"spares": drawn.choice((1, 2)), "failures": (first, second), "may_end": True}


def _grown(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    options: tuple[object, ...] = ("--max-ranks", ranks + 1)
    case: dict[str, Any] = {"spares": 1, "options": options, "awaits": f"{drawn.randrange(4)}:{ranks}"}
    if drawn.random() < 0.5:
        case["failures"] = (_lost(drawn, script, ranks, ("kill", "leave")),)
    return case


def _respawned(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    step = drawn.randrange(_STEPS[script, ranks] // 2)
    failure = f"{drawn.choice(('kill', 'leave'))} rank={drawn.randrange(ranks)} step={step} phase=forward"
    return {"failures": (failure,), "options": ("--respawn",), "awaits": f"{step + 2}:{ranks}"}


def _restarted(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    failure, saving = _lost(drawn, script, ranks), _saving(drawn, script)
    case = {"strategy": "restart", "failures": (failure,), "arguments": saving}
    if drawn.random() < 0.5:
        # Without a version a spare begins with initial weights and random numbers of its own.
        has_version = int(failure.split("step=")[1].split()[0]) > int(saving[1].split("=")[1])
        return case | {"spares": 1, "must_be_exact": has_version}
    return case | {"options": ("--min-ranks", ranks)}


def _preempted(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    step = min(_step(drawn, script, ranks), _STEPS[script, ranks] - 2)
    return {
        "failures": (f"leave random={ranks} step={step} phase={drawn.choice(_PHASES)}",),
        "arguments": _saving(drawn, script), "relaunched": True,
    }  # fmt: skip


def _died(drawn: random.Random, script: str, ranks: int) -> dict[str, Any]:
    places = {"nano": ("eval", "clip"), "mini": ("eval", "snapshot")}
    place = drawn.choice(places[script])
    rank = drawn.randrange(ranks) if (script, place) in (("mini", "eval"), ("nano", "clip")) else 0
    return {"spares": 1, "dies": f"{place}:{rank}"}


_DRAW = {
    "replaced": _replaced, "left": _left, "fewer": _fewer, "forward": _forward, "twice": _twice,
    "together": _together, "grown": _grown, "respawned": _respawned, "restarted": _restarted,
    "preempted": _preempted, "died": _died,
}  # fmt: skip


def run_plain(script: str, ranks: int, folder: Path) -> dict[int, Any]:
    """The results of plain DDP with so many ranks, by rank."""
    ran = run_job(
        SCRIPTS / f"{script}_plain.py", _out(script), ranks=ranks, timeout=_TIMEOUT_S, folder=folder / "plain"
    )
    ran.assert_finished()
    found = _results(folder / "plain")
    assert sorted(found) == list(range(ranks)), f"expected results of {ranks} ranks, found {sorted(found)}"
    return {rank: results[0] for rank, results in found.items()}


def run_case(case: Case, plain: Mapping[int, Any], folder: Path) -> Outcome:
    """Run a case in a folder and in shared memory of its own, and judge it."""
    outcome, begun = Outcome(), time.monotonic()
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="evergrad-test-", dir=root) as shm, _environment({"EVERGRAD_SHM": shm}):
        ran = _launch(case, folder / "job", case.failures, folder)
        if case.relaunched and ran.exit_code == _PREEMPTED:
            shutil.rmtree(folder / "job" / "out", ignore_errors=True)
            ran = _launch(case, folder / "again", (), folder)
    _judge(case, ran, plain, outcome)
    shown = (f"--- end of {name}\n" + "\n".join(text.splitlines()[-30:]) for name, text in _printed(ran).items())
    outcome.said = "\n".join(shown)
    outcome.seconds = time.monotonic() - begun
    return outcome


def _printed(ran: JobRun) -> dict[str, str]:
    return {"stderr": ran.stderr, "stdout": ran.stdout}


def _launch(case: Case, folder: Path, failures: tuple[str, ...], shared: Path) -> JobRun:
    awaited = ",".join(str(case.ranks + spare) for spare in range(case.spares))
    environment = {"EVERGRAD_WAIT_FOR_SPARES": awaited, "IDIOM_AWAIT": case.awaits}
    if case.dies:
        environment["IDIOM_DIE"] = f"{case.dies}:{shared / 'died'}"
    with _environment(environment):
        return run_job(
            SCRIPTS / f"{case.script}_trainer.py", _out(case.script),
            *(argument.replace("{folder}", str(shared)) for argument in case.arguments),
            ranks=case.ranks, spares=case.spares, strategy=case.strategy, failures=failures,
            options=case.options, timeout=_TIMEOUT_S, folder=folder,
        )  # fmt: skip


def _judge(case: Case, ran: JobRun, plain: Mapping[int, Any], outcome: Outcome) -> None:
    """Add everything that is not as documented to `outcome.wrong`."""
    outcome.exact = ran.summary.get("exact")
    outcome.reason = str(ran.summary.get("inexact") or ran.summary.get("unverified") or "")
    if ran.timed_out:
        outcome.wrong.append(f"hangs: {', '.join(map(str, ran.stuck))}")
        return
    if ran.exit_code == _TOO_FEW and case.may_end:
        return
    found = _results(ran.folder)
    if ran.exit_code == _LATE and "finished without it" in str(ran.summary.get("message")):
        # The script leaves its loop after the last step: the job was over when a rank was lost, for all but that rank.
        outcome.wrong += [
            f"rank {rank} differs from plain DDP: {differs}"
            for rank, (result, *_) in found.items()
            if (differs := difference(plain[rank], result))
        ]
        if not found:
            outcome.wrong.append("said that the others had finished, but nobody has left results")
        return
    if ran.exit_code != 0:
        outcome.wrong.append(f"exit code {ran.exit_code}: {ran.summary.get('message')}")
        return
    size = len(ran.events("plan")[-1]["members"])
    counts = {rank: len(results) for rank, results in found.items()}
    if counts != dict.fromkeys(range(size), 1):
        outcome.wrong.append(f"{size} ranks in the last plan, results by rank: {dict(sorted(counts.items()))}")
    results = [result for _, several in sorted(found.items()) for result in several]
    if not results:
        outcome.wrong.append("no results")
        return
    for result in results[1:]:
        if differs := difference(results[0], result):
            outcome.wrong.append(f"rank {result['rank']} differs from rank {results[0]['rank']}: {differs}")
    if case.script == "nano" and results[0]["step"] != _STEPS["nano", case.ranks]:
        outcome.wrong.append(f"{results[0]['step']} steps instead of {_STEPS['nano', case.ranks]}")
    differs = _difference_from_plain(case, results, plain)
    outcome.same = not differs
    if outcome.exact is True and differs:
        outcome.wrong.append(f"said to be exact, but {differs}")
    if outcome.exact is not True and not outcome.reason:
        outcome.wrong.append("not said to be exact, and no reason is given")
    if case.must_be_exact and outcome.exact is False:
        outcome.wrong.append(f"documented to be exact, is not: {outcome.reason}")
    # A second launch keeps books of the epochs that it has seen.
    if case.script == "mini" and not case.relaunched and case.strategy != "forward":
        try:
            ran.assert_no_sample_lost(epochs=3)
            ran.assert_no_sample_repeated(epochs=3)
        except AssertionError as error:
            outcome.wrong.append("samples: " + " ".join(str(error).split("\n")[:3]))


def _difference_from_plain(case: Case, results: list[Any], plain: Mapping[int, Any]) -> str:
    if sorted(result["rank"] for result in results) != sorted(plain):
        return f"ranks {sorted(result['rank'] for result in results)} instead of {sorted(plain)}"
    for result in results:
        if differs := difference(plain[result["rank"]], result):
            return f"rank {result['rank']} differs from plain DDP: {differs}"
        # The loop of nano_plain.py fetches one batch more than it uses.
        if case.script == "mini" and not torch.equal(plain[result["rank"]]["generator"], result["generator"]):
            return f"rank {result['rank']} has drawn other random numbers than in plain DDP"
    return ""


def difference(expected: Any, found: Any) -> str:
    """The first thing in which two results differ besides their rank and generator; nothing if there is none."""
    if expected["step"] != found["step"]:
        return f"{found['step']} steps instead of {expected['step']}"
    for name, tensor in expected["model"].items():
        if not _same(tensor, found["model"].get(name)):
            return f"model {name}: {_shown(tensor)} and {_shown(found['model'].get(name))}"
    for index, (one, other) in enumerate(
        zip(expected["optimizer"]["param_groups"], found["optimizer"]["param_groups"], strict=True)
    ):
        for key in one.keys() | other.keys():
            if one.get(key) != other.get(key):
                return f"optimizer param_groups[{index}][{key!r}]: {one.get(key)} and {other.get(key)}"
    one, other = expected["optimizer"]["state"], found["optimizer"]["state"]
    if one.keys() != other.keys():
        return f"optimizer state of {len(one)} and {len(other)} parameters"
    for index in one:
        for key in one[index].keys() | other[index].keys():
            if not _same(one[index].get(key), other[index].get(key)):
                return (
                    f"optimizer state {index} {key}: {_shown(one[index].get(key))} and {_shown(other[index].get(key))}"
                )
    return ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.flatten()[0].item()!r}…" if value.numel() else "empty"
    return repr(value)


def _out(script: str) -> str:
    return "--out_dir={folder}/out" if script == "nano" else "--out={folder}/out"


def _results(folder: Path) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for path in sorted((folder / "out").glob("rank*.pt")):
        result = torch.load(path, weights_only=True)
        found.setdefault(result["rank"], []).append(result)
    return found


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main() -> int:
    """Run all cases, or some; one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="cases, as nano:7; their folders are kept")
    parser.add_argument("--scripts", nargs="+", choices=("nano", "mini"), default=("nano", "mini"))
    parser.add_argument("--count", type=int, default=SCHEDULES, help="schedules of each script")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--script-argument", action="append", default=[], help="a further one of the scripts")
    parser.add_argument("--list", action="store_true", help="show the schedules and run nothing")
    options = parser.parse_args()
    chosen = [case for script in options.scripts for case in cases(script, options.count, options.first)]
    if options.only:
        chosen = [draw(script, int(number)) for script, _, number in (text.partition(":") for text in options.only)]
    chosen = [replace(case, arguments=(*case.arguments, *options.script_argument)) for case in chosen]
    if options.list:
        print("\n".join(f"{case.name:8} {case}" for case in chosen))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="evergrad-idioms-"))
    plain: dict[tuple[str, int], Any] = {}
    failed, begun = 0, time.monotonic()
    print("case     result  exact  as plain DDP  schedule")
    for case in chosen:
        key = (case.script, case.ranks)
        if key not in plain:
            plain[key] = run_plain(*key, folder / f"{case.script}-{case.ranks}")
        place = folder / case.name.replace(":", "-")
        outcome = run_case(case, plain[key], place)
        failed += bool(outcome.wrong)
        same = {True: "yes", False: "no", None: "?"}[outcome.same]
        exact = {True: "yes", False: "no"}.get(outcome.exact, "?")  # type: ignore[call-overload]
        print(f"{case.name:8} {'FAILED' if outcome.wrong else 'ok':6}  {exact:5}  {same:12}  {case}", flush=True)
        for line in [*outcome.wrong, *([outcome.reason] if case.must_be_exact and outcome.reason else [])]:
            print(f"         {line}", flush=True)
        if options.only:
            print(f"{outcome.said}\n{place}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    close_forkserver()
    if not options.only:
        shutil.rmtree(folder)
    print(f"{len(chosen)} schedules, {failed} failed, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
