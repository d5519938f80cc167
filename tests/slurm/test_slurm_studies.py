"""Studies whose workers are jobs of a real Slurm: the same journal whatever is cancelled or killed, and no job left."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from study_run import run

from evergrad.study.executors.base import Task, TaskStatus
from evergrad.study.executors.slurm import SlurmCluster
from evergrad.study.folder import StudyFolder
from evergrad.study.plan import Plan
from evergrad.study.plan_files import read_plan_text
from evergrad.study.results import Results
from evergrad.testing import ExecutorContract

ROOT = Path(__file__).parent.parent.parent
REHEARSAL = "evergrad.study.executors.selftest:perform"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PLAN = f"""
study = "toy"
seed = 3

[axes]
flips = [1, 4]

[training]
workload = "{ROOT}/tests/study/toys.py:small"
batch_size = 32
learning_rate = 0.05

[sampling]
trainings = TRAININGS
"""


@pytest.fixture(scope="module", autouse=True)
def slurm(cluster: Cluster) -> Iterator[None]:
    """Commands of Slurm's speak to the cluster of the tests, and at the end nothing of ours is left in it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "RES_OPTIONS"):
            patch.setenv(name, cluster.env[name])
        yield
        until(lambda: not queue(), "jobs are left over")


def queue(*options: str) -> list[str]:
    """The jobs that are not over."""
    command = ["squeue", "--noheader", "--format=%i %T %j", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def until(is_so: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end, f"{what}: {queue()}"
        time.sleep(0.1)


def plan_file(folder: Path, trainings: int) -> Path:
    path = folder / "toy.toml"
    path.write_text(PLAN.replace("TRAININGS", str(trainings)))
    return path


def orders(out: Path, *names: str) -> None:
    (out / "orders").mkdir(parents=True)
    (out / "journal.jsonl").touch()  # so that the folder is a study's
    for name in names:
        (out / "orders" / name).touch()


def counted(out: Path) -> dict[str, int]:
    """How often each trial was run."""
    return {path.name: path.stat().st_size for path in (out / "ran").iterdir()}


def seen(out: Path) -> dict[str, dict[str, Any]]:
    """What each trial of a journal has shown, but for how long it took."""
    entries = StudyFolder(out).journal_contents().entries
    return {id: {**entry.observation.to_json(), "seconds": 0} for id, entry in entries.items()}


def verdicts(results: Results) -> list[tuple[Any, Any]]:
    return [(dict(cell.axes), dict(cell.counts)) for cell in results.cells]


class TestSlurmJobs(ExecutorContract):
    executor = "evergrad.study.executors.slurm:SlurmCluster"
    options = {"jobs": 2, "minutes": 10}  # noqa: RUF012


def test_a_study_by_slurm_has_the_journal_of_one_by_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_file(tmp_path, 6)
    journals = []
    for options in (["--executor", "slurm", "--workers", "2", "--partition", "all"], ["--workers", "1"]):
        out = tmp_path / f"out-{len(journals)}"
        words = [sys.executable, "-m", "evergrad", "study", "run", str(plan), *options, "--out", str(out)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        journals.append(seen(out))
        assert not list((out / "slurm").iterdir() if (out / "slurm").exists() else ())
        with capsys.disabled():
            text = (
                f"$ evergrad {shlex.join(words[3:])}\n{next(x for x in done.stdout.splitlines() if 'trials in' in x)}"
            )
            print("\n" + text.replace(str(tmp_path), "DIR"))
    assert len(journals[0]) == 12
    assert journals[0] == journals[1]


def test_a_trial_whose_job_is_cancelled_runs_again(tmp_path: Path) -> None:
    plan, out = plan_file(tmp_path, 10), tmp_path / "out"
    trial = Plan.of(read_plan_text(plan)).cells[0].trial(4)
    orders(out, f"stay-{trial.id}")
    cancelled: list[str] = []

    def cancel() -> None:
        until(lambda: list(out.glob("stays-in-*")), "the trial does not begin")
        cancelled.append(next(out.glob("stays-in-*")).name.removeprefix("stays-in-"))
        subprocess.run(["scancel", cancelled[0]], check=True, timeout=60)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    results = run(2, plan, out)
    canceller.join()
    assert [cell.known for cell in results.cells] == [10, 10]
    assert len(cancelled) == 1
    assert set(counted(out).values()) == {1}  # the first time it did not get as far as that
    assert len(counted(out)) == 20


def test_what_slurm_says_of_a_job_that_is_gone_is_told(tmp_path: Path) -> None:
    orders(tmp_path)
    os.mkfifo(tmp_path / "alive")
    pipe = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    with SlurmCluster(tmp_path, REHEARSAL, jobs=1, minutes=10) as executor:
        executor.submit(Task("stays", {"do": "stay", "pipe": "alive", "inside": "command"}))
        until(lambda: executor.collect(0.1) == [] and _read(pipe), "the task does not begin")
        (job,) = queue("--states=RUNNING")
        subprocess.run(["scancel", job.split()[0]], check=True, timeout=60)
        executor.submit(Task("next", {"do": "echo", "value": 1}))
        ended = {one.id: one for one in collected(executor, 2)}
    os.close(pipe)
    assert ended["stays"].status is TaskStatus.LOST
    assert f"Slurm job {job.split()[0]} on eg" in ended["stays"].reason
    assert "CANCELLED" in ended["stays"].reason
    assert ended["next"].status is TaskStatus.DONE


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 100)
    except BlockingIOError:
        return b""


def collected(executor: SlurmCluster, count: int) -> list[Any]:
    ended: list[Any] = []
    end = time.monotonic() + 120
    while len(ended) < count:
        assert time.monotonic() < end, (ended, queue())
        ended += executor.collect(1.0)
    return ended


def test_a_job_whose_time_is_nearly_over_finishes_its_task_and_is_replaced(tmp_path: Path) -> None:
    with SlurmCluster(tmp_path, REHEARSAL, jobs=1, minutes=10) as executor:
        executor.submit(Task("first", {"do": "echo", "value": 1}))
        (first,) = collected(executor, 1)
        (job,) = queue("--states=RUNNING")
        subprocess.run(["scancel", "--signal=USR2", job.split()[0]], check=True, timeout=60)  # as Slurm does by itself
        until(lambda: executor.collect(0.1) == [] and not queue(), "the job does not leave")
        executor.submit(Task("second", {"do": "echo", "value": 1}))
        (second,) = collected(executor, 1)
    assert [first.status, second.status] == [TaskStatus.DONE, TaskStatus.DONE]
    assert first.result["process"] != second.result["process"]


def test_a_partition_that_is_not_there_is_told_in_slurms_own_words(tmp_path: Path) -> None:
    with SlurmCluster(tmp_path, REHEARSAL, jobs=1, partition="nowhere") as executor:
        executor.submit(Task("never", {"do": "echo", "value": 1}))
        (ended,) = collected(executor, 1)
    assert ended.status is TaskStatus.BROKEN
    assert "no Slurm job gets ready, 3 have tried" in ended.reason
    assert "invalid partition specified: nowhere" in ended.reason


def test_when_the_runner_is_killed_jobs_end_by_themselves_and_what_is_missing_is_run(tmp_path: Path) -> None:
    plan, out = plan_file(tmp_path, 60), tmp_path / "out"
    orders(out, "slow")
    program = Path(__file__).parent / "study_run.py"
    with subprocess.Popen(
        [sys.executable, str(program), "12", str(plan), str(out)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            phase, done, _ = line.split()
            if phase == "trials" and int(done) >= 5:
                break
        assert queue()
        process.kill()
    until(lambda: not queue(), "jobs outlive their runner")
    known = set(StudyFolder(out).journal_contents().entries)
    assert 5 <= len(known) < 120
    (out / "orders" / "slow").unlink()
    before = counted(out)
    results = run(2, plan, out)
    after = counted(out)
    assert len(after) == results.trials == 120
    assert {name for name in after if after[name] > before.get(name, 0)} == set(after) - known
    assert not list((out / "slurm").iterdir())
    undisturbed = tmp_path / "undisturbed"
    orders(undisturbed)
    assert verdicts(results) == verdicts(run(4, plan, undisturbed))
