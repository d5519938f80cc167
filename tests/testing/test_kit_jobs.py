"""Real jobs by `run_job`: what is read of them, and what is said of those that hang, fail or never begin."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from evergrad.errors import RecoveryError, UsageError
from evergrad.testing import Case, Failures, RunJob, close_forkserver, jobs, sweep

TRAINER = Path(__file__).parent.parent / "recovery" / "trainer.py"
SMALL = ("{folder}/out", "--epochs", 2, "--samples", 48)
STUCK = """
import os, signal, time

def wait_for_ever():
    time.sleep(600)

if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGSTOP)
print("rank 1 begins to wait")
wait_for_ever()
"""
TELLER = """
import os, sys

print(os.getcwd(), os.environ["MY_SETTING"], sys.argv[1:], "torch" in sys.modules)
"""
KILLER = """
import os, pathlib, signal

launcher = os.getppid()
os.kill(int(pathlib.Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
signal.pause()
"""


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_a_job_that_lost_a_rank_to_a_spare_is_the_undisturbed_one(run_job: RunJob, tmp_path: Path) -> None:
    failures = Failures().kill(rank=1, step=4, bucket=0)
    run = run_job(TRAINER, *SMALL, "--await-spare", 2, ranks=2, spares=1, failures=failures)
    run.assert_survived(1)
    run.assert_failures_happened()
    run.assert_no_sample_lost(epochs=2)
    run.assert_no_sample_repeated()
    run.assert_samples_accounted_for()
    undisturbed = run_job(TRAINER, *SMALL, ranks=2)
    run.assert_same_result(undisturbed, state=True)
    assert {rank: one.uid for rank, one in run.weights.items()} == {0: 0, 1: 2}
    assert run.folder == tmp_path / "job-1"
    assert [row["ranks"] for row in run.events("kill_injected")] == [[1]]
    other = run_job(TRAINER, *SMALL[:-1], 64, ranks=2)
    with pytest.raises(AssertionError, match="as undisturbed"):
        other.assert_same_result(undisturbed)
    with pytest.raises(UsageError, match="expected one that no job has used"):
        run_job(TRAINER, *SMALL, folder=run.folder)


@pytest.mark.parametrize(
    "case",
    sweep(TRAINER, *SMALL, ranks=3, steps=(1, 2), buckets=(0,), strategies=("rollback", "forward")).sample(2, seed=1),
    ids=str,
)
def test_the_cases_of_a_sweep_hold(case: Case, run_job: RunJob) -> None:
    run = case.check(run_job)
    assert len(run.weights) == 2
    assert case.job.undisturbed() is case.job.undisturbed()


def test_a_hang_names_who_hangs_and_where(run_job: RunJob, tmp_path: Path) -> None:
    stuck = script(tmp_path, STUCK)
    for limit in (5, 10, 20, 40):  # until both ranks have had the time to begin
        run = run_job(stuck, ranks=2, timeout=limit)
        with pytest.raises(AssertionError) as caught:
            run.assert_no_hang()
        said = str(caught.value)
        assert f"expected that the job ends by itself within {limit} s" in said
        if "rank 0 (uid 0, stopped)" in said and "rank 1 begins to wait" in said:
            break
    assert "rank 0 (uid 0, stopped), rank 1 (uid 1, waiting)" in said
    assert "in wait_for_ever" in said
    assert "rank 1 begins to wait" in said
    for row in run.events("process_started"):
        while not is_gone(row["pid"]):  # the kernel ends it with its launcher, and that may take a moment
            time.sleep(0.01)


def test_what_cannot_be_launched_or_fails_says_why(run_job: RunJob, tmp_path: Path) -> None:
    refused = run_job(TRAINER, *SMALL, ranks=2, failures=["kill rank=7 step=0"])
    assert refused.exit_code == 2
    with pytest.raises(AssertionError, match="rank=7: the job has ranks 0 to 1"):
        refused.assert_finished()
    failed = run_job(script(tmp_path, "raise RuntimeError('no such data')"), ranks=2)
    with pytest.raises(AssertionError, match="no such data"):
        failed.assert_finished()
    with pytest.raises(UsageError, match="timeout"):
        run_job(TRAINER, timeout=0)


@pytest.mark.slow
def test_a_job_sees_the_folder_and_the_environment_of_the_test_forked_or_not(
    run_job: RunJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SETTING", "7")
    script(tmp_path, TELLER)
    for preload in (True, False):
        run = run_job("script.py", "--data", "{folder}/data", preload=preload)
        run.assert_finished()
        assert run.stdout == f"[rank 0] {tmp_path} 7 {['--data', str(run.folder / 'data')]} {preload}\n"


@pytest.mark.slow
def test_whoever_kills_the_process_that_launches_is_told_and_the_next_job_runs(run_job: RunJob, tmp_path: Path) -> None:
    with pytest.raises(RecoveryError, match="ended in the middle of this one"):
        run_job(script(tmp_path, KILLER))
    run_job(script(tmp_path, "")).assert_finished()
    server = jobs._launcher._server
    assert server is not None
    process = server.process
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # between two jobs it costs only the time
    run_job(script(tmp_path, "")).assert_finished()
    close_forkserver()
    close_forkserver()
