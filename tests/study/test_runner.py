"""Running a study: whatever is killed, no trial is lost and none is counted twice."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evergrad as eg
from evergrad.errors import DamagedFile, StudyError, UsageError
from evergrad.formats.version_records import record_bytes
from evergrad.study.folder import StudyFolder
from evergrad.study.plan import Plan
from evergrad.study.plan_files import read_plan_text
from evergrad.study.results import Results, results_of
from evergrad.study.runner import ExecutorSettings, run_study
from evergrad.study.table_formats import format_table
from evergrad.study.trials import Outcome, TrialEnd

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from toy_run import executor  # noqa: E402

MakeToml = Callable[..., str]


@pytest.fixture
def plan_file(tmp_path: Path, toy_toml: MakeToml) -> Callable[..., Path]:
    """A plan in a file."""

    def make(**given: object) -> Path:
        path = tmp_path / "toy.toml"
        path.write_text(toy_toml(**given))
        return path

    return make


def run(plan: Path, out: Path, kind: str = "inline", seen: list[int] | None = None) -> Results:
    """The study, in this process."""
    return run_study(
        Plan.of(read_plan_text(plan)),
        out,
        executor=lambda folder: executor(kind, folder),
        progress=lambda at: seen.append(at.done) if seen is not None and at.phase == "trials" else None,
    )


def counted(out: Path) -> dict[str, int]:
    """How often each trial was run."""
    return {path.name: path.stat().st_size for path in (out / "ran").iterdir()}


def verdicts(results: Results) -> list[tuple[dict[str, object], dict[Outcome, int]]]:
    """Cell by cell."""
    return [(dict(cell.axes), dict(cell.counts)) for cell in results.cells]


def test_a_study_runs_every_trial_once_and_again_none(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    plan, seen = plan_file(trainings=20), list[int]()
    results = run(plan, tmp_path / "out", seen=seen)
    assert results.trials == 40
    assert [cell.trainings for cell in results.cells] == [20, 20]
    assert set(counted(tmp_path / "out").values()) == {1}
    assert len(counted(tmp_path / "out")) == 40
    assert seen == sorted(seen)
    assert seen[-1] == 40
    journal = (tmp_path / "out" / "journal.jsonl").read_bytes()
    assert verdicts(run(plan, tmp_path / "out")) == verdicts(results)
    assert (tmp_path / "out" / "journal.jsonl").read_bytes() == journal


@pytest.mark.parametrize("kind", ["local", "dask"])
def test_killed_at_any_time_the_same_command_runs_exactly_what_is_missing(
    tmp_path: Path, plan_file: Callable[..., Path], kind: str
) -> None:
    plan, out = plan_file(trainings=40), tmp_path / "out"
    (out / "orders").mkdir(parents=True)
    (out / "orders" / "slow").touch()
    (out / "journal.jsonl").touch()  # so that the folder is a study's
    known: set[str] = set()
    for enough in (3, 25):
        with subprocess.Popen(
            [sys.executable, str(HERE / "toy_run.py"), kind, str(plan), str(out)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                phase, done, _ = line.split()
                if phase == "trials" and int(done) >= enough:
                    break
            process.kill()
        now = set(StudyFolder(out).journal_contents().entries)
        assert known < now
        assert len(now) >= enough
        assert not StudyFolder(out).is_running()
        known = now
    (out / "orders" / "slow").unlink()
    before = counted(out)
    results = run(plan, out)
    after = counted(out)
    assert len(after) == results.trials == 80
    assert {name for name in after if after[name] > before.get(name, 0)} == set(after) - known
    assert all(after[name] == before[name] for name in known)
    assert verdicts(results) == verdicts(run(plan, tmp_path / "undisturbed"))


def test_a_worker_killed_in_the_middle_costs_nothing(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    plan, out = plan_file(trainings=10), tmp_path / "out"
    trials = [cell.trial(3) for cell in Plan.of(read_plan_text(plan)).cells]
    (out / "orders").mkdir(parents=True)
    (out / "journal.jsonl").touch()
    for trial in trials:
        (out / "orders" / f"die-once-{trial.id}").touch()
    results = run(plan, out, "local")
    assert [cell.known for cell in results.cells] == [10, 10]
    assert {counted(out)[trial.id] for trial in trials} == {2}


def test_a_trial_that_kills_every_worker_is_unknown_or_its_own_doing(
    tmp_path: Path, plan_file: Callable[..., Path]
) -> None:
    plan, out = plan_file(trainings=6), tmp_path / "out"
    lost, crashed = (cell.trial(2) for cell in Plan.of(read_plan_text(plan)).cells)
    (out / "orders").mkdir(parents=True)
    (out / "journal.jsonl").touch()
    (out / "orders" / f"die-{lost.id}").write_text("SIGKILL")
    (out / "orders" / f"die-{crashed.id}").write_text("SIGSEGV")
    results = run(plan, out, "local")
    assert results.cells[0].counts[Outcome.UNKNOWN] == 1
    assert [cell.trainings for cell in results.cells] == [6, 6]
    assert any("not complete" in note for note in results.notes)
    entries = StudyFolder(out).journal_contents().entries
    assert entries[lost.id].observation.end is TrialEnd.LOST
    assert "SIGKILL" in entries[lost.id].observation.reason
    assert entries[crashed.id].observation.end is TrialEnd.CRASHED
    (out / "orders" / f"die-{lost.id}").unlink()
    before = counted(out)
    results = run(plan, out)
    assert results.cells[0].counts[Outcome.UNKNOWN] == 0
    assert {name for name, times in counted(out).items() if times > before[name]} == {lost.id}


def test_one_process_at_a_time_runs_a_study(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    plan, out = plan_file(), tmp_path / "out"
    with StudyFolder(out).locked():
        assert StudyFolder(out).is_running()
        with pytest.raises(StudyError, match=rf"another process \(process {os.getpid()}\) runs this study"):
            run(plan, out)
    assert not StudyFolder(out).is_running()
    run(plan, out)


def test_another_studys_folder_and_a_strangers_are_refused(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    plan = plan_file()
    run(plan, tmp_path / "out")
    plan.write_text(plan.read_text().replace('study = "toy"', 'study = "other"'))
    with pytest.raises(UsageError, match="holds the study 'toy', not 'other'"):
        run(plan, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="is not empty, and holds no study"):
        run(plan, tmp_path / "mine")
    with pytest.raises(UsageError, match=r"holds no study. 'evergrad study run NAME --out DIR' makes one"):
        results_of(tmp_path / "nowhere")


def test_damaged_lines_are_said_and_their_trials_run_again(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    plan, out = plan_file(trainings=5), tmp_path / "out"
    run(plan, out)
    path = out / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:50] + b"#" + lines[4][51:]
    path.write_bytes(b"".join(lines)[:-9])
    told = results_of(out)
    assert [note.split(":")[0] for note in told.notes[:2]] == [
        "journal.jsonl line 5",
        f"journal.jsonl line {len(lines)}",
    ]
    before = counted(out)
    results = run(plan, out)
    assert [cell.known for cell in results.cells] == [5, 5]
    assert sum(counted(out).values()) - sum(before.values()) == 2


def test_a_cell_stops_when_it_knows_enough_and_goes_no_further_when_asked_again(
    tmp_path: Path, plan_file: Callable[..., Path]
) -> None:
    more = "half_width = 0.15\nstop = true\n"
    plan = plan_file(trainings=2000, more=more)
    results = run(plan, tmp_path / "out")
    assert all(10 <= cell.trainings < 500 for cell in results.cells)
    assert all(high - low <= 0.30 for low, high in (cell.interval for cell in results.cells))
    assert results.trials == sum(cell.trainings for cell in results.cells)
    assert results.interval == "anytime"
    ran = sum(counted(tmp_path / "out").values())
    assert verdicts(run(plan, tmp_path / "out")) == verdicts(results)
    assert sum(counted(tmp_path / "out").values()) == ran


def test_a_plan_may_grow_and_keeps_what_it_has(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    run(plan_file(trainings=4), tmp_path / "out")
    before = counted(tmp_path / "out")
    results = run(plan_file(trainings=9), tmp_path / "out")
    assert [cell.known for cell in results.cells] == [9, 9]
    after = counted(tmp_path / "out")
    assert all(after[name] == 1 for name in before)
    assert len(after) == 18


def test_work_that_cannot_be_done_stops_the_study_with_its_reason(
    tmp_path: Path, plan_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import toy_work

    def broken(folder: Path, work: object) -> dict[str, object]:
        raise UsageError("mnist: not found in $EVERGRAD_DATA")

    monkeypatch.setattr(toy_work, "perform", broken)
    with pytest.raises(StudyError, match="the golden run cannot be made: mnist: not found"):
        run(plan_file(), tmp_path / "out")
    monkeypatch.undo()
    assert run(plan_file(), tmp_path / "out").trials == 6


def test_an_interrupted_run_lets_go_of_its_lock(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    plan, out = plan_file(trainings=400), tmp_path / "out"
    (out / "orders").mkdir(parents=True)
    (out / "orders" / "slow").touch()
    (out / "journal.jsonl").touch()
    with subprocess.Popen(
        [sys.executable, str(HERE / "toy_run.py"), "local", str(plan), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert next(line for line in process.stdout if line.startswith("trials"))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert not StudyFolder(out).is_running()


def test_how_many_trials_were_under_way_when_a_cell_knew_enough_changes_nothing(
    tmp_path: Path, plan_file: Callable[..., Path]
) -> None:
    plan = plan_file(trainings=500, more="half_width = 0.15\nstop = true\n")
    alone, crowd = run(plan, tmp_path / "one"), run(plan, tmp_path / "two", "local")
    assert verdicts(alone) == verdicts(crowd)
    assert [cell.interval for cell in alone.cells] == [cell.interval for cell in crowd.cells]


def test_trials_of_another_golden_run_do_not_count_and_run_again(
    tmp_path: Path, plan_file: Callable[..., Path]
) -> None:
    plan, out = plan_file(trainings=5), tmp_path / "out"
    run(plan, out)
    [record] = out.glob("golden/*/golden.json")
    told = json.loads(record.read_text().replace("[0.8, 0.9]", "[0.8, 0.91]"))
    record.write_bytes(record_bytes({name: value for name, value in told.items() if name != "check"}))
    results = results_of(out)
    assert [cell.trainings for cell in results.cells] == [0, 0]
    assert any("10 trials began with another golden run" in note for note in results.notes)
    before = sum(counted(out).values())
    assert [cell.known for cell in run(plan, out).cells] == [5, 5]
    assert sum(counted(out).values()) == before + 10


def test_only_what_the_plan_has_is_replayed_whatever_a_journal_says(
    tmp_path: Path, plan_file: Callable[..., Path]
) -> None:
    from evergrad.study.folder import TrialJournal
    from evergrad.study.replay import replay_trial

    plan, out = plan_file(), tmp_path / "out"
    run(plan, out)
    entry = next(iter(StudyFolder(out).journal_contents().entries.values()))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    training = replace(entry.trial.training, workload=f"{tmp_path / 'evil.py'}:f")  # type: ignore[arg-type]
    with TrialJournal(out / "journal.jsonl") as journal:
        journal.append([replace(entry, trial=replace(entry.trial, id="feedbeef", training=training))])
    with pytest.raises(UsageError, match="unknown trial 'feedbeef'"):
        replay_trial(out, "feedbeef")
    assert not (tmp_path / "ran").exists()
    assert any("1 trials in the journal are not, or no longer, of this plan" in note for note in results_of(out).notes)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("study.json", "[" * 100_000),
        ("study.json", '{"schema_version": 1, "plan": 5, "name": "", "base": "", "scale": "", "overrides": {}}'),
        ("golden.json", "[" * 100_000),
        ("golden.json", '{"schema_version": 1}'),
    ],
)
def test_a_damaged_record_is_one_line_and_the_journal_stays(
    tmp_path: Path, plan_file: Callable[..., Path], name: str, text: str
) -> None:
    plan, out = plan_file(), tmp_path / "out"
    run(plan, out)
    journal = (out / "journal.jsonl").read_bytes()
    [path] = out.rglob(name)
    path.write_text(text)
    with pytest.raises(DamagedFile, match=name):
        results_of(out)
    if name == "study.json":
        assert run(plan, out).trials == 6  # the same command writes it again
    assert (out / "journal.jsonl").read_bytes().startswith(journal)


def test_a_kill_while_the_plan_was_written_locks_nobody_out(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".study.json.abc.partial").write_text("{")
    assert run(plan_file(), out).trials == 6
    assert not list(out.glob("*.partial"))


def test_a_study_runs_from_a_name_a_path_or_a_plan(tmp_path: Path, plan_file: Callable[..., Path]) -> None:
    path = plan_file(trainings=9)
    inline = executor("inline", tmp_path / "out")
    lines: list[str] = []
    results = eg.run_study(
        path, tmp_path / "out", trials_per_cell=4, executor=inline, progress=lambda at: lines.append(str(at))
    )
    assert [cell.trainings for cell in results.cells] == [4, 4]
    assert results == results_of(tmp_path / "out")
    assert results.facts["command"] == f"evergrad study run {path} --trials-per-cell 4"
    assert lines[0] == "golden runs: 0 of 1"
    assert lines[-1].startswith("trials: 8 of 8")
    assert format_table(results.table("paper"), "markdown").startswith("**toy: N-EV %**")
    # A plan that was read before has the same trials: nothing is run again, and no executor is made.
    again = eg.run_study(Plan.read(path, trials_per_cell=4), str(tmp_path / "out"), executor="dask")
    assert verdicts(again) == verdicts(results)
    assert set(counted(tmp_path / "out").values()) == {1}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"plan": "bitflip-nevv"}, "Did you mean 'bitflip-nev'? The gallery has bit-mask, bit-position, bitflip-nev"),
        ({"scale": "huge"}, "expected tiny, small, gpu or paper"),
        ({"device": "tpu"}, "device: expected cpu, cuda or cuda:1, found 'tpu'"),
        ({"workers": 0}, "workers: expected a whole number, 1 or more, found 0"),
        ({"executor": "cloud"}, "executor: expected local, dask, slurm or in-process, found 'cloud'"),
        ({"plan": Plan.read("inference"), "seed": 3}, "seed: goes with a name or a path, found a Plan"),
    ],
)
def test_a_wrong_argument_is_one_line_and_makes_no_folder(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        eg.run_study(**{"plan": "bitflip-nev", "out": tmp_path / "out", **given})
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_settings_of_another_executor_are_refused() -> None:
    with pytest.raises(UsageError, match="partition: goes with executor slurm, found executor dask"):
        ExecutorSettings("dask", partition="short")
